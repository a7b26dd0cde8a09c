"""Chimera: two replicas of the model, whose pipelines run through the same ranks in opposite directions.

Enters: a rank, ranks p (even), micro-batches m. Leaves: the rank's row as an array.

Rank r holds stage r of replica 0 (stage r of the table) and stage p - 1 - r of replica 1 (stage 2 p - 1 - r of the
table). Even micro-batches run through replica 0, odd ones through replica 1. Each replica is 1F1B with at most p / 2
micro-batches in flight on a stage; the two fill each other's bubbles: with p micro-batches and equal works a rank is
idle for p - 2 of 2 p + (p - 2) slots, where 1F1B has 2 (p - 1) of 2 p + 2 (p - 1).

The rows are found by running the ranks slot by slot, a backward before a forward and an early micro-batch before a
late one. Source: Li & Hoefler 2021, sections 3.1 and 3.5.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autopar.errors import PlanError
from autopar.schedule.table import BACKWARD, FORWARD, Ints


def two_ways(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """Refused with a `PlanError` for an odd number of ranks: one rank would hold the same stage twice."""
    if ranks % 2:
        raise PlanError(f"schedule chimera: {ranks} ranks; the two directions need an even number")
    return np.array(_rows(ranks, microbatches)[rank], dtype=np.int32).reshape(-1, 3)


def place(stage: int, ranks: int) -> int:
    """The rank of a stage: replica 0 goes down the ranks, replica 1 up."""
    return stage if stage < ranks else 2 * ranks - 1 - stage


@lru_cache(maxsize=16)
def _rows(ranks: int, microbatches: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    depth, sizes = ranks, ((microbatches + 1) // 2, microbatches // 2)
    count = np.zeros((2, 2 * depth), dtype=int)  # by forward or backward, and stage: how many have run
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    left = 2 * depth * microbatches
    while left:
        ran = [_next(rank, depth, sizes, count) for rank in range(ranks)]  # all see what was done before this slot
        for rank, action in enumerate(ran):
            if action is not None:
                work, stage = action
                rows[rank].append((stage, (FORWARD, BACKWARD)[work], 2 * int(count[work, stage]) + stage // depth))
                count[work, stage] += 1
                left -= 1
    return tuple(map(tuple, rows))


def _next(rank: int, depth: int, sizes: tuple[int, int], count: Ints) -> tuple[int, int] | None:
    """(0 forward or 1 backward, stage) of what a rank can run now, or None."""
    able = []
    for replica, stage in enumerate((rank, 2 * depth - 1 - rank)):
        forwards, backwards = int(count[0, stage]), int(count[1, stage])
        first, last = stage % depth == 0, stage % depth == depth - 1
        if backwards < forwards and (last or count[1, stage + 1] > backwards):
            able.append((0, backwards, 1, stage))
        came = forwards < sizes[replica] and (first or count[0, stage - 1] > forwards)
        if came and forwards - backwards < min(depth // 2, depth - stage % depth):
            able.append((1, forwards, 0, stage))
    return min(able)[2:] if able else None
