"""A table as a drawing of rank x time, in text.

Enters: a `Schedule`. Leaves: a line a rank and a column a slot; a dot is a slot in which the rank waits.
"""

from __future__ import annotations

import numpy as np

from autopar.schedule.table import Schedule
from autopar.schedule.waves import Reads, waves


def grid(schedule: Schedule, reads: Reads | None = None) -> str:
    """The table with every action taking one slot.

    1F1B on two ranks with two micro-batches:

        rank 0  0F0 0F1  .  0B0  .  0B1
        rank 1   .  1F0 1B0 1F1 1B1  .

    Args:    reads: which earlier stages each stage takes values from; None: the one before.
    Raises:  PlanError: the table deadlocks.
    """
    w = waves(schedule, reads)
    slots = len(w.bounds) - 1
    cells = [["."] * slots for _ in range(schedule.ranks)]
    slot = np.repeat(np.arange(slots), np.diff(w.bounds))
    for place, (rank, at) in enumerate(zip(w.rank.tolist(), slot.tolist(), strict=True)):
        cells[rank][at] = str(w.action(place))
    wide = max((len(cell) for row in cells for cell in row), default=1)
    head = len(str(schedule.ranks - 1))
    lines = (" ".join(cell.center(wide) for cell in row).rstrip() for row in cells)
    return "\n".join(f"rank {rank:>{head}}  {line}" for rank, line in enumerate(lines))
