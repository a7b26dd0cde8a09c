"""Products: every way to cut them gives the product of the whole, its bias counted once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autopar.errors import RuleError
from autopar.rules.analyse import analyse
from autopar.rules.contraction import contraction_flop, explicit
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import program_of, prove

aten = torch.ops.aten
MATMULS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((4,), (4,)),
    ((4,), (4, 3)),
    ((3, 4), (4,)),
    ((5, 4), (4, 3)),
    ((4,), (2, 4, 3)),
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (4, 3)),
    ((3, 4), (2, 4, 3)),
    ((2, 3, 4), (3, 1, 4, 3)),
    ((2, 1, 3, 4), (2, 3, 4, 1)),
)
EQUATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 3)),
    "bij, bjk, k -> b": ((2, 3, 4), (2, 4, 3), (3,)),
    "i,j": ((3,), (2,)),
    "ij->": ((3, 2),),
    "ij->ji": ((3, 2),),
    "iij,j->i": ((2, 2, 3), (3,)),
    "...ij,...jk->...ik": ((2, 2, 3), (2, 3, 2)),
    "...i,...i": ((2, 3, 2), (3, 2)),
    "i...j->...": ((2, 3, 2),),
    "bi,bj->b": ((2, 3), (2, 1)),
    "bhse,bhte->bhst": ((2, 2, 3, 2), (2, 2, 2, 2)),
    "ba,bB->aB": ((2, 3), (2, 2)),
    "bij,bij->bi": ((2, 1, 3), (2, 3, 3)),
}


def added(op: str, bias: tuple[int, ...], *shapes: tuple[int, ...], **scales: float) -> tuple[Case, ...]:
    fn = getattr(torch, op)
    tensors = (real(*s, seed=k) for k, s in enumerate((bias, *shapes)))
    return case(lambda b, x, y: fn(b, x, y, **scales), *tensors)


CASES: dict[str, tuple[Case, ...]] = {
    "linear": (
        *case(lambda x, w: F.linear(x, w), real(3, 4), real(4)),
        *case(lambda x, w: F.linear(x, w), real(4), real(5, 4)),
        *case(lambda x, w, b: F.linear(x, w, b), real(3, 5, 4), real(7, 4), real(7)),
        *case(lambda x, w, b: F.linear(x, w, b), real(1, 1, 3), real(2, 3), real(2)),
        *case(lambda x, w, b: F.linear(x, w, b), real(0, 3), real(2, 3), real(2)),
    ),
    "matmul": tuple(c for a, b in MATMULS for c in case(lambda x, y: x @ y, real(*a), real(*b, seed=1))),
    "linalg_matmul": case(lambda x, y: torch.linalg.matmul(x, y), real(3, 4), real(4, 2)),
    "mm": case(lambda x, y: torch.mm(x, y), real(3, 4), real(4, 2)),
    "bmm": case(lambda x, y: torch.bmm(x, y), real(2, 3, 4), real(2, 4, 2)),
    "mv": case(lambda x, y: torch.mv(x, y), real(3, 4), real(4)),
    "dot": case(lambda x, y: torch.dot(x, y), real(4), real(4, seed=1)),
    "vdot": case(lambda x, y: torch.vdot(x, y), real(4), real(4, seed=1)),
    "outer": case(lambda x, y: torch.outer(x, y), real(4), real(3)),
    "ger": case(lambda x, y: torch.ger(x, y), real(4), real(3)),
    "addmm": (
        *added("addmm", (3, 2), (3, 4), (4, 2)),
        *added("addmm", (3, 1), (3, 4), (4, 2), beta=0.5, alpha=2),
        *added("addmm", (2,), (3, 4), (4, 2), beta=0.5),
        *added("addmm", (1,), (3, 4), (4, 2)),
        *added("addmm", (2,), (3, 4), (4, 2), beta=0),
    ),
    "addmv": (
        *added("addmv", (3,), (3, 5), (5,), beta=0.5, alpha=3),
        *added("addmv", (1,), (3, 4), (4,)),
    ),
    "baddbmm": (
        *added("baddbmm", (2, 3, 2), (2, 3, 5), (2, 5, 2), beta=0.5, alpha=3),
        *added("baddbmm", (3, 2), (2, 3, 4), (2, 4, 2)),
        *added("baddbmm", (2, 1, 2), (2, 3, 4), (2, 4, 2), alpha=0.1),
    ),
    "addbmm": (
        *added("addbmm", (3, 2), (2, 3, 5), (2, 5, 2), beta=0.5, alpha=3),
        *added("addbmm", (2,), (2, 3, 4), (2, 4, 2)),
    ),
    "addr": added("addr", (3, 2), (3,), (2,), beta=0.5, alpha=3),
    "inner": (
        *case(lambda x, y: torch.inner(x, y), real(3, 2), real(4, 2)),
        *case(lambda x, y: torch.inner(x, y), real(2), real(4, 3, 2)),
        *case(lambda x, y: torch.inner(x, y), real(3), real(3, seed=1)),
    ),
    "tensordot": (
        *case(lambda x, y: torch.tensordot(x, y, 2), real(3, 2, 4), real(2, 4, 2)),
        *case(lambda x, y: torch.tensordot(x, y, ([0, 2], [1, -1])), real(3, 2, 4), real(2, 3, 4)),
        *case(lambda x, y: torch.tensordot(x, y, 0), real(3, 2), real(2, 2)),
    ),
    "bilinear": (
        *case(lambda x, y, w, b: F.bilinear(x, y, w, b), real(3, 2), real(3, 5), real(2, 2, 5), real(2)),
        *case(lambda x, y, w: F.bilinear(x, y, w), real(3, 2, 3), real(3, 2, 4), real(2, 3, 4)),
        *case(lambda x, y, w: F.bilinear(x, y, w), real(3), real(4), real(2, 3, 4)),
    ),
    "einsum": tuple(
        c
        for text, shapes in EQUATIONS.items()
        for c in case(lambda *a, text=text: torch.einsum(text, *a), *(real(*s, seed=k) for k, s in enumerate(shapes)))
    ),
    "linalg_multi_dot": (
        *case(lambda x, y, z: torch.linalg.multi_dot([x, y, z]), real(3, 2), real(2, 3), real(3, 2)),
        *case(lambda x, y, z: torch.linalg.multi_dot([x, y, z]), real(2), real(2, 3), real(3)),
        *case(lambda x, y, z: torch.linalg.multi_dot([x, y, z]), real(2), real(2, 3), real(3, 2)),
    ),
    "chain_matmul": case(lambda x, y: aten.chain_matmul.default([x, y]), real(3, 2), real(2, 3)),
    "linalg_vecdot": (
        *case(lambda x, y: torch.linalg.vecdot(x, y), real(3, 2), real(3, 2, seed=1)),
        *case(lambda x, y: torch.linalg.vecdot(x, y, dim=0), real(3, 2), real(3, 1)),
    ),
    "linalg_cross": case(lambda x, y: torch.linalg.cross(x, y), real(4, 3), real(1, 3)),
    "cross": case(lambda x, y: torch.cross(x, y, dim=1), real(4, 3, 2), real(4, 3, 2, seed=1)),
    "cdist": (
        *case(lambda x, y: torch.cdist(x, y), real(2, 4, 3), real(2, 3, 3, seed=1)),
        *case(lambda x, y: torch.cdist(x, y, p=1.0), real(4, 3), real(2, 3, 3, seed=1)),
    ),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        for mesh in ("2", "3"):
            prove_op(op, each, mesh)


@pytest.mark.parametrize("op", ["linear", "addmm", "bmm"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][-1], "2x2")


SIZE = st.sampled_from([1, 2, 3, 4, 5])


@settings(max_examples=12, deadline=None)
@given(rows=st.lists(SIZE, max_size=2), i=SIZE, o=SIZE, bias=st.booleans(), mesh=st.sampled_from(["2", "3", "4"]))
def test_linear_of_any_size(rows: list[int], i: int, o: int, bias: bool, mesh: str) -> None:
    tensors = (real(*rows, i), real(o, i, seed=1), *([real(o, seed=2)] if bias else []))
    prove(lambda x, w, *b: F.linear(x, w, *b), *tensors, mesh=mesh, split=False)


@settings(max_examples=12, deadline=None)
@given(
    lead=st.lists(st.tuples(SIZE, st.integers(0, 2)), max_size=2),
    m=SIZE,
    k=SIZE,
    n=SIZE,
    mesh=st.sampled_from(["2", "3"]),
)
def test_matmul_broadcasts(lead: list[tuple[int, int]], m: int, k: int, n: int, mesh: str) -> None:
    """The second number of a leading dim: 0 both have it, 1 the left has size one, 2 the right has size one."""
    left, right = [1 if w == 1 else size for size, w in lead], [1 if w == 2 else size for size, w in lead]
    prove(lambda x, y: x @ y, real(*left, m, k), real(*right, k, n, seed=1), mesh=mesh, split=False)


def cut_letters(fn: object, *tensors: torch.Tensor) -> set[str]:
    analysis = analyse(program_of(fn, tensors))  # type: ignore[arg-type]
    return {f.letter for op in analysis.ops.values() for f in op.factors}


def test_a_diagonal_is_kept_whole() -> None:
    assert cut_letters(lambda x: torch.einsum("iij->j", x), real(4, 4, 2)) == {"j"}
    assert cut_letters(lambda x: torch.einsum("ii", x), real(4, 4)) == set()


def test_an_implicit_output_has_the_letters_that_appear_once() -> None:
    assert explicit("ij,jk") == (["ij", "jk"], "ik")
    assert explicit("b a, c") == (["ba", "c"], "abc")
    assert explicit("...ij->...ji") == (["...ij"], "...ji")
    with pytest.raises(RuleError, match="equation"):
        explicit("i1,j->ij")


def test_flop_of_a_contraction() -> None:
    assert contraction_flop(["ij", "jk"], "ik", [(3, 4), (4, 5)]) == 2 * 3 * 4 * 5
    assert contraction_flop(["...ij", "jk"], "...ik", [(2, 7, 3, 4), (4, 5)]) == 2 * 14 * 3 * 4 * 5
    assert contraction_flop(["ij", "jk", "kl"], "il", [(3, 4), (4, 5), (5, 6)]) == 2 * (3 * 4 * 5 + 3 * 5 * 6)
    flop = next(iter(analyse(program_of(lambda x, w: F.linear(x, w), (real(3, 4), real(5, 4)))).ops.values())).rule.flop
    assert flop == 2 * 3 * 4 * 5
