"""Schedules whose stages run down the ranks and back up: rank r holds stages r and 2 p - 1 - r.

Enters: a rank, ranks p, micro-batches m. Leaves: that rank's row as an array.

A row is a list of phases, each a pattern and how often it comes. In a pattern a letter and a digit stand for a work
on the rank's first (0) or second (1) stage; W alone is the oldest weight gradient still owed, of either stage. The
micro-batch of an entry is how many entries of its kind came before. Fewer micro-batches than a schedule needs to
reach its steady phase: the row is made for enough of them, and the surplus taken out.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", and 2023 section 6 (zb-v);
DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1, cut in half as in the published DualPipeV (dualpipe-v). Where
dualpipe-v overlaps a forward with a backward of another micro-batch, the forward stands first here.
"""

from __future__ import annotations

import numpy as np

from autopar.schedule.loops import first
from autopar.schedule.table import WORKS, Ints

Phases = list[tuple[str, int]]


def zb_v(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """No bubble for equal works, with the activations of 1F1B."""
    p, r, m = ranks, rank, max(2 * ranks - 1, microbatches)
    return _row(
        [
            ("F0", 2 * (p - r) - 1),
            ("F1 F0", r),
            ("F1 I1 W1", p - r),
            ("F0 I0 W0 F1 I1 W1", m - 2 * p + r + 1),
            ("I0 W0 F1 I1 W1", p - r - 1),
            ("I0 I1", r),
            ("I0 W0", p - r),
            ("W1", r),
            ("W0", r),
        ],
        rank,
        ranks,
        microbatches,
    )


def dualpipe_v(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """A forward of one stage beside a backward of the other all through the steady phase."""
    p, r, m = ranks, rank, max(2 * ranks, microbatches)
    return _row(
        [
            ("F0", 2 * (p - r - 1)),
            ("F0 F1", r + 1),
            ("I1 W F1", p - r - 1),
            ("F0 B1 F1 B0", m - 2 * p + r + 1),
            ("B1 F1 B0", p - r - 1),
            ("B1 B0", (r + 1) // 2),
            *([("B1 I0", 1), ("I1 I0", r // 2)] if r % 2 == 0 else [("I1 I0", (r + 1) // 2)]),
            ("W I0", p - r - 1),
            ("W", r + 1),
        ],
        rank,
        ranks,
        microbatches,
    )


def _row(phases: Phases, rank: int, ranks: int, microbatches: int) -> Ints:
    parts = [np.tile([(WORKS.index(word[0]), int(word[1:] or -1)) for word in p.split()], (n, 1)) for p, n in phases]
    works, local = np.concatenate(parts).T
    local, each = local.copy(), np.zeros(len(works), dtype=np.int64)
    for stage in (0, 1):
        for kinds in ("F", "BI", "W"):  # a backward is counted alike whether it is whole or not
            at = np.flatnonzero((local == stage) & np.isin(works, [WORKS.index(k) for k in kinds]))
            each[at] = np.arange(len(at))
    owed, paid = np.flatnonzero(works == WORKS.index("I")), np.flatnonzero((works == WORKS.index("W")) & (local < 0))
    if len(paid):
        local[paid], each[paid] = local[owed], each[owed]
    stages = np.where(local == 0, rank, 2 * ranks - 1 - rank)
    return first(np.stack([stages, works, each], axis=1).astype(np.int32), microbatches)
