"""Convolutions: cut batch, channels and groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autopar.rules.analyse import analyse
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import program_of, prove

aten = torch.ops.aten


def conv(name: str, *shapes: tuple[int, ...], **options: object) -> tuple[Case, ...]:
    fn = getattr(F, name)
    return case(lambda *tensors: fn(*tensors, **options), *(real(*s, seed=k) for k, s in enumerate(shapes)))


CASES: dict[str, tuple[Case, ...]] = {
    "conv1d": (
        *conv("conv1d", (3, 2, 5), (4, 2, 3), (4,), padding=1),
        *conv("conv1d", (3, 6, 5), (4, 3, 3), (4,), groups=2),
        *conv("conv1d", (1, 6, 3), (9, 2, 1), (9,), groups=3),
        *conv("conv1d", (3, 5), (4, 3, 3), (4,)),
    ),
    "conv2d": (
        *conv("conv2d", (3, 4, 5, 4), (5, 4, 3, 3), (5,), padding=1, stride=2),
        *conv("conv2d", (5, 3, 4, 4), (3, 3, 2, 2), dilation=2),
        *conv("conv2d", (2, 2, 4, 3), (3, 2, 3, 3), (3,), padding="same"),
        *conv("conv2d", (2, 3, 4, 4), (3, 1, 2, 2), groups=3),
        *conv("conv2d", (3, 3, 3), (2, 3, 2, 2), (2,)),
    ),
    "conv3d": conv("conv3d", (3, 2, 3, 2, 3), (3, 2, 2, 2, 2), (3,)),
    "conv_transpose1d": conv("conv_transpose1d", (2, 3, 4), (3, 4, 3), (4,), stride=2, output_padding=1),
    "conv_transpose2d": (
        *conv("conv_transpose2d", (3, 4, 3, 3), (4, 3, 2, 2), (6,), groups=2),
        *conv("conv_transpose2d", (3, 2, 2), (3, 5, 2, 2)),
    ),
    "conv_transpose3d": conv("conv_transpose3d", (1, 3, 2, 2, 2), (3, 2, 2, 2, 1), (2,)),
    "convolution": (
        *case(
            lambda x, w, b: aten.convolution.default(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
            *(real(3, 4, 3, 3), real(6, 2, 2, 2), real(6)),
        ),
        *case(
            lambda x, w: aten.convolution.default(x, w, None, [1], [0], [1], True, [0], 1),
            *(real(3, 4, 3), real(4, 3, 2)),
        ),
    ),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        for mesh in ("2", "3"):
            prove_op(op, each, mesh)


@pytest.mark.parametrize("which", [0, 1])
def test_two_axes(which: int) -> None:
    prove_op("conv1d", CASES["conv1d"][which], "2x2")


FEW = st.sampled_from([1, 2, 3, 4])


@settings(max_examples=10, deadline=None)
@given(
    n=FEW,
    g=FEW,
    i=FEW,
    o=FEW,
    bias=st.booleans(),
    transposed=st.booleans(),
    mesh=st.sampled_from(["2", "3", "4"]),
)
def test_any_channels_and_groups(n: int, g: int, i: int, o: int, bias: bool, transposed: bool, mesh: str) -> None:
    fn = F.conv_transpose1d if transposed else F.conv1d
    weight = real(g * i, o, 2, seed=1) if transposed else real(g * o, i, 2, seed=1)
    tensors = (real(n, g * i, 3), weight, *([real(g * o, seed=2)] if bias else []))
    prove(lambda *t: fn(*t, groups=g), *tensors, mesh=mesh, split=False)


def test_flop_counts_each_input_channel_of_a_group() -> None:
    def flop(name: str) -> float:
        each = CASES[name][0]
        return next(iter(analyse(program_of(each.fn, each.tensors)).ops.values())).rule.flop

    assert flop("conv1d") == 2 * (3 * 4 * 5) * (2 * 3)
    assert flop("conv_transpose1d") == 2 * (2 * 3 * 4) * (4 * 3)
    assert flop("convolution") == 2 * (3 * 6 * 2 * 2) * (2 * 2 * 2)
