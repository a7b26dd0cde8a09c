"""Reductions: sums cut anywhere, the others with their dims whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules.analyse import analyse
from autopar.rules.reduction import RULES
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import program_of, prove

X = real(4, 5)
Z = real(3, 4, 5)
B = X.detach() > 0
NAN = torch.where(X.detach() > 1, float("nan"), X.detach())
CASES: dict[str, tuple[Case, ...]] = {
    "sum": (
        *case(lambda x: x.sum(), X),
        *case(lambda x: x.sum((0, -1), keepdim=True), Z),
        *case(lambda x: x.sum(1, dtype=torch.float64), real(4, 5, grad=False).float()),
        *case(lambda x: x.sum(0), B),
        *case(lambda x: x.sum(0, dtype=torch.int64), real(4, 5, grad=False)),
    ),
    "mean": (
        *case(lambda x: x.mean(), X),
        *case(lambda x: x.mean((0, 2), keepdim=True), Z),
        *case(lambda x: x.mean(-1, dtype=torch.float64), X.float().detach()),
        *case(lambda x: x.mean(), real(4, 4)),
    ),
    "nansum": (*case(lambda x: x.nansum(1), NAN.requires_grad_(True)), *case(lambda x: x.nansum(), X)),
    "count_nonzero": (
        *case(lambda x: torch.count_nonzero(x, 1), B),
        *case(lambda x: torch.count_nonzero(x), whole_numbers(2, 4, 5)),
    ),
    "histc": (
        *case(lambda x: torch.histc(x, 4, -1, 2), X.detach()),
        *case(lambda x: torch.histc(x.double(), 4, 0, 4), whole_numbers(4, 2, 5)),
    ),
    "max": (
        *case(lambda x: x.max(1), X),
        *case(lambda x, y: torch.max(x, y), X, real(5, seed=1)),
    ),
    "min": (*case(lambda x: x.min(0, keepdim=True), X), *case(lambda x, y: torch.min(x, y), X, real(5, seed=1))),
    "amax": (*case(lambda x: x.amax(1), X), *case(lambda x: x.amax((0, 2), keepdim=True), Z)),
    "amin": case(lambda x: x.amin(-2), X),
    "aminmax": case(lambda x: torch.aminmax(x, dim=1), X),
    "argmax": (*case(lambda x: x.argmax(1), X), *case(lambda x: x.argmax() + x.argmax(0), X)),
    "argmin": case(lambda x: x.argmin(0, keepdim=True), X),
    "any": (*case(lambda x: x.any(1), B), *case(lambda x: x.any((0, 1), keepdim=True), Z.detach() > 1)),
    "all": (*case(lambda x: x.all(0), B), *case(lambda x: (x > -9).all() & x.all(1), B.int())),
    "prod": case(lambda x: x.prod(1), X),
    "median": case(lambda x: x.median(1), X),
    "nanmedian": case(lambda x: x.nanmedian(0), X),
    "mode": case(lambda x: x.mode(1), whole_numbers(3, 4, 5)),
    "kthvalue": case(lambda x: x.kthvalue(2, 1), X),
    "nanmean": case(lambda x: x.nanmean(1), NAN.detach()),
    "quantile": case(lambda x: x.quantile(0.3, 1), X),
    "nanquantile": case(lambda x: x.nanquantile(0.3, 1), X),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["sum", "mean", "amax"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda s: st.tuples(st.just(s), st.sets(st.integers(0, len(s) - 1)))
    ),
    st.booleans(),
    st.sampled_from(["2", "3", "4"]),
)
def test_sums_and_means_over_any_dims(where: tuple[list[int], set[int]], keep: bool, mesh: str) -> None:
    shape, dims = where
    prove(lambda x: x.sum(sorted(dims), keep) + x.mean(sorted(dims), keep), real(*shape), mesh=mesh, split=False)


def test_a_mean_over_a_dim_with_parts() -> None:
    prove(lambda x: x.reshape(2, 3, 5).transpose(0, 1) * x.mean(0), real(6, 5), mesh="2")


def test_a_mean_of_half_precision_does_not_overflow_where_the_whole_does_not() -> None:
    x = torch.full((4096,), 300.0, dtype=torch.float16)
    prove(lambda x: x.mean(), x, mesh="2", tolerance=1e-3)


def test_a_sum_that_rounds_its_input_is_not_linear() -> None:
    analysis = analyse(program_of(lambda x: x.sum(0, dtype=torch.int64), (real(4, 5, grad=False),)))
    assert next(iter(analysis.ops.values())).rule.linear == ()
    analysis = analyse(program_of(lambda x: x.sum(0), (B,)))
    assert next(iter(analysis.ops.values())).rule.linear == ()


@pytest.mark.parametrize("fn", [lambda x: x.sum(1), lambda x: x.mean(0), lambda x: x.sum(), lambda x: x.amax(0)])
def test_no_elements(fn: object) -> None:
    prove(fn, real(4, 0), mesh="2", split=False)


def test_scalars() -> None:
    prove(lambda x: x.sum() + x.mean() + x.amax(), real(), mesh="2", split=False)


@pytest.mark.parametrize(
    "fn", [lambda x, q: torch.quantile(x, q, 1), lambda x, q: x.argmax() * q, lambda x, q: x.max() * x]
)
def test_reductions_of_all_elements_are_kept_whole(fn: object) -> None:
    proof = prove(fn, X, torch.tensor(0.5, dtype=torch.float64), mesh="2", split=False)
    assert not proof.ops & {"quantile", "argmax", "max"}
