"""Every op that has a formula, alone: its kernel in the interpreter equals the op, in all dtypes and odd sizes."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen import composites, constants, rows
from autopar.codegen.build import build
from autopar.codegen.cluster import Group
from autopar.codegen.demand import Unfusable
from autopar.codegen.formulas import POINTWISE
from autopar.codegen.group import run
from autopar.codegen.index import NotLinear
from autopar.codegen.tiles import TooWide
from autopar.passes.fuse import code_of
from autopar.runtime import random_ops  # noqa: F401 - registers torch.ops.autopar
from tests.codegen.compare import check_group
from tests.codegen.traced import one_kernel, with_gradients

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten


def unary(name):
    return lambda x: getattr(aten, name)(x)


UNARY = {
    name: unary(name)
    for name in (
        "abs neg reciprocal exp exp2 log log2 sqrt rsqrt sin cos erf floor ceil tanh sigmoid relu silu square sign"
        " log1p expm1 clone gelu leaky_relu softplus"
    ).split()
}
BINARY = {
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: aten.rsub(x, 2.5) * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y + 3),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "compare": lambda x, y: torch.where((x > y) | (x == 1) & ~(y < 0), x, y.neg()),
    "logical": lambda x, y: torch.logical_and(x > 0, torch.logical_not(y > 0)) ^ torch.logical_or(x <= 1, y != 2),
    "bitwise": lambda x, y: ((x > 0) & (y >= 0)) | ((x < 0) ^ (y < 1)),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.5),
    "gelu_backward": lambda x, y: aten.gelu_backward(x, y),
    "gelu_tanh_backward": lambda x, y: aten.gelu_backward(x, y, approximate="tanh") + aten.gelu(x, approximate="tanh"),
    "silu_backward": lambda x, y: aten.silu_backward(x, y),
    "sigmoid_backward": lambda x, y: aten.sigmoid_backward(x, y),
    "tanh_backward": lambda x, y: aten.tanh_backward(x, y),
    "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0.1),
    "pow": lambda x, y: x**2 + y**3 + (x * x + 1) ** -0.5 + (y * y + 1) ** 0.5 + y**1,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) + y.clamp(min=0.1) + x.clamp(max=y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, y, x * x + 1),
    "cast": lambda x, y: (x.to(torch.float32) + y.float()).to(x.dtype),
    "tril": lambda x, y: x.tril(1) + y.triu(-1),
    "constants": lambda x, y: x + torch.full_like(y, 2.5) * torch.ones(7, dtype=x.dtype) - torch.arange(7) * 0.5,
    "cat": lambda x, y: torch.cat((x * 2, y + 1), -1),
    "cat_read": lambda x, y: torch.cat((x * 2, y + 1), 0).exp() + 1,
    "rotate": lambda x, y: torch.cat((-x[..., 4:], x[..., :4]), -1)[..., :7] * y,
    "slices": lambda x, y: aten.slice_backward(x[..., 1:4], [2, 5, 7], 2, 2, 5, 1) + y,
    "select": lambda x, y: aten.select_backward(x[:, 0], [2, 5, 7], 1, 3) + y[:, 1:2],
    "views": lambda x, y: (x + 1).view(10, 7).view(2, 5, 7) * y.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda x, y: (x.transpose(1, 2) * 2).transpose(1, 2) + y.permute(2, 0, 1).permute(1, 2, 0),
    "broadcast": lambda x, y: x * y[:1, :, :1] + y[0, 0].unsqueeze(0),
    "short_sums": lambda x, y: x.mean(1, keepdim=True) * y.amax(1, keepdim=True) + x * y.sum(1, keepdim=True),
    "chunks": lambda x, y: (x + y).chunk(2, 0)[1] * (x * y).unbind(0)[0],
}
ROWS = {
    "layer_norm": lambda x, w, b: aten.native_layer_norm(x, [w.numel()], w, b, 1e-5),
    "plain_norm": lambda x, w, b: aten.native_layer_norm(x + 1, [w.numel()], None, None, 1e-5)[0],
    "layer_norm_backward": lambda x, w, b: norm_backward(x, w, b),
    "rms_norm": lambda x, w, b: rms(x, w) + b,
    "rms_norm_backward": with_gradients(lambda x, w: rms(x, w), 2),
    "softmax": lambda x, w, b: aten._softmax(x * w, -1, False),
    "log_softmax": lambda x, w, b: aten._log_softmax(x + b, -1, False),
    "softmax_backward": lambda x, w, b: aten._softmax_backward_data(x * w, x.abs(), -1, x.dtype),
    "log_softmax_backward": lambda x, w, b: aten._log_softmax_backward_data(x, -x.abs(), -1, x.dtype),
    "sum": lambda x, w, b: (x * w).sum(-1),
    "mean": lambda x, w, b: (x + w).mean(-1, keepdim=True) * b,
    "extremes": lambda x, w, b: x.amax(-1, keepdim=True) - (x * w).amin(-1, keepdim=True),
    "column_sums": lambda x, w, b: ((x * w).sum(0), x.sum(0, keepdim=True), x.exp()),
}


def norm_backward(x, w, b):
    return aten.native_layer_norm_backward(
        x * 2, x, [w.numel()], x.mean(-1, keepdim=True), x.sum(-1, keepdim=True), w, b, [True, True, True]
    )


def rms(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def test_every_formula_is_tried():
    others = "amax amin fused_rms_norm_backward nll_loss_backward embedding dropout where logical_and logical_or"
    others += " logical_not rms"
    tried = " ".join((*UNARY, *BINARY, *ROWS, others))
    spelled = {
        **dict.fromkeys(("_to_copy",), "cast"), **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "compare"),
        **dict.fromkeys(("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"), "bitwise"),
        "addcdiv": "addcmul", "triu": "tril",
        **dict.fromkeys(constants.RULES, "constants"), "cat": "cat", "embedding": "embedding", "tril": "tril",
        "slice_backward": "slices", "select_backward": "select", "autopar.dropout": "dropout",
    }  # fmt: skip
    for name in (*POINTWISE, *composites.RULES, *constants.RULES, *rows.RULES):
        short = spelled.get(name, name).replace("native_", "").replace("_data", "").strip("_")
        assert short in tried, name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    check_group(one_kernel(UNARY[name], torch.empty(3, 37, dtype=dtype)))


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, dtype):
    check_group(one_kernel(BINARY[name], torch.empty(2, 5, 7, dtype=dtype), torch.empty(2, 5, 7, dtype=dtype)))


@pytest.mark.parametrize("shape", [(5, 12), (1, 8), (6, 1), (3, 130)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, shape):
    for dtype in FLOATS[:2]:
        inputs = [torch.empty(shape, dtype=dtype), *(torch.empty(shape[-1:], dtype=dtype) for _ in range(2))]
        if name == "rms_norm_backward":
            inputs[2] = torch.empty(shape, dtype=dtype)
        if shape[0] == 1 and name == "column_sums":
            continue  # over one row: each row is a sum
        check_group(one_kernel(ROWS[name], *inputs))


def test_fused_rms_norm():
    """The ops of one library that CPUs have not: against their definition."""
    x, w, g = torch.randn(6, 12), torch.randn(12), torch.randn(6, 12)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    expected = F.rms_norm(leaves[0], (12,), leaves[1], 1e-6)
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    graph, fake = torch.fx.Graph(), FakeTensorMode()
    places = []
    for name, value in (("x", x), ("w", w), ("g", g), ("rstd", rstd)):
        places.append(graph.placeholder(name))
        places[-1].meta["val"] = fake.from_tensor(value)
    px, pw, pg, pr = places

    def call(target, args, values):
        node = graph.call_function(target, args)
        node.meta["val"] = tuple(fake.from_tensor(v) for v in values)
        for i, value in enumerate(values):
            items.append(graph.call_function(operator.getitem, (node, i)))
            items[-1].meta["val"] = fake.from_tensor(value)
        return [node, *items[-len(values) :]]

    items = []
    forward = call(aten._fused_rms_norm.default, (px, [12], pw, 1e-6), (x, rstd))
    backward = call(aten._fused_rms_norm_backward.default, (pg, px, [12], pr, pw, [True, True]), (x, w))
    group = Group((*forward, *backward), tuple(items), built := build((*forward, *backward), tuple(items)), 0)
    reads, _ = built.reads, graph.output(tuple(items))
    values = {px: x, pw: w, pg: g, pr: rstd}
    found = run(code_of(group, reads), tuple(values[n] for n in reads), interpret=True)
    for out, reference in zip(found, (expected, rstd, *torch.autograd.grad(expected, leaves, g)), strict=True):
        torch.testing.assert_close(out, reference.detach(), rtol=1e-5, atol=1e-5)


def test_whole_numbers():
    def whole(x, y):
        return (x * 3 - y).abs() + torch.maximum(x, y), x != y, (x + 1).to(torch.float32) / 2, x.to(torch.int32)

    for dtype in (torch.int64, torch.int32):
        check_group(one_kernel(whole, torch.empty(5, 9, dtype=dtype), torch.empty(9, dtype=dtype)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_backward(reduction):
    """No sum over the vocabulary, so that its rows may be wide."""

    def backward(grad, logp, target, count):
        g = aten.nll_loss_backward(grad, logp, target, None, reduction, 2, count)
        return aten._log_softmax_backward_data(g, logp, 1, logp.dtype)

    for dtype in FLOATS[:2]:
        grad = torch.empty((4,) if reduction == 0 else (), dtype=dtype)
        shapes = torch.empty(4, 2500, dtype=dtype), torch.empty(4, dtype=torch.int64), torch.empty((), dtype=dtype)
        group = one_kernel(backward, grad, *shapes)
        assert not group.code.kernel.reduces
        check_group(group)


def test_gather():
    def gathered(table, ids, positions):
        return F.embedding(ids, table) * 2 + positions

    shapes = torch.empty(11, 9), torch.empty(2, 6, dtype=torch.int64), torch.empty(6, 9)
    check_group(one_kernel(gathered, *shapes))


@pytest.mark.parametrize("where", [(), (64, [4, 30], [60, 1])], ids=["whole", "shard"])
def test_dropout(where):
    """The same elements are kept as outside of a kernel."""

    def dropped(x, y, key):
        return torch.ops.autopar.dropout(x + y, key, 0.3, *where) * 2

    key = torch.tensor([-(2**62) + 12345, 77])
    group = one_kernel(dropped, torch.empty(4, 30), torch.empty(4, 30), key)
    x, y = torch.randn(4, 30), torch.rand(4, 30) + 5
    values = {"x_1": x, "y_1": y, "key_1": key}
    inputs = [values[n.name] for n in group.aten.graph.nodes if n.op == "placeholder"]
    torch.testing.assert_close(group(*inputs), group.aten(*inputs))
    assert group.mode == "interpreter"
    far = [torch.tensor([5, 2**32 - 3]) if v is key else v for v in inputs]
    torch.testing.assert_close(group(*far), group.aten(*far))  # by its ops: the kernel's index would wrap
    assert group.mode == "interpreter"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: torch.div(x, 3, rounding_mode="floor"), "rounding"),
        (lambda x: (x + 1).sum(0).exp(), "is read outside a kernel"),
        (lambda x: (x + 1).pow(2.7), "pow by 2.7"),
        (lambda x: (x.exp(), (x + 1).sum(-1), x.view(6, 4).sum(-1)), "rows of different lengths"),
        (lambda x: x.double().to(torch.float64).to(torch.int16) + 1, "int16"),
        (lambda x: ((x + 1).view(6, 4) * 2).exp().view(4, 6).sin(), "is cut across the axes"),
    ],
)
def test_refusals_say_why(function, said):
    with pytest.raises((Unfusable, NotLinear), match=said):
        one_kernel(function, torch.empty(4, 6))


def test_few_and_long_rows_are_refused():
    with pytest.raises(TooWide, match="2 rows of 200000"):
        one_kernel(lambda x: aten._softmax(x + 1, -1, False), torch.empty(2, 200000))


def test_long_rows_that_are_summed_up_too_are_refused():
    with pytest.raises(TooWide, match="do not fit"):
        one_kernel(lambda x: ((y := aten._softmax(x, -1, False)), y.sum(0)), torch.empty(64, 70000))
