"""Is a table complete, free of deadlock, and how much does it hold? Asked without running it.

Enters: a `Schedule`, which stages read which, how much may be in flight. Leaves: `Facts`.
Refused, with a `PlanError`: an action missing or there twice, a deadlock, more micro-batches in flight than allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import PlanError
from autopar.schedule.table import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Ints, Row, Schedule
from autopar.schedule.waves import Reads, waves


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds of a table however long its actions take, and in the legal order that `waves` gives.

    Fields:  slots: length of that order. in_flight: for each rank, the most micro-batches (each stage's counted for
             itself) whose saved activations it holds at once. in_flight_by_stage: the same for each stage.
             received: for each rank, the most values that it holds received and not yet taken, in that order.
    """

    slots: int
    in_flight: tuple[int, ...]
    in_flight_by_stage: tuple[int, ...]
    received: tuple[int, ...]


def check(schedule: Schedule, reads: Reads | None = None, limit: Sequence[int] | None = None) -> Facts:
    """Check a table.

    Args:    reads: which earlier stages each stage takes values from; None: the one before. limit: most micro-batches
             in flight for each rank.
    Raises:  PlanError: the table is not complete, deadlocks or holds more than `limit`.
    """
    _complete(schedule)
    order = waves(schedule, reads)
    held = tuple(_peak(row.codes) for row in schedule.rows)
    if limit is not None:
        for rank, (most, allowed) in enumerate(zip(held, limit, strict=True)):
            if most > allowed:
                raise PlanError(f"schedule {schedule.name}: rank {rank} holds {most} micro-batches, allowed {allowed}")
    by_stage = tuple(
        _peak(codes[codes[:, 0] == stage])
        for stage, codes in ((s, schedule.rows[schedule.placement[s]].codes) for s in range(schedule.stages))
    )
    slot = np.searchsorted(order.bounds, np.arange(len(order.stage)), side="right") - 1
    came, taken = slot[order.edges[:, 0]], slot[order.edges[:, 1]]
    received = []
    for rank in range(schedule.ranks):
        mine = order.rank[order.edges[:, 1]] == rank
        change = np.zeros(len(order.bounds) + 1, dtype=np.int64)
        np.add.at(change, came[mine] + 1, 1)
        np.add.at(change, taken[mine] + 1, -1)  # it is held while it is being used
        received.append(int(np.cumsum(change).max(initial=0)))
    return Facts(len(order.bounds) - 1, held, by_stage, tuple(received))


def in_flight(row: Row) -> tuple[int, ...]:
    """Micro-batches whose activations a rank holds after each of its actions.

    A forward holds one more; its whole backward, or its weight gradient, lets it go. A row of an asynchronous table
    begins with what the call before left.
    """
    return tuple(_level(row.codes).tolist())


def carried(codes: Ints) -> int:
    """Micro-batches in flight when an asynchronous row begins: as many as its first backward is behind, a stage."""
    return sum(max(0, -int(codes[codes[:, 0] == stage, 2].min())) for stage in np.unique(codes[:, 0]))


def _level(codes: Ints) -> Ints:
    work = codes[:, 1]
    ends = (work == BACKWARD) | (work == WEIGHT_GRAD)
    return carried(codes) + np.cumsum(np.where(work == FORWARD, 1, np.where(ends, -1, 0)))


def _peak(codes: Ints) -> int:
    return int(_level(codes).max(initial=0))


def _complete(schedule: Schedule) -> None:
    """Every stage has for every micro-batch that runs through it one forward, and one backward, whole or in two."""
    m = schedule.microbatches
    codes = np.concatenate([row.codes for row in schedule.rows])
    cell = codes[:, 0].astype(np.int64) * m + codes[:, 2] % m
    counts = np.stack([np.bincount(cell[codes[:, 1] == w], minlength=schedule.stages * m) for w in range(4)])
    stage, microbatch = np.divmod(np.arange(schedule.stages * m), m)
    wanted = stage // schedule.depth == microbatch % schedule.replicas
    whole, inputs, weights = counts[BACKWARD], counts[INPUT_GRAD], counts[WEIGHT_GRAD]
    right = (counts[FORWARD] == wanted) & (whole + inputs == wanted) & (inputs == weights)
    if not right.all():
        i = int(np.flatnonzero(~right)[0])
        has = ", ".join(f"{n} {work}" for work, n in zip("FBIW", counts[:, i].tolist(), strict=True))
        needs = "one F, and one B or one I and one W" if wanted[i] else "nothing"
        raise PlanError(
            f"schedule {schedule.name}: stage {stage[i]}, micro-batch {microbatch[i]} has {has}; it needs {needs}"
        )
