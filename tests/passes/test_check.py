"""The layout checker accepts what the shard pass makes and refuses every way to break it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.fx import Node

from autopar.layout import I, P, R, S
from autopar.passes.check import check_layouts
from autopar.program import Program, record, set_record
from autopar.runtime.moves import move
from tests.passes.test_shard import MEGATRON, MESH, sharded


def first(program: Program, wanted: Callable[[Node], bool]) -> Node:
    return next(n for n in program.graph.nodes if wanted(n))


def test_accepts_the_program_of_every_rank() -> None:
    for rank in range(4):
        analysis, _, local = sharded(MESH, MEGATRON, rank)
        check_layouts(local, analysis, MESH, MESH.coordinate(rank))


def skip_reduction(program: Program) -> None:
    """The row-parallel product is used before it is summed."""
    reduction = first(program, lambda n: n.target is move and n.args[2:4] == ("P", "I"))
    reduction.replace_all_uses_with(reduction.args[0])  # type: ignore[arg-type]


def skip_replication(program: Program) -> None:
    """A weight whose gradient is a part on each rank is read as if it were whole."""
    copy = first(program, lambda n: n.target is move and n.args[1:4] == ("dp", "I", "R"))
    copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]


def wrong_source(program: Program) -> None:
    reduction = first(program, lambda n: n.target is move and n.args[2:4] == ("P", "I"))
    reduction.args = (*reduction.args[:2], "R", *reduction.args[3:])


def wrong_record(program: Program) -> None:
    reduction = first(program, lambda n: n.target is move and n.args[2:4] == ("P", "I"))
    set_record(reduction, layout=(P, *record(reduction).layout[1:]))  # type: ignore[index]


def wrong_shape(program: Program) -> None:
    product = first(program, lambda n: "relu" in str(n.target))
    set_record(product, layout=(I, S(0)))


def other_axis(program: Program) -> None:
    reduction = first(program, lambda n: n.target is move and n.args[2:4] == ("P", "I"))
    set_record(reduction, layout=(I, R))


def partial_output(program: Program) -> None:
    result = program.output.args[0][0]  # type: ignore[index]
    set_record(result, layout=(P, I))


@pytest.mark.parametrize(
    "damage", [skip_reduction, skip_replication, wrong_source, wrong_record, wrong_shape, other_axis, partial_output]
)
def test_refuses(damage: Callable[[Program], None]) -> None:
    analysis, _, local = sharded(MESH, MEGATRON)
    damage(local)
    with pytest.raises(AssertionError):
        check_layouts(local, analysis, MESH, (0, 0))
