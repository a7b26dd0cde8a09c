"""Softmax and logsumexp, whole and across shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules.softmax import RULES
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import prove

aten = torch.ops.aten
X = real(4, 5)
INF = torch.where(X.detach() > 0.2, float("-inf"), X.detach())
CASES: dict[str, tuple[Case, ...]] = {
    "softmax": (
        *case(lambda x: x.softmax(-1), X),
        *case(lambda x: x.softmax(0), X),
        *case(lambda x: x.softmax(1, dtype=torch.float64), real(4, 8, grad=False).float()),
    ),
    "log_softmax": (*case(lambda x: x.log_softmax(-1), X), *case(lambda x: x.log_softmax(0), X)),
    "_softmax": case(lambda x: aten._softmax(x, 1, False), X),
    "_log_softmax": case(lambda x: aten._log_softmax(x, 1, False), X),
    "special_softmax": case(lambda x: torch.special.softmax(x, 1), X),
    "special_log_softmax": case(lambda x: torch.special.log_softmax(x, 1), X),
    "_safe_softmax": case(lambda x: aten._safe_softmax(x, 1), X),
    "logsumexp": (
        *case(lambda x: x.logsumexp(1), X),
        *case(lambda x: x.logsumexp(0, keepdim=True), X),
        *case(lambda x: x.logsumexp((0, 2)), real(3, 4, 5)),
        *case(lambda x: x.logsumexp(1), whole_numbers(9, 4, 5)),
    ),
    "special_logsumexp": case(lambda x: torch.special.logsumexp(x, 1), X),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_the_dim_itself_is_cut_by_one_axis_and_by_two(op: str) -> None:
    assert any(f.endswith(":r1") for f in prove(lambda x: getattr(x, op)(1), real(3, 8), mesh="2").factors)
    prove(lambda x: getattr(x, op)(1), real(3, 8), mesh="2x2")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2), st.sampled_from(["2", "3", "4"]))
def test_any_shape(shape: list[int], dim: int, mesh: str) -> None:
    prove(
        lambda x: x.softmax(dim % len(shape)) + x.logsumexp(dim % len(shape), True),
        real(*shape),
        mesh=mesh,
        split=False,
    )


@pytest.mark.parametrize("mesh", ["2", "4"])
def test_rows_that_are_masked_in_one_shard(mesh: str) -> None:
    x = INF.clone()
    x[:, :3] = float("-inf")
    x[:, -1] = 1.0
    prove(lambda x: x.softmax(1), x.requires_grad_(True), mesh=mesh)
    prove(lambda x: x.logsumexp(1), x.detach().requires_grad_(True), mesh=mesh)


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), 1e4])
def test_rows_of_one_extreme_value(value: float) -> None:
    x = torch.full((2, 4), value, dtype=torch.float64)
    prove(lambda x: (x.logsumexp(1), x.softmax(1)), x, mesh="2")


def test_large_values_do_not_overflow() -> None:
    prove(lambda x: (x * 1e5).softmax(-1) + (x * 1e5).logsumexp(-1, True), X, mesh="2")


def test_scalars() -> None:
    prove(lambda x: x.softmax(0) + x.logsumexp(0), real(), mesh="2", split=False)
