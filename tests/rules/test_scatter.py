"""Writes by index: those that add up leave partial sums where the writes are cut, those that overwrite are whole."""

from __future__ import annotations

import pytest
import torch

from autopar.rules.scatter import RULES
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import prove

aten = torch.ops.aten
X = real(4, 5)
Z = real(4, 5, 3)
ORDER = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(4)])
CASES: dict[str, tuple[Case, ...]] = {
    "scatter": (
        *case(lambda x, i, s: x.scatter(1, i, s), X, ORDER, real(4, 3, seed=1)),
        *case(lambda x, i: x.scatter(1, i, 2.0), X, ORDER),
        *case(lambda x, i, s: x.scatter(-1, i, s), X, ORDER, real(4, 5, grad=False)),
    ),
    "scatter_add": (
        *case(lambda x, i, s: x.scatter_add(1, i, s), X, whole_numbers(5, 4, 5), real(4, 5, seed=1)),
        *case(lambda x, i, s: x.scatter_add(1, i, s), X, whole_numbers(5, 4, 3), real(4, 5, grad=False)),
        *case(lambda x, i, s: x.scatter_add(0, i, s), Z, whole_numbers(4, 6, 5, 3), real(6, 5, 3, seed=1)),
        *case(lambda x, i, s: x.scatter_add(1, i, s), Z, whole_numbers(5, 2, 4, 3), real(2, 4, 3, seed=1)),
    ),
    "scatter_reduce": (
        *case(lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), X, whole_numbers(5, 4, 6), real(4, 6, seed=1)),
        *case(lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), X, whole_numbers(5, 4, 6), real(4, 6, seed=1)),
        *case(
            lambda x, i, s: x.scatter_reduce(1, i, s, "sum", include_self=False),
            X,
            whole_numbers(5, 4, 6),
            real(4, 6, seed=1),
        ),
        *case(lambda x, i, s: x.scatter_reduce(1, i, s, "mean"), X, whole_numbers(5, 4, 6), real(4, 6, seed=1)),
    ),
    "index_add": (
        *case(lambda x, i, s: x.index_add(1, i, s), X, whole_numbers(5, 8), real(4, 8, seed=1)),
        *case(lambda x, i, s: x.index_add(0, i, s, alpha=2), Z, whole_numbers(4, 5), real(5, 5, 3, seed=1)),
    ),
    "index_copy": case(lambda x, i, s: x.index_copy(1, i, s), X, torch.tensor([4, 0, 2]), real(4, 3, seed=1)),
    "index_fill": (
        *case(lambda x, i: x.index_fill(1, i, 2.0), X, torch.tensor([4, 0])),
        *case(lambda x, i, v: x.index_fill(1, i, v), X, torch.tensor([4, 0]), real(seed=1)),
    ),
    "index_put": (
        *case(lambda x, i, v: aten.index_put(x, [None, i], v), Z, torch.tensor([4, 0]), real(4, 2, 3, seed=1)),
        *case(lambda x, i, v: aten.index_put(x, [i], v, True), Z, whole_numbers(4, 6), real(6, 5, 3, seed=1)),
        *case(lambda x, i, v: aten.index_put(x, [i], v, True), Z, whole_numbers(4, 6), real(5, 1, seed=1)),
        *case(
            lambda x, i, j, v: aten.index_put(x, [i, j], v, True),
            Z,
            whole_numbers(4, 6, 1),
            whole_numbers(5, 2),
            real(6, 2, 3, seed=1),
        ),
        *case(
            lambda x, i, j, v: aten.index_put(x, [i, None, j], v, True),
            Z,
            whole_numbers(4, 6),
            whole_numbers(3, 6),
            real(seed=1),
        ),
    ),
    "_unsafe_index_put": case(
        lambda x, i, v: aten._unsafe_index_put(x, [i], v, True), Z, whole_numbers(4, 6), real(6, 5, 3, seed=1)
    ),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["scatter_add", "index_add"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@pytest.mark.parametrize(
    ("op", "number", "adds"),
    [
        ("scatter_add", 0, True),
        ("scatter", 0, False),
        ("scatter_reduce", 0, True),
        ("scatter_reduce", 1, False),
        ("scatter_reduce", 2, False),
        ("index_add", 0, True),
        ("index_copy", 0, False),
    ],
)
def test_only_writes_that_add_up_are_cut(op: str, number: int, adds: bool) -> None:
    proof = prove_op(op, CASES[op][number], "2")
    assert any(f.endswith(":i") for f in proof.factors) == adds


def test_writes_through_a_mask_are_kept_whole() -> None:
    proof = prove(lambda x, m, v: aten.index_put(x, [m], v), X, X.detach() > 0, real(seed=1), mesh="2", split=False)
    assert "index_put" not in proof.ops


def test_an_expert_mixture_combines_its_tokens() -> None:
    """Tokens sorted by expert, weighted and added back: both tokens and hidden dim can be cut."""

    def combine(x: torch.Tensor, token: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        picked = x.index_select(0, token) * weight[:, None]
        return torch.zeros_like(x).index_add(0, token, picked)

    proof = prove(combine, real(4, 6), whole_numbers(4, 8), real(8, seed=1), mesh="2")
    assert {"index_add", "index_select"} <= proof.ops
