"""Views: regrouping, reordering and repeating dims."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autopar.rules.view import RULES, common_factors
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import prove

X = real(4, 5)
CASES: dict[str, tuple[Case, ...]] = {
    "view": (*case(lambda x: x.view(2, 3, 20), real(6, 5, 4)), *case(lambda x: x.view(-1), X)),
    "reshape": (*case(lambda x: x.reshape(20, 6), real(4, 5, 6)), *case(lambda x: x.reshape(1, 4, 1, 5), X)),
    "_unsafe_view": case(lambda x: torch.ops.aten._unsafe_view(x, [20]), X),
    "flatten": case(lambda x: x.flatten(1), real(4, 5, 2)),
    "unflatten": case(lambda x: x.unflatten(1, (2, 5)), real(4, 10)),
    "view_as": case(lambda x, y: x.view_as(y), real(20), X),
    "reshape_as": case(lambda x, y: x.reshape_as(y), real(20), X),
    "ravel": case(lambda x: x.ravel(), X),
    "atleast_1d": (*case(lambda x: torch.atleast_1d(x), X),),
    "atleast_2d": case(lambda x: torch.atleast_2d(x), real(5)),
    "atleast_3d": (*case(lambda x: torch.atleast_3d(x), X), *case(lambda x: torch.atleast_3d(x), real(5))),
    "transpose": case(lambda x: x.transpose(0, -1), real(4, 5, 2)),
    "swapdims": case(lambda x: x.swapdims(0, -1), real(4, 5, 2)),
    "swapaxes": case(lambda x: x.swapaxes(0, -1), real(4, 5, 2)),
    "t": (*case(lambda x: x.t(), X), *case(lambda x: x.t(), real(5))),
    "numpy_T": case(lambda x: x.T, X),
    "matrix_H": case(lambda x: x.H, X),
    "mT": case(lambda x: x.mT, real(2, 4, 5)),
    "mH": case(lambda x: x.mH, real(2, 4, 5)),
    "adjoint": case(lambda x: x.adjoint(), real(2, 4, 5)),
    "permute": case(lambda x: x.permute(2, 0, -2), real(4, 5, 2)),
    "movedim": (
        *case(lambda x: x.movedim(0, -1), real(4, 5, 2)),
        *case(lambda x: x.movedim((0, 1), (2, 0)), real(4, 5, 2)),
    ),
    "moveaxis": case(lambda x: x.moveaxis(0, -1), real(4, 5, 2)),
    "rot90": (*case(lambda x: x.rot90(1, (0, 2)), real(2, 5, 3)), *case(lambda x: x.rot90(2, (0, 1)), real(2, 3, 5))),
    "expand": (*case(lambda x: x.expand(3, 4, 5), real(4, 1)), *case(lambda x: x.expand(4, -1), real(1, 5))),
    "expand_as": case(lambda x, y: x.expand_as(y), real(1, 5), X),
    "broadcast_to": case(lambda x: x.broadcast_to((4, 5)), real(5)),
    "broadcast_tensors": case(lambda x, y: torch.broadcast_tensors(x, y), real(4, 1), real(5)),
    "meshgrid": (
        *case(lambda x, y, z: torch.meshgrid(x, y, z, indexing="ij"), real(2), real(5), real()),
        *case(lambda x, y: torch.meshgrid(x, y, indexing="xy"), real(4), real(5)),
    ),
    "repeat": (*case(lambda x: x.repeat(3, 2), real(4)), *case(lambda x: x.repeat(2, 4, 1), X)),
    "tile": (*case(lambda x: x.tile(4), X), *case(lambda x: x.tile(3, 1, 2), X)),
    "repeat_interleave": (
        *case(lambda x: x.repeat_interleave(4, 1), X),
        *case(lambda x: x.repeat_interleave(2, 0), X),
        *case(lambda x: x.repeat_interleave(2), X),
    ),
    "unsqueeze": case(lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)), X),
    "squeeze": (
        *case(lambda x: x.squeeze(), real(1, 4, 1, 5)),
        *case(lambda x: x.squeeze(-2), real(1, 4, 1, 5)),
        *case(lambda x: x.squeeze((0, 1)), real(1, 4, 1, 5)),
        *case(lambda x: x.squeeze(1), X),
    ),
    "pixel_shuffle": (
        *case(lambda x: F.pixel_shuffle(x, 2), real(2, 8, 2, 3)),
        *case(lambda x: F.pixel_shuffle(x, 3), real(18, 4, 2)),
    ),
    "pixel_unshuffle": case(lambda x: F.pixel_unshuffle(x, 2), real(3, 2, 4, 8)),
    "channel_shuffle": case(lambda x: F.channel_shuffle(x, 2), real(2, 10, 3)),
    "native_channel_shuffle": case(
        lambda x: torch.ops.aten.native_channel_shuffle(x, 2), real(2, 10, 3, 2, grad=False)
    ),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["reshape", "expand", "tile", "repeat_interleave", "pixel_unshuffle"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of one number of elements: products of one list of factors, in the same or in another grouping."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=4))
    shapes = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(0, len(factors)), max_size=3)))
        edges = [0, *cuts, len(factors)]
        shapes.append([math.prod(factors[a:b]) for a, b in itertools.pairwise(edges)])
        factors = draw(st.permutations(factors)) if draw(st.booleans()) else factors
    return shapes[0], shapes[1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(regroupings())
def test_common_factors_multiply_to_the_dims_that_have_them(shapes: tuple[list[int], list[int]]) -> None:
    ins, outs, sizes = common_factors(*shapes)
    for dims, shape in ((ins, shapes[0]), (outs, shapes[1])):
        assert len(dims) == len(shape)
        for dim, size in zip(dims, shape, strict=True):
            assert not dim or math.prod(sizes[f] for f in dim) == size
    assert [f for dim in ins for f in dim] == [f for dim in outs for f in dim]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(regroupings(), st.sampled_from(["2", "3", "4"]))
def test_reshape_of_any_shapes(shapes: tuple[list[int], list[int]], mesh: str) -> None:
    source, target = shapes
    prove(lambda x: x.reshape(target), real(*source), mesh=mesh, split=False)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(regroupings(), st.sampled_from(["2", "3"]))
def test_views_in_a_row(shapes: tuple[list[int], list[int]], mesh: str) -> None:
    """Divisions that travel through other ops: the parts of one view reach the next."""
    source, target = shapes
    prove(lambda x: (x * 2).reshape(target).unsqueeze(0).transpose(0, -1) + 1, real(*source), mesh=mesh, split=False)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.reshape(0, 4),
        lambda x: x.reshape(-1),
        lambda x: x.repeat(2, 3),
        lambda x: x.expand(2, 4, 0),
        lambda x: x.transpose(0, 1),
    ],
)
def test_no_elements(fn: object) -> None:
    prove(fn, real(4, 0), mesh="2", split=False)


def test_the_bits_of_another_type_have_no_rule() -> None:
    proof = prove(lambda x: x.view(torch.int64), real(4, 5, grad=False), mesh="2", split=False)
    assert not proof.split
