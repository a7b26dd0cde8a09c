"""Kernels where an index, a number or a shape is at its edge: what ATen gives, with NaN, infinities and -0 in place."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.codegen import cluster
from autopar.codegen.group import FusedGroup
from autopar.codegen.triton_text import print_kernel
from autopar.passes.fuse import Fuse
from tests.codegen.traced import one_kernel, trace, with_gradients

INF, NAN = math.inf, math.nan
X = torch.arange(12.0).view(3, 4)
HALF = torch.tensor([1.0077, 0.3, -2.5, 1e-40, NAN, INF, -INF])
LONG = torch.randn(6, 40000, generator=torch.Generator().manual_seed(0))
LONG[1] = -INF
LONG[2, 7] = NAN
LONG[3, 20000] = INF
LONG[4, 5:] = -INF
F64 = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

CASES = {
    # indices
    "a slice that begins before the tensor": (lambda x: (x + 1)[:, -8:] * 2, (X,)),
    "its gradient": (with_gradients(lambda x: (x * 2)[:, -8:].sin(), 1), (X, torch.ones(3, 4))),
    "a slice that ends before it begins": (
        with_gradients(lambda x, w: (x * w)[:, :-6].sum() + (x * w).sin().sum(), 2), (X, X.sin(), torch.ones(()))
    ),
    "a part of a sum over rows, cast": (lambda x: (x * 2).bfloat16().sum(0)[2:3].float(), (X,)),
    "a sum over rows, spread and cast": (lambda x: (x * 2).bfloat16().sum(0).expand(3, 4).float(), (X,)),
    "a sum over rows, cast": (lambda x: (x * 2).bfloat16().sum(0).float(), (X,)),
    # ops
    "the bits of a number": (lambda x: (x * 2).view(torch.int32) + 1, (X,)),
    "alpha by place": (lambda x: torch.rsub(x, 2.5, alpha=3) * 2, (X,)),
    "gradients of a norm's weight, used again": (
        with_gradients(lambda w, x: F.layer_norm(x, (3, 4), w * 2), 1), (X, X.cos(), X.sin())
    ),
    "one sample without a batch": (
        with_gradients(lambda x: F.cross_entropy(x * 2, torch.tensor(2)), 1), (X[0], torch.ones(()))
    ),
    # shapes
    "no elements": (lambda x: (x[:, :0] + 1, x * 2 + 1), (X,)),
    "a mean of one number": (lambda x: (x.sum() * 2).mean(0) + 1, (X,)),
    "an empty piece": (lambda x: torch.cat([torch.tensor([]), x * 2], 1) + 1, (X,)),
    "a sum over nothing": (lambda x: x.sum(1) + 1, (torch.randn(3, 0, 4),)),
    "the largest truth value": (lambda x: ((x > 2).amax(-1), x * 2), (X,)),
    # numbers
    "rounding to half precision": (lambda x: (x * 1.0).bfloat16() + 0, (HALF,)),
    "rounding on the way": (lambda x: x * 2 - (x * 2).bfloat16().float(), (X.sin(),)),
    "rounding to float16 on the way": (lambda x: x * 2 - (x * 2).half().view(4, 3).float().view(3, 4), (X.sin(),)),
    "comparison in half precision": (lambda x: (x * 1 == 0.1) | (x * 1 > 0.3), (torch.tensor([0.1, 0.2]).bfloat16(),)),
    "comparison with one number": (
        lambda x, t: (x * 1 == t, x * 1 == t * 1), (torch.tensor([0.1, 0.2]).bfloat16(), torch.tensor(0.1))
    ),
    "rounding before whole numbers": (lambda x: (x * 1).bfloat16().long() + 1, (torch.tensor([2047.9, -333.7]),)),
    "rounding before truth": (lambda x: (x * 1e-9).half().bool() | False, (torch.tensor([1000.6, 0.2, 5.99]),)),
    "rounding before an index": (
        lambda x, t: t.gather(0, (x * 1).half().long()) * 2, (torch.tensor([2049.0, 4097.9]), torch.arange(5000.0))
    ),
    "half precision to the other": (lambda x: x.half().float() * 1, (torch.tensor([1e5, 1e-8, 0.3]).bfloat16(),)),
    "and back": (lambda x: x.bfloat16().half() - x, (X.sin().half(),)),
    "a copy of what was rounded": (lambda x: (x * 2).bfloat16().clone().float() - x * 2, (X.sin(),)),
    "positions beyond 32 bits": (
        lambda x: (
            x + torch.arange(0, 2**33, 2**30),
            x.float() + torch.arange(0, 2**33, 2**30, dtype=torch.float32),
            x + torch.arange(2**33, 2**33 + 8),
        ),
        (torch.arange(8),),
    ),
    "a number beyond 32 bits": (lambda x: (x.int() + 2**31, x * 2 + 1), (torch.arange(4),)),
    "truth of one number and of many": (
        lambda s, x: ((s >= 0) & (x < 1), (s < 0) | (x > 0)), (torch.tensor(1.5), X.sin())
    ),
    "a mask that is never true": (
        lambda v, i: v.gather(0, i).reshape(2, 1, 1).tril(-2) + 1, (torch.randn(16), torch.tensor([1, 2]))
    ),
    "a row of NaN": (lambda x: (x * 1).softmax(-1) + 0, (torch.tensor([[NAN, NAN], [1, 2]]),)),
    "the largest beside NaN": (lambda x: ((x * 2).amax(-1), (x * 2).amin(-1)), (torch.tensor([[1, NAN], [1, 2]]),)),
    "integers have no NaN": (lambda x: ((x * 2).amax(-1), (x * 2).amin(-1)), (torch.tensor([[1, 4], [5, 2]]),)),
    "-0": (lambda x: 1 / torch.relu(x * 1), (torch.tensor([-0.0, 1.0, 0.0, -1.0]),)),
    "log1p": (lambda x: torch.log1p(x) * 2, (torch.tensor([INF, 1, -1, 0, -0.0, NAN, 1e-20]),)),
    "expm1": (lambda x: torch.expm1(x) * 2, (torch.tensor([-0.25, 0.1, 0.2499, -1e-9, 3, -INF], dtype=torch.float64),)),
    "numbers alone": (lambda x: torch.zeros(3, 4) / torch.zeros(3, 4) + x, (X,)),
    "float64 numbers": (lambda x: (torch.full((4, 4), 0.1, dtype=torch.float64) * 3, x * 2), (F64,)),
    "float64 numbers beside a tensor": (lambda x: torch.tril(torch.clamp(x + 0.1, 0.1, 0.7)).sum(-1), (F64,)),
    # long rows
    "a sum of powers": (lambda x: torch.exp(x - x.amax(-1, keepdim=True)).sum(-1), (LONG,)),
    "and its maximum": (lambda x: (m := x.amax(-1, keepdim=True), torch.exp(x - m).sum(-1)), (LONG,)),
    "softmax": (lambda x: torch.softmax(x * 1, -1), (LONG,)),
    "log softmax": (lambda x: torch.log_softmax(x * 1, -1), (LONG,)),
    "long rows' extremes": (lambda x: ((x * 2).amax(-1), (x * 2).amin(-1)), (LONG,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_aten(name):
    function, inputs = CASES[name]
    found = Fuse("interpreter").run(trace(function, *inputs))(*inputs)
    wanted = function(*inputs)
    rounding = {torch.float64: 1e-14, torch.float32: 2e-6}
    for got, want in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        rtol = 1e-5 if want.numel() > 2**15 or inputs[0] is LONG else rounding.get(want.dtype, 0)
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True)


FEWER_GROUPS = {
    "the bits of a number",
    "no elements",
    "an empty piece",
    "a sum over nothing",
    "one sample without a batch",
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - FEWER_GROUPS))
def test_they_are_kernels(name):
    function, inputs = CASES[name]
    module = Fuse("interpreter").run(trace(function, *inputs))
    assert any(isinstance(m, FusedGroup) for m in module.modules())


def test_a_masked_gather_keeps_its_mask():
    """Lanes beyond a piece hold an index of 0, from which 50 is taken: no row of the table."""
    table, ids = torch.randn(60, 6), torch.tensor([51, 52, 53])
    function = lambda i, x, t: torch.cat([x * 2, F.embedding(i - 50, t)], 1)  # noqa: E731
    group = one_kernel(function, ids, torch.randn(3, 5), table)
    loads = [line for line in group.code.printed.text.splitlines() if "tl.load(x2" in line]
    assert loads
    assert all("mask=" in line for line in loads)


def test_gathered_places_are_wide_where_the_table_is():
    group = one_kernel(
        lambda i, t: F.embedding(i, t) * 2, torch.zeros(4, dtype=torch.int32), torch.empty(2**20, 4096, device="meta")
    )
    assert ".to(tl.int64) * 4096" in print_kernel(group.code.kernel).text


def test_a_fault_of_ours_costs_the_ops_that_it_is_in(monkeypatch):
    real = cluster.build

    def build(members, outputs):
        if any("exp" in n.name for n in members):
            raise KeyError("no such thing")
        return real(members, outputs)

    monkeypatch.setattr(cluster, "build", build)
    graph = trace(lambda x: ((x * 2).sin() + 1, (x.exp() + 1).cos()), X)
    with pytest.warns(UserWarning, match=r"no kernel for exp.*KeyError: 'no such thing'; this is a fault of autopar"):
        module = Fuse("interpreter").run(graph)
    assert any(isinstance(m, FusedGroup) for m in module.modules())
    torch.testing.assert_close(module(X), ((X * 2).sin() + 1, (X.exp() + 1).cos()))


def test_a_pass_that_fails_is_not_called_a_refusal(monkeypatch):
    from autopar import compiled

    def broken(module):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(compiled, "PASSES", (broken,))
    model = nn.Linear(4, 3)
    m = autopar.parallelize(model, autopar.Mesh("1"), example_args=(X,))
    with pytest.warns(UserWarning, match=r"backend='aot': a pass failed: ZeroDivisionError: .*a fault of autopar"):
        out = m(X)
    torch.testing.assert_close(out, model(X))


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_cross_entropy_of_large_logits(shift):
    """What all logits have in common changes nothing: nor does it with kernels."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) + shift)

        def forward(self, targets):
            return F.cross_entropy(self.logits * 1.0, targets)

    targets = torch.arange(6)
    one, many = Loss(), Loss()
    one(targets).backward()
    m = autopar.parallelize(many, autopar.Mesh("1"), example_args=(targets,), kernels="on")
    loss = m(targets)
    loss.backward()
    torch.testing.assert_close(loss, one(targets), rtol=1e-6, atol=0)
    (grad,) = (p.grad for p in m.parameters())
    torch.testing.assert_close(grad, one.logits.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("ids", [[0, 7, 1], [0, -1, 1]])
def test_an_index_out_of_range_is_an_error(ids):
    function = lambda i, t: F.embedding(i, t) * 2 + 1  # noqa: E731
    inputs = torch.tensor(ids), torch.randn(7, 5)
    module = Fuse("interpreter").run(trace(function, torch.tensor([0, 1, 2]), inputs[1]))
    with pytest.warns(UserWarning, match=r"IndexError\('index out of range'\)\); its ops run one by one"):
        with pytest.raises(IndexError):
            module(*inputs)


class Expands(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, m):
        return F.silu(self.linear(x) * m.expand(4, -1, -1) + m).square().mean()


def test_another_layout_of_an_expanded_value():
    x, m = torch.randn(4, 3, 6), torch.rand(3, 6)
    model = autopar.parallelize(Expands(), autopar.Mesh("1"), example_args=(x, m), kernels="on")
    plain = Expands()
    plain.load_state_dict(model.state_dict())
    for mask in (m, torch.rand(6, 3).t()):
        torch.testing.assert_close(model(x, mask), plain(x, mask))


def test_what_is_no_longer_expanded_runs_as_its_ops():
    module = Fuse("interpreter").run(trace(lambda x, m: x * m + m, X, torch.ones(1, 4).expand(3, 4)))
    for mask in (torch.ones(1, 4).expand(3, 4), X.cos(), torch.rand(1, 4).expand(3, 4)):
        torch.testing.assert_close(module(X, mask), X * mask + mask)
    (group,) = (m for m in module.modules() if isinstance(m, FusedGroup))
    assert group.mode == "interpreter"
