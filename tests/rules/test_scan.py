"""Scans, sorts and searches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules.scan import RULES
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import prove

X = real(4, 5)
ROWS = real(4, 3, grad=False).sort(-1).values
CASES: dict[str, tuple[Case, ...]] = {
    "cumsum": (
        *case(lambda x: x.cumsum(1), X),
        *case(lambda x: x.cumsum(0, dtype=torch.int64), real(4, 5, grad=False)),
    ),
    "cumprod": case(lambda x: x.cumprod(1), X),
    "cummax": case(lambda x: x.cummax(1), X),
    "cummin": case(lambda x: x.cummin(0), X),
    "logcumsumexp": case(lambda x: x.logcumsumexp(1), X),
    "sort": (*case(lambda x: x.sort(1), X), *case(lambda x: torch.sort(x, stable=True, dim=0, descending=True), X)),
    "argsort": (*case(lambda x: x.argsort(1), X), *case(lambda x: torch.argsort(x, stable=True), X)),
    "topk": (*case(lambda x: x.topk(2, 1), X), *case(lambda x: x.topk(3, 0, largest=False), X)),
    "msort": case(lambda x: x.msort(), X),
    "diff": (
        *case(lambda x: x.diff(), X),
        *case(lambda x, a, b: x.diff(2, 0, a, b), X, real(2, 5, seed=1), real(1, 5, seed=2)),
    ),
    "searchsorted": (
        *case(lambda rows, x: torch.searchsorted(rows, x, right=True), ROWS, real(4, 5, grad=False)),
        *case(lambda row, x: torch.searchsorted(row, x), ROWS[0].clone(), real(4, 5, grad=False)),
        *case(
            lambda r, x, s: torch.searchsorted(r, x, sorter=s),
            real(5, 3, grad=False),
            real(5, 2, grad=False),
            real(5, 3, grad=False).argsort(-1),
        ),
    ),
    "bucketize": case(lambda x, edges: torch.bucketize(x, edges), real(4, 5, grad=False), ROWS[0].clone()),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["cumsum", "topk", "searchsorted"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2), st.sampled_from(["2", "3", "4"]))
def test_any_dim(shape: list[int], dim: int, mesh: str) -> None:
    prove(lambda x: (x.cumsum(dim % len(shape)), x.sort(dim % len(shape)).values), real(*shape), mesh=mesh, split=False)


def test_a_sum_that_rounds_and_a_count_of_booleans_are_not_linear() -> None:
    prove(lambda x: (x > 0).cumsum(1), X, mesh="2")
    prove(lambda x: (x > 0).diff(), X, mesh="2")


def test_a_number_to_look_for_is_kept_whole() -> None:
    assert not prove(lambda row: torch.searchsorted(row, 0.5), ROWS[0].clone(), mesh="2", split=False).split


def test_scalars_and_no_elements() -> None:
    prove(lambda x: x.cumsum(0), real(), mesh="2", split=False)
    prove(lambda x: x.cumsum(1), real(4, 0), mesh="2", split=False)


def test_ties_are_sorted_alike() -> None:
    prove(lambda x: torch.sort(x, stable=True, dim=1), whole_numbers(2, 4, 5), mesh="2")
