"""passes/normalize_random.py: random ops draw by key, with the distributions of torch's, and alike on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Interpreter

from autopar.capture import capture
from autopar.errors import UnsupportedOpError
from autopar.mesh import Mesh, factor_axes
from autopar.passes.normalize import Normalize
from autopar.program import Program
from autopar.rules.analyse import analyse
from autopar.rules.decisions import Decisions
from autopar.runtime.random import Draw, drawing
from tests.rules.cases import real
from tests.rules.prove import assignments, op_strategies, run_simulated

ours = torch.ops.autopar
MAKERS = (ours.dropout.default, ours.keep.default, ours.uniform.default, ours.normal.default)


class _Function(torch.nn.Module):
    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> object:
        return self.fn(*args)


def program_of(fn: Callable, tensors: tuple[Tensor, ...]) -> Program:
    return Normalize().run(capture(_Function(fn), tensors, {}))


def draw(fn: Callable, *tensors: Tensor, stream: int = 0) -> object:
    """Outputs of the normalised program; the tuple of one is taken out."""
    program = program_of(fn, tensors)
    module = torch.fx.GraphModule(torch.nn.Module(), program.graph)
    with drawing(Draw(11, stream)):
        out = Interpreter(module).run(*tensors)
    return out[0] if len(out) == 1 else out


def gradient(fn: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    """(output, gradient of its sum)."""
    leaf = x.detach().clone().requires_grad_()
    out = draw(fn, leaf)
    out.sum().backward()
    return out.detach(), leaf.grad


def sdpa(**options: object) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, dropout_p=0.4, **options)


DRAWS: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.4), (real(4, 6),)),
    "dropout twice": (lambda x: F.dropout(F.dropout(x, 0.4), 0.4), (real(4, 6),)),
    "native_dropout": (lambda x: torch.ops.aten.native_dropout(x, 0.4, True)[0], (real(4, 6),)),
    "dropout2d": (lambda x: F.dropout2d(x, 0.4), (real(4, 6, 2, 2),)),
    "dropout1d": (lambda x: F.dropout1d(x, 0.4), (real(4, 6, 2),)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.4, True), (real(4, 6),)),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.4, True), (real(4, 6, 2),)),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), (real(4, 6),)),
    "bernoulli_p": (lambda x: x * torch.bernoulli(x, 0.3), (real(4, 6),)),
    "rand_like": (lambda x: x * torch.rand_like(x), (real(4, 6),)),
    "randn_like": (lambda x: x * torch.randn_like(x), (real(4, 6),)),
    "rand": (lambda x: x * torch.rand(4, 6), (real(4, 6),)),
    "randn": (lambda x: x * torch.randn(6, dtype=torch.float64), (real(4, 6),)),
    "randint": (lambda x: x * torch.randint(3, 9, (6,)), (real(4, 6),)),
    "randint_like": (lambda x: x * torch.randint_like(x, 3, 9), (real(4, 6),)),
    "randperm": (lambda x: x * torch.randperm(6), (real(4, 6),)),
    "normal": (lambda x: x * torch.normal(x, x.abs()).detach(), (real(4, 6),)),
    "normal of numbers": (lambda x: x * torch.normal(1.0, 2.0, (4, 6)), (real(4, 6),)),
    "multinomial": (lambda x: x * torch.multinomial(x.exp().detach(), 6), (real(4, 6),)),
    "rrelu": (lambda x: F.rrelu(x, training=True), (real(4, 6),)),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, tau=0.7), (real(4, 6),)),
    "attention": (sdpa(), (real(2, 4, 4, 6), real(2, 4, 4, 6, seed=1), real(2, 4, 4, 6, seed=2))),
    "causal attention": (sdpa(is_causal=True), (real(2, 4, 4, 6), real(2, 4, 4, 6, seed=1), real(2, 4, 4, 6, seed=2))),
    "grouped attention": (
        sdpa(enable_gqa=True, is_causal=True),
        (real(2, 4, 4, 6), real(2, 2, 4, 6, seed=1), real(2, 2, 4, 6, seed=2)),
    ),
}


@pytest.mark.parametrize(
    ("name", "mesh"), [*((name, "2") for name in DRAWS), ("dropout", "2x2"), ("randn_like", "2x2")]
)
def test_the_same_numbers_on_every_mesh(name: str, mesh: str) -> None:
    fn, tensors = DRAWS[name]
    leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
    out = draw(fn, *leaves)
    out.backward(torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).view(out.shape))
    assert (out != draw(fn, *tensors, stream=1)).any()
    analysis = analyse(program_of(fn, tensors))
    logical = factor_axes(Mesh(mesh), {})
    drawing_ops = {name for name, op in analysis.ops.items() if op.node.target in MAKERS}
    runs = [
        assigned
        for assigned in assignments(op_strategies(analysis, logical))
        if any(set(assigned[name].options) & analysis.ops[name].by_name.keys() for name in drawing_ops)
    ]
    assert runs, "no strategy cuts the op that draws"
    for assigned in runs[:12]:
        with drawing(Draw(11, 0)):
            (result,), grads = run_simulated(analysis, Decisions(assigned, {}), logical, tensors)
        torch.testing.assert_close(result, out, rtol=1e-9, atol=1e-9)
        for leaf, grad in zip(leaves, grads, strict=True):
            torch.testing.assert_close(grad, leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DRAWS)
def test_nothing_is_left_to_torchs_generator(name: str) -> None:
    fn, tensors = DRAWS[name]
    for node in program_of(fn, tensors).calls:
        tags = getattr(node.target, "tags", ())
        assert torch.Tag.nondeterministic_seeded not in tags, node.target


X = real(300, 40, grad=False)


def test_dropout_keeps_the_mean_and_its_gradient_has_the_same_mask() -> None:
    out, grad = gradient(lambda x: F.dropout(x, 0.25), X)
    torch.testing.assert_close(grad, (out != 0).double() / 0.75, rtol=1e-12, atol=0)
    torch.testing.assert_close(out, X * grad)
    assert abs((out == 0).double().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / X.numel())


def test_two_dropouts_and_two_calls_have_their_own_masks() -> None:
    first, second = draw(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), X)
    assert abs(((first != 0) == (second != 0)).double().mean() - 0.5) < 0.03
    again = draw(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), X, stream=1)[0]
    assert abs(((first != 0) == (again != 0)).double().mean() - 0.5) < 0.03


def test_feature_dropout_drops_whole_channels() -> None:
    x = torch.ones(40, 50, 3, 2)
    kept = draw(lambda x: F.dropout2d(x, 0.4), x)
    assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept))
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / 0.6]))
    assert abs((kept[:, :, 0, 0] == 0).double().mean() - 0.4) < 5 * math.sqrt(0.24 / 2000)


@pytest.mark.parametrize("fn", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(fn: Callable) -> None:
    x = torch.randn(200, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = draw(lambda x: fn(x, 0.3, True), x)
    assert abs(out.mean()) < 0.03
    assert abs(out.var() - 1) < 0.03
    a = ((1.7580993408473766**2 * 0.3 + 1) * 0.7) ** -0.5
    dropped = torch.isclose(out, torch.tensor(-1.7580993408473766 * a * 0.7, dtype=out.dtype))
    assert abs(dropped.double().mean() - 0.3) < 0.01


def test_native_dropout_says_what_it_kept() -> None:
    out, kept = draw(lambda x: torch.ops.aten.native_dropout(x, 0.5, True), X)
    assert kept.dtype == torch.bool
    torch.testing.assert_close(out, X * kept * 2)


@pytest.mark.parametrize(
    ("fn", "mean", "variance"),
    [
        (lambda x: torch.rand_like(x), 0.5, 1 / 12),
        (lambda x: torch.randn_like(x), 0.0, 1.0),
        (lambda x: torch.normal(3.0, 2.0, x.shape), 3.0, 4.0),
        (lambda x: torch.normal(x * 0 + 3.0, 2.0), 3.0, 4.0),
        (lambda x: torch.empty_like(x).normal_(3, 2), 3.0, 4.0),
        (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 16 / 12),
        (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
        (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21),
        (lambda x: torch.randint_like(x, 2, 6), 3.5, 15 / 12),
        (lambda x: torch.randint(4, x.shape).double(), 1.5, 15 / 12),
        (lambda x: torch.multinomial((x[:, :3] * 0 + torch.arange(1.0, 4.0)).repeat(40, 1), 1), 4 / 3, 5 / 9),
        (lambda x: F.rrelu(x * 0 - 1.0, 0.1, 0.3, training=True), -0.2, 0.04 / 12),
    ],
)
def test_distributions(fn: Callable, mean: float, variance: float) -> None:
    out = draw(fn, X).double()
    assert abs(out.mean() - mean) * math.sqrt(out.numel() / variance) < 5
    assert abs(out.var() / variance - 1) < 0.1


def test_shapes_and_dtypes_are_torchs() -> None:
    for fn in (
        lambda x: torch.randint(0, 5, (2, 3)),
        lambda x: torch.randint_like(x, 5),
        lambda x: torch.rand(2, 3, dtype=torch.bfloat16),
        lambda x: torch.randn_like(x, dtype=torch.float32),
        lambda x: torch.randperm(7),
        lambda x: torch.bernoulli(x.sigmoid().to(torch.bfloat16)),
    ):
        ours_, theirs = draw(fn, X), fn(X)
        assert (ours_.shape, ours_.dtype) == (theirs.shape, theirs.dtype)


def test_a_permutation_has_every_number_once() -> None:
    found = draw(lambda x: torch.randperm(1000), X)
    assert torch.equal(found.sort().values, torch.arange(1000))
    assert not torch.equal(found, torch.arange(1000))


def test_gumbel_softmax_picks_by_probability() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log().expand(20_000, 3)
    picked = draw(lambda x: F.gumbel_softmax(x, hard=True), logits.contiguous())
    torch.testing.assert_close(picked.mean(0), torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["attention", "causal attention", "grouped attention", "mask", "bool mask", "scale"])
def test_attention_without_what_is_dropped_is_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no weight dropped, what is left of the decomposition is attention itself."""
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    more: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
        "mask": (sdpa(enable_gqa=True), (*DRAWS["grouped attention"][1], real(2, 4, 4, 4, grad=False))),
        "bool mask": (sdpa(), (*DRAWS["attention"][1], seen)),
        "scale": (sdpa(scale=0.3), DRAWS["attention"][1]),
    }
    fn, tensors = {**DRAWS, **more}[name]
    program = program_of(fn, tensors)
    for node in list(program.calls):
        if node.target is ours.dropout.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    found = Interpreter(torch.fx.GraphModule(torch.nn.Module(), program.graph)).run(*tensors)[0]
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, dropout_p, **k: attention(*a, **k))
    torch.testing.assert_close(found, fn(*tensors), rtol=1e-9, atol=1e-9)


def test_nothing_is_drawn_in_eval_mode_or_for_nothing() -> None:
    for fn in (
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout2d(x[:, :, None, None], 0.5, training=False),
        lambda x: F.rrelu(x, training=False),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ):
        assert not [n for n in program_of(fn, (X,)).calls if n.target is ours.key.default]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.poisson(x.abs()),
        lambda x: torch.multinomial(x.abs(), 3, replacement=True),
        lambda x: torch.empty_like(x).cauchy_(),
        lambda x: torch.randn_like(x, dtype=torch.complex64),
    ],
)
def test_what_nobody_can_draw_alike_is_refused(fn: Callable) -> None:
    with pytest.raises(UnsupportedOpError, match="random numbers"):
        program_of(fn, (X,))


def test_dropout_between_recurrent_layers_is_refused() -> None:
    layer = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with pytest.raises(UnsupportedOpError, match="lstm"):
        program_of(
            lambda x, *w: torch.lstm(
                x, (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), w, True, 2, 0.5, True, False, False
            )[0],
            (torch.randn(5, 3, 4), *(p.detach() for p in layer.parameters())),
        )
