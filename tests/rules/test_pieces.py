"""Slices, splits and joins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules.pieces import RULES
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import prove

aten = torch.ops.aten
X, Y = real(4, 5), real(4, 5, seed=1)
CASES: dict[str, tuple[Case, ...]] = {
    "slice": (
        *case(lambda x: x[:, 1:4:2], X),
        *case(lambda x: x[1:], X),
        *case(lambda x: aten.slice.Tensor(x, 1, 0, 5), X),
        *case(lambda x: aten.slice.Tensor(x, 0, 0, 2**63 - 1), X),
        *case(lambda x: aten.slice.Tensor(x, 1, 5, 9), X),
    ),
    "narrow": (*case(lambda x: x.narrow(1, 1, 3), X), *case(lambda x: x.narrow(-1, 0, 5), X)),
    "select": (*case(lambda x: x.select(1, -1), X), *case(lambda x: x[2], X)),
    "unbind": case(lambda x: x.unbind(-1), real(4, 2)),
    "split": (
        *case(lambda x: x.split(5, 1), real(4, 10)),
        *case(lambda x: x.split(3, 1), X),
        *case(lambda x: x.split(2), X),
    ),
    "chunk": (*case(lambda x: x.chunk(2, -1), real(4, 10)), *case(lambda x: x.chunk(2, -1), X)),
    "split_with_sizes": (*case(lambda x: x.split([2, 3], 1), X), *case(lambda x: x.split([4, 4], 1), real(5, 8))),
    "tensor_split": (*case(lambda x: x.tensor_split(2, 1), X), *case(lambda x: x.tensor_split((2, 4), 1), real(5, 6))),
    "unsafe_split": case(lambda x: aten.unsafe_split.Tensor(x, 4, 1), real(3, 8)),
    "unsafe_chunk": case(lambda x: aten.unsafe_chunk(x, 2, 1), real(3, 8)),
    "unsafe_split_with_sizes": case(lambda x: aten.unsafe_split_with_sizes(x, [4, 4], 1), real(3, 8)),
    "hsplit": (*case(lambda x: x.hsplit(2), real(5, 8)), *case(lambda x: x.hsplit(2), real(8))),
    "vsplit": case(lambda x: x.vsplit(2), real(8, 5)),
    "dsplit": case(lambda x: x.dsplit(2), real(3, 2, 8)),
    "cat": (*case(lambda x, y: torch.cat([x, y, x], 1), X, real(4, 2)), *case(lambda x, y: torch.cat([x, y]), X, Y)),
    "concat": case(lambda x, y: torch.concat([x, y], -1), X, Y),
    "concatenate": case(lambda x, y: torch.concatenate([x, y], -1), X, Y),
    "hstack": (
        *case(lambda x, y: torch.hstack([x, y]), X, Y),
        *case(lambda x, y: torch.hstack([x, y]), real(5, 4, 2), real(5, 3, 2)),
    ),
    "vstack": (*case(lambda x, y: torch.vstack([x, y]), X, Y), *case(lambda x, y: torch.vstack([x, y]), real(5), X)),
    "row_stack": case(lambda x, y: aten.row_stack([x, y]), real(5), X),
    "dstack": (
        *case(lambda x, y: torch.dstack([x, y]), X, real(4, 5, 3)),
        *case(lambda x, y: torch.dstack([x, y]), real(5), real(1, 5, seed=1)),
    ),
    "column_stack": (
        *case(lambda x, y: torch.column_stack([x, y]), real(5), real(5, 3)),
        *case(lambda x, y: torch.column_stack([x, y]), X, Y),
    ),
    "stack": (*case(lambda x, y: torch.stack([x, y]), X, Y), *case(lambda x, y: torch.stack([x, y], -1), X, Y)),
    "select_scatter": case(lambda x, y: torch.select_scatter(x, y, 1, -1), X, real(4)),
    "slice_scatter": case(lambda x, y: torch.slice_scatter(x, y, 1, 1, 4, 2), X, real(4, 2)),
    "diagonal_scatter": case(lambda x, y: torch.diagonal_scatter(x, y, 1, 0, 2), real(3, 5, 4), real(5, 3)),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        if op != "hstack":
            prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["chunk", "cat", "slice_scatter", "stack"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 1), st.sampled_from(["2", "3", "4"]))
def test_chunks_of_any_size(pieces: int, size: int, other: int, dim: int, mesh: str) -> None:
    shape = [other, pieces * size] if dim else [pieces * size, other]
    prove(lambda x: [c * (i + 1) for i, c in enumerate(x.chunk(pieces, dim))], real(*shape), mesh=mesh, split=False)


def test_the_pieces_of_a_fused_dim_are_cut_through_a_reshape() -> None:
    """The rows of a fused projection are (3, heads, head_dim), and heads can be cut in all three pieces."""
    proof = prove(lambda x: [p.reshape(2, 2, 3) * 2 for p in x.chunk(3, -1)], real(2, 18), mesh="2")
    assert any(f.startswith("chunk:") for f in proof.factors)


def test_joins_with_old_style_empty_tensors_are_kept_whole() -> None:
    assert not prove(lambda x, y: torch.cat([x, y]), X, real(0), mesh="2", split=False).split


@pytest.mark.parametrize(
    "fn", [lambda x: x.chunk(2, 1), lambda x: x[:, :0], lambda x: torch.cat([x, x], 1), lambda x: x.split(2)]
)
def test_no_elements(fn: object) -> None:
    prove(fn, real(4, 0), mesh="2", split=False)


def test_booleans_have_no_partial_pieces() -> None:
    prove(lambda x: torch.cat([x > 0, x < 1]).chunk(2), X, mesh="2")


def test_equal_pieces_are_cut_along_the_dim_that_joins_them() -> None:
    """Two views of a batch, one after the other, and the halves of a rotated head."""
    for dim in (0, 1):
        proof = prove(lambda x, y, d=dim: torch.cat([x * 2, y], d).sin(), real(4, 6), real(4, 6, seed=1), mesh="2")
        assert f"cat:d{dim}" in proof.factors
        assert "cat:n" not in proof.factors


def test_a_join_of_equal_pieces_and_its_chunks_are_cut_together() -> None:
    proof = prove(lambda x, y: [p * 2 for p in torch.cat([x, y], 1).chunk(2, 1)], real(3, 4), real(3, 4), mesh="2")
    assert {"cat:d1", "chunk:d1"} <= proof.factors
