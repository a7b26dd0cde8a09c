"""Asynchronous pipelines: no flush between calls, so gradients are of weights that have since been updated.

Enters: a rank, ranks p, micro-batches m of a call. Leaves: the rank's row in a call in the middle of a run; how many
updates old each gradient is.

In a call, rank r runs forward j and then the backward of the micro-batch that came p - 1 - r forwards earlier, maybe
in a call before this one (numbered -1, -2, ...): every rank is always busy, and no more is in flight than in 1F1B.
The forward's weights are kept until its backward, so each gradient is a true one, of a stale version.

    async-1f1b  a gradient is handed over by the call that runs its backward. Staleness of stage s, micro-batch j:
                (j + p - 1 - s) // m updates; with one micro-batch a call p - 1 - s, as in PipeDream.
    2bw         the gradients of one call's micro-batches stay together and are handed over one call later, so that
                all stages are one update behind and two versions are enough. Needs m >= p - 1.

Source: Narayanan et al. 2019 (PipeDream, weight stashing), Narayanan et al. 2021 (PipeDream-2BW).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.errors import PlanError
from autopar.schedule.table import BACKWARD, FORWARD, Ints, Row, Schedule


def no_flush(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """One forward, one backward, all through the call."""
    codes = np.empty((2 * microbatches, 3), dtype=np.int32)
    codes[:, 0] = rank
    codes[::2, 1], codes[1::2, 1] = FORWARD, BACKWARD
    codes[::2, 2] = np.arange(microbatches)
    codes[1::2, 2] = np.arange(microbatches) - (ranks - 1 - rank)
    return codes


def two_buffers(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """The same order; refused where two weight versions are not enough."""
    if microbatches < ranks - 1:
        raise PlanError(
            f"schedule 2bw: {microbatches} micro-batches for {ranks} ranks; two versions of the weights are enough "
            f"from {ranks - 1} micro-batches a call on"
        )
    return no_flush(rank, ranks, virtual, microbatches)


def staleness(schedule: Schedule, stage: int, microbatch: int) -> int:
    """Updates between the weights that a micro-batch ran with and those that its gradient is applied to.

    0 for synchronous schedules. Raises: PlanError: no such stage or micro-batch.
    """
    if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
        raise PlanError(
            f"schedule {schedule.name}: no stage {stage} with micro-batch {microbatch}; it has {schedule.stages} "
            f"stages and {schedule.microbatches} micro-batches"
        )
    if not schedule.asynchronous:
        return 0
    if schedule.name == "2bw":
        return 1
    return (microbatch + schedule.depth - 1 - stage) // schedule.microbatches


def weight_version(schedule: Schedule, stage: int, microbatch: int, update: int) -> int:
    """The version (updates so far) of the weights that a gradient of update number `update` (from 0) was made with.

    0 where the run had not begun: the first calls have no older version.
    """
    return max(0, update - staleness(schedule, stage, microbatch))


def versions_kept(schedule: Schedule, stage: int) -> int:
    """Versions of its weights that a stage holds at once, the newest included."""
    return 1 + max(staleness(schedule, stage, j) for j in range(schedule.microbatches))


def in_sequence(schedule: Schedule, calls: int) -> Schedule:
    """Several calls in a row as one table; micro-batch j of call c becomes c * m + j.

    What a table says of one call holds of the time between calls only once the pipeline is full: simulate a few.
    """
    m = schedule.microbatches
    rows = []
    for row in schedule.rows:
        shift = np.zeros((calls, 1, 3), dtype=np.int32)
        shift[:, 0, 2] = m * np.arange(calls)
        rows.append(Row((row.codes[None] + shift).reshape(-1, 3)))
    return replace(schedule, microbatches=calls * m, rows=tuple(rows))
