"""Schedules by name.

Enters: a name of the public interface, ranks, stages a rank, micro-batches. Leaves: a `Schedule`.
Refused, with a `PlanError`: unknown names, sizes below 1, stages a rank that the schedule is not made for.
Any number of micro-batches works, fewer than ranks too; it then leaves ranks idle, as it must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import PlanError
from autopar.schedule import asynchronous, chimera, loops, vee
from autopar.schedule.loops import RowMaker
from autopar.schedule.table import Row, Schedule


@dataclass(frozen=True, slots=True)
class Kind:
    """How a schedule is built.

    Fields:  row: the row of a rank. virtual: stages a rank that it is made for, None: any number.
             place: the rank of a stage, from (stage, ranks). replicas, asynchronous: as in `Schedule`.
    """

    row: RowMaker
    virtual: int | None
    place: Callable[[int, int], int]
    replicas: int = 1
    asynchronous: bool = False


def loop(stage: int, ranks: int) -> int:
    """Stages go round the ranks: 0 1 2 3 0 1 2 3."""
    return stage % ranks


def down_and_up(stage: int, ranks: int) -> int:
    """Two stages a rank, the second ones in reverse: 0 1 2 3 3 2 1 0."""
    return min(stage, 2 * ranks - 1 - stage)


KINDS = {
    "gpipe": Kind(loops.gpipe, 1, loop),
    "1f1b": Kind(loops.one_forward_one_backward, 1, loop),
    "interleaved-1f1b": Kind(loops.interleaved, None, loop),
    "looped-bfs": Kind(loops.looped_bfs, None, loop),
    "interleaved-zb": Kind(loops.interleaved_zb, None, loop),
    "zb-h1": Kind(loops.zb_h1, 1, loop),
    "zb-2p": Kind(loops.zb_2p, 1, loop),
    "zb-v": Kind(vee.zb_v, 2, down_and_up),
    "dualpipe-v": Kind(vee.dualpipe_v, 2, down_and_up),
    "async-1f1b": Kind(asynchronous.no_flush, 1, loop, asynchronous=True),
    "2bw": Kind(asynchronous.two_buffers, 1, loop, asynchronous=True),
    "chimera": Kind(chimera.two_ways, 1, chimera.place, replicas=2),
}


@lru_cache(maxsize=256)
def build(name: str, ranks: int, virtual_stages: int = 1, microbatches: int = 1) -> Schedule:
    """The table of a schedule; the same object for the same question.

    Args:    name: "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-h1", "zb-2p", "zb-v",
             "dualpipe-v", "async-1f1b", "2bw", "chimera". ranks: pipeline ranks. virtual_stages: stages a rank; zb-v
             and dualpipe-v are made for 2, the interleaved ones and looped-bfs for any number, the others for 1.
             microbatches: of one call.
    Raises:  PlanError: no such schedule, or sizes that it cannot have.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise PlanError(f"schedule {name!r} is none of {', '.join(KINDS)}")
    sizes = {"ranks": ranks, "virtual_stages": virtual_stages, "microbatches": microbatches}
    for what, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(f"schedule {name}: {what}={size!r} must be an integer of at least 1")
    if kind.virtual not in (None, virtual_stages):
        raise PlanError(
            f"schedule {name}: virtual_stages={virtual_stages}, but it is made for {kind.virtual} "
            f"stage{'s' if kind.virtual != 1 else ''} a rank"
        )
    stages = ranks * virtual_stages * kind.replicas
    rows = tuple(Row(kind.row(rank, ranks, virtual_stages, microbatches)) for rank in range(ranks))
    placement = tuple(kind.place(stage, ranks) for stage in range(stages))
    return Schedule(name, ranks, stages, microbatches, placement, rows, kind.replicas, kind.asynchronous)
