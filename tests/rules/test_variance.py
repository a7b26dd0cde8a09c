"""Variance, standard deviation and norms, whole and across shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules.call import Call
from autopar.rules.variance import RULES, variance
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import program_of, prove

aten = torch.ops.aten
X = real(4, 5)
Z = real(3, 4, 5)
CASES: dict[str, tuple[Case, ...]] = {
    "var": (
        *case(lambda x: x.var(1), X),
        *case(lambda x: x.var(), X),
        *case(lambda x: x.var((0, 2), correction=0, keepdim=True), Z),
        *case(lambda x: x.var(1, unbiased=False), X),
        *case(lambda x: torch.var(x, 1, correction=2), X),
    ),
    "std": (
        *case(lambda x: x.std(1), X),
        *case(lambda x: x.std(0, unbiased=False, keepdim=True), X),
        *case(lambda x: x.std(), X),
    ),
    "var_mean": (*case(lambda x: torch.var_mean(x, 1), X), *case(lambda x: torch.var_mean(x, (0, 2), keepdim=True), Z)),
    "std_mean": case(lambda x: torch.std_mean(x, 1), X),
    "linalg_vector_norm": (
        *case(lambda x: x.norm(dim=1), X),
        *case(lambda x: x.norm(), X),
        *case(lambda x: torch.linalg.vector_norm(x, 3, dim=1), X),
        *case(lambda x: torch.linalg.vector_norm(x, float("inf"), dim=(0, 2), keepdim=True), Z),
        *case(lambda x: torch.linalg.vector_norm(x, dim=0, dtype=torch.float64), real(4, 5, grad=False).float()),
    ),
    "linalg_norm": (
        *case(lambda x: torch.linalg.norm(x, dim=1), X),
        *case(lambda x: torch.linalg.norm(x), X),
        *case(lambda x: torch.linalg.norm(x, 1, dim=0, keepdim=True), X),
        *case(lambda x: torch.linalg.norm(x, 2, dim=(1, 2)), Z),
        *case(lambda x: torch.linalg.norm(x, "nuc", dim=(0, 2)), Z),
        *case(lambda x: torch.linalg.norm(x, 2), real(5)),
    ),
    "linalg_matrix_norm": (
        *case(lambda x: torch.linalg.matrix_norm(x), Z),
        *case(lambda x: torch.linalg.matrix_norm(x, 2), Z),
    ),
    "frobenius_norm": case(lambda x: aten.frobenius_norm.dim(x, [0, 2]), Z),
    "norm": (
        *case(lambda x: aten.norm.ScalarOpt_dim(x, 2, [1], True), X),
        *case(lambda x: aten.norm.ScalarOpt_dim(x, 1, [0]), X),
    ),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


def test_the_spectral_norm_is_no_sum_of_squares() -> None:
    proof = prove(lambda x: torch.linalg.norm(x, 2), real(4, 6), mesh="2", split=False)
    assert not proof.split


@pytest.mark.parametrize("op", ["var", "var_mean", "linalg_vector_norm"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@pytest.mark.parametrize(
    "fn", [lambda x: x.var(1), lambda x: x.std(1), lambda x: x.norm(dim=1), lambda x: torch.var_mean(x, 1)]
)
def test_the_reduced_dim_itself_is_cut(fn: object) -> None:
    assert any(f.endswith(":r1") for f in prove(fn, X, mesh="2").factors)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda s: st.tuples(st.just(s), st.sets(st.integers(0, len(s) - 1), min_size=1))
    ),
    st.booleans(),
    st.sampled_from(["2", "3", "4"]),
)
def test_any_dims(where: tuple[list[int], set[int]], keep: bool, mesh: str) -> None:
    shape, dims = where
    prove(lambda x: x.var(sorted(dims), correction=0, keepdim=keep), real(*shape), mesh=mesh, split=False)
    prove(lambda x: torch.linalg.vector_norm(x, dim=sorted(dims), keepdim=keep), real(*shape), mesh=mesh, split=False)


@pytest.mark.parametrize("fn", [lambda x: x.norm(dim=1), lambda x: x.std(1)])
def test_the_gradient_at_zero_is_torchs(fn: object) -> None:
    prove(fn, torch.zeros(2, 4, dtype=torch.float64, requires_grad=True), mesh="2")


def test_the_variance_of_values_far_from_zero() -> None:
    prove(lambda x: x.var(1), (X.detach() + 1e6).requires_grad_(True), mesh="2")


def test_no_shard_is_empty_where_torch_would_warn_of_it() -> None:
    """Rows on ranks that hold none have a variance of no rows."""
    rows = Call(next(n for n in program_of(lambda x: x.var(1), (real(4, 5),)).calls))
    assert "d0" in variance(rows).filled
    prove(lambda x: x.var(1) + x.std(1), real(4, 5), mesh="3", split=False)
