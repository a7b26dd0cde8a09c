"""discover: rules found by running ops on shards, proved like written ones; nothing is found where nothing holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.rules import discover as module
from autopar.rules import register, register_rule, rule_of
from autopar.rules.analyse import analyse
from autopar.rules.discover import Discover, discover
from tests.rules import prove as prove_module
from tests.rules.cases import real, whole_numbers
from tests.rules.prove import program_of, prove
from tests.rules.user_ops import Halves, RootMeanSquare, SignGradient, product, roll_rows


@pytest.fixture(autouse=True)
def _no_rules_of_other_tests(monkeypatch):
    monkeypatch.setattr(register, "_RULES", {})


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        y = x.softmax(dim)
        ctx.dim = dim
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(ctx.dim, keepdim=True)), None


class BatchCentred(torch.autograd.Function):
    """Forward by rows; only the backward looks at all of them."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


class ClippedAtTen(torch.autograd.Function):
    """Values of ordinary size pass; it takes large ones to see the norm over the row."""

    @staticmethod
    def forward(ctx, x):
        return x * (10 / x.norm(dim=-1, keepdim=True).clamp(min=10))

    @staticmethod
    def backward(ctx, g):
        return g


class SmallIsFlipped(torch.autograd.Function):
    """Rows and columns can be cut, but not both."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(1) if x.shape[0] <= 4 and x.shape[1] <= 3 else x * 1

    @staticmethod
    def backward(ctx, g):
        return g


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g


class SingleOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g


class Cells(torch.autograd.Function):
    """Its argument fixes a size: another one does not fit."""

    @staticmethod
    def forward(ctx, x, columns):
        return x.view(-1, columns).cumsum(1)

    @staticmethod
    def backward(ctx, g):
        return g.flip(1).cumsum(1).flip(1), None


class Pick(torch.autograd.Function):
    """Rows of a table by number; no gradient for the numbers."""

    @staticmethod
    def forward(ctx, table, rows):
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table[rows]

    @staticmethod
    def backward(ctx, g):
        (rows,) = ctx.saved_tensors
        return g.new_zeros(ctx.shape).index_add_(0, rows, g), None


class AnyPositive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0).any(0)

    @staticmethod
    def backward(ctx, g):
        return None


def found(fn, *tensors):
    program = program_of(fn, tensors)
    (node,) = [n for n in program.calls if n.name.partition("_")[0] in ("function", "product", "roll")]
    return discover(node)


CASES = [
    (RootMeanSquare.apply, (real(4, 2, 6), real(6, seed=1)), ("a b c, d -> a b e", "c d e")),
    (RootMeanSquare.apply, (real(6, 6, 6), real(6, seed=1)), ("a b c, d -> a b e", "c d e")),
    (SignGradient.apply, (real(4, 6),), ("a b -> a b", "")),
    (Halves.apply, (real(4, 6),), ("a b -> a b, b", "")),
    (Halves.apply, (real(4, 4),), ("a b -> a b, b", "")),
    (lambda x, w: product(x, w, 0.5), (real(4, 2, 6), real(8, 6, seed=1)), ("a b c, d c -> a b d", "")),
    (lambda x, w: product(x, w, 0.5), (real(4, 4), real(4, 4, seed=1)), ("a b, c b -> a c", "")),
    (roll_rows, (real(4, 6),), ("b a -> c a", "b c")),
    (lambda x: Softmax.apply(x, -1), (real(3, 4, 5),), ("a b c -> a b d", "c d")),
    (lambda x: Softmax.apply(x, 0), (real(3, 4, 5),), ("c a b -> d a b", "c d")),
    (BatchCentred.apply, (real(4, 6),), ("b a -> c a", "b c")),
    (ClippedAtTen.apply, (real(4, 3),), ("a b -> a c", "b c")),
    (SmallIsFlipped.apply, (real(8, 6),), ("a b -> a c", "b c")),
    (Pick.apply, (real(8, 6), whole_numbers(8, 5)), ("c b, a -> a b", "c")),
    (lambda x: SingleOnly.apply(x), (real(4, 6).detach().float(),), ("a b -> a b", "")),
    (lambda x: SignGradient.apply(x), (real(1, 6),), ("1 a -> 1 a", "")),
]


@pytest.mark.parametrize(("fn", "tensors", "expected"), CASES)
def test_finds_what_can_be_cut_and_nothing_else(fn, tensors, expected):
    assert sorted(shape(found(fn, *tensors))) == sorted(shape(expected))


def shape(line):
    """The line up to the names of its factors: each factor as its places, with whether it is whole."""
    notation, whole = line
    places = {}
    for t, tensor in enumerate(notation.replace("->", ",").split(",")):
        for d, name in enumerate(tensor.split()):
            places.setdefault(name, []).append((t, d))
    return [(tuple(v), k in whole.split()) for k, v in places.items()]


@pytest.mark.parametrize(
    ("fn", "tensors"),
    [(Noise.apply, (real(4, 6),)), (AnyPositive.apply, (real(4, 1),))],
    ids=["random", "a sum of booleans"],
)
def test_finds_nothing(fn, tensors, monkeypatch):
    monkeypatch.setattr("autopar.capture.functions._Watch", Unwatched)
    assert found(fn, *tensors) is None


class Unwatched:
    """Lets random Functions through capture."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
@pytest.mark.parametrize(
    ("fn", "tensors", "cut"),
    [
        (RootMeanSquare.apply, (real(6, 4, 5), real(5, seed=1)), 2),
        (Halves.apply, (real(6, 4),), 2),
        (lambda x, w: product(x, w, 0.5), (real(4, 2, 6), real(12, 6, seed=1)), 3),
        (lambda x: SignGradient.apply(Softmax.apply(x, 1)), (real(4, 6, 4),), 2),
        (Pick.apply, (real(8, 6), whole_numbers(8, 6)), 2),
    ],
)
def test_found_rules_are_proved_by_running(fn, tensors, cut, mesh, monkeypatch):
    """ "R" is not among their options."""
    monkeypatch.setattr(prove_module, "analyse", lambda program: analyse(program, rules=Discover()))
    proof = prove(fn, *tensors, mesh=mesh)
    assert len({f.partition(":")[2] for f in proof.factors}) >= cut
    for op in analyse(program_of(fn, tensors), rules=Discover()).ops.values():
        assert not op.rule.linear_backward


def test_sizes_that_the_arguments_fix_are_kept():
    program = program_of(lambda x: Cells.apply(x, 6), (real(4, 6),))
    (node,) = [n for n in program.calls if n.name == "function"]
    notation, whole = discover(node)
    assert shape((notation, whole))[0] == (((0, 0), (1, 0)), False)
    assert len(whole.split()) == 2


def test_a_large_call_is_tried_small(monkeypatch):
    sizes = []
    original = module._Trial.run
    monkeypatch.setattr(
        module._Trial, "run", lambda self, ts, *a: (sizes.extend(t.numel() for t in ts), original(self, ts, *a))[1]
    )
    x = torch.empty(4096, 128, 512, device="meta", dtype=torch.float64)
    w = torch.empty(512, device="meta", dtype=torch.float64)
    line = found(RootMeanSquare.apply, x, w)
    assert sorted(shape(line)) == sorted(shape(("a b c, d -> a b e", "c d e")))
    assert max(sizes) < 10_000


def test_random_state_is_left_alone():
    program = program_of(SignGradient.apply, (real(4, 6),))
    (node,) = [n for n in program.calls if n.name == "function"]
    before = torch.get_rng_state()
    discover(node)
    assert torch.equal(before, torch.get_rng_state())


def test_known_ops_keep_their_rules_and_equal_calls_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "discover", lambda node: tried.append(node))
    rules = Discover()

    def fn(x):
        return SignGradient.apply(SignGradient.apply(x.tanh())) + SignGradient.apply(x.transpose(0, 1)).transpose(0, 1)

    program = program_of(fn, (real(4, 6),))
    for node in program.calls:
        if "getitem" not in node.name:
            rules(node)
    assert [n.name for n in tried] == ["function", "function_2"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out = nn.Linear(4, 64), nn.Linear(64, 4)
        self.w = nn.Parameter(torch.rand(64))
        self.double()

    def forward(self, x):
        h = RootMeanSquare.apply(self.fc(x), self.w)
        return self.out(Softmax.apply(h, 0)).square().mean()


def test_the_plan_says_what_was_found_and_strict_accepts_it():
    x = torch.randn(8, 4, dtype=torch.float64)
    line = Net.forward.__code__.co_firstlineno + 1
    plan = autopar.plan(Net(), "2", example_args=(x,), discover=True, strict=True)
    notes = [n for n in plan.notes if "discovered" in n]
    assert len(notes) == 2
    assert notes[0].startswith(f"rule discovered for autograd.Function RootMeanSquare ({__file__}:{line}): a ")
    assert notes[0].endswith("; random tests are no proof")
    assert not [n for n in plan.notes if "kept whole" in n]
    assert [n for n in autopar.plan(Net(), "2", example_args=(x,)).notes if "kept whole" in n]


def test_the_plan_says_where_nothing_was_found():
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return (x @ x).cumsum(0).cumsum(1)

        @staticmethod
        def backward(ctx, g):
            return g

    class Square(nn.Module):
        def forward(self, x):
            return Sums.apply(x).sum()

    plan = autopar.plan(Square(), "2", example_args=(torch.randn(4, 4),), discover=True)
    assert any(n.startswith("no rule discovered for autograd.Function") for n in plan.notes)


def test_a_registered_rule_is_not_looked_for():
    register_rule(SignGradient, "b d -> b d", whole="d")
    program = program_of(SignGradient.apply, (real(4, 6),))
    (node,) = [n for n in program.calls if n.name == "function"]
    rules = Discover()
    assert rules(node).whole == rule_of(node).whole == {"d"}
    assert rules.notes == []
