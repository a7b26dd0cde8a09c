"""Roll, flip, pad, triangles, diagonals and windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autopar.rules.shift import RULES
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import prove

aten = torch.ops.aten
X = real(4, 5)
CASES: dict[str, tuple[Case, ...]] = {
    "roll": (*case(lambda x: x.roll(2, 1), X), *case(lambda x: x.roll((1, 2), (0, -1)), real(3, 5, 2))),
    "flip": case(lambda x: x.flip(-1), X),
    "fliplr": case(lambda x: x.fliplr(), X),
    "flipud": case(lambda x: x.flipud(), X),
    "pad": (
        *case(lambda x: F.pad(x, (1, 2)), X),
        *case(lambda x: F.pad(x, (0, 0, 1, 0), value=2.0), X),
        *case(lambda x: F.pad(x, (1, -1)), X),
        *case(lambda x: F.pad(x, (1, 2), mode="reflect"), real(5, 4, 4)),
        *case(lambda x: F.pad(x, (1, 2), mode="reflect"), X),
        *case(lambda x: F.pad(x, (1, 0, 0, 0), mode="replicate"), real(5, 4, 2, 2)),
        *case(lambda x: F.pad(x, (1, 1), mode="circular"), real(5, 4, 2)),
    ),
    "constant_pad_nd": case(lambda x: aten.constant_pad_nd(x, [1, 2], 0.0), X),
    "reflection_pad1d": case(lambda x: aten.reflection_pad1d(x, [1, 2]), real(5, 4, 4)),
    "reflection_pad2d": case(lambda x: aten.reflection_pad2d(x, [1, 0, 0, 1]), real(4, 5, 2, 2)),
    "reflection_pad3d": case(lambda x: aten.reflection_pad3d(x, [1, 0, 0, 1, 1, 1]), real(4, 5, 2, 2, 2)),
    "replication_pad1d": case(lambda x: aten.replication_pad1d(x, [1, 2]), real(5, 4, 2)),
    "replication_pad2d": case(lambda x: aten.replication_pad2d(x, [1, 0, 0, 1]), real(5, 2, 2)),
    "replication_pad3d": case(lambda x: aten.replication_pad3d(x, [1, 0, 0, 1, 1, 1]), real(4, 5, 2, 2, 2)),
    "tril": (*case(lambda x: x.tril(), real(5, 4)), *case(lambda x: x.tril(-2), real(3, 4, 5))),
    "triu": (*case(lambda x: x.triu(1), real(4, 5)), *case(lambda x: x.triu(-2), real(8, 4))),
    "diagonal": (
        *case(lambda x: x.diagonal(1, 0, 2), real(3, 5, 4)),
        *case(lambda x: x.diagonal(0, -1, 0), real(3, 4, 3)),
    ),
    "diag_embed": (*case(lambda x: torch.diag_embed(x), X), *case(lambda x: torch.diag_embed(x, 1, 0, 1), X)),
    "unfold": case(lambda x: x.unfold(1, 3, 2), real(4, 7)),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["tril", "pad", "diagonal"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


def test_a_triangle_cut_by_two_axes_on_one_dim() -> None:
    prove(lambda x: x.tril(), real(4, 4), mesh="2x2")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(-4, 4), st.sampled_from(["2", "3", "4"]))
def test_triangles_of_any_size(rows: int, columns: int, offset: int, mesh: str) -> None:
    prove(lambda x: x.tril(offset) - 2 * x.triu(offset), real(rows, columns), mesh=mesh, split=False)


def test_a_triangle_whose_rows_have_parts_is_cut_in_runs_only() -> None:
    proof = prove(lambda x: (x.tril(), x.reshape(2, 4, 3).transpose(0, 1) * 2), real(8, 3), mesh="2")
    assert {f for f in proof.factors if f.startswith("tril:d0")} == {"tril:d0.0"}


def test_rolling_all_elements_is_kept_whole() -> None:
    assert not prove(lambda x: x.roll(3), X, mesh="2", split=False).split


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2), min_size=4, max_size=4), st.sampled_from([0.0, 1.5]), st.sampled_from(["2", "3", "4"])
)
def test_borders_of_any_width(amounts: list[int], value: float, mesh: str) -> None:
    prove(lambda x: F.pad(x, amounts, value=value), real(4, 5), mesh=mesh, split=False)
