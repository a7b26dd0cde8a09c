"""Cut a sequence of priced cells into the stages of a pipeline.

Enters: `Cell`s in the order of the program, a number of stages, the memory of each. Leaves: how many cells each stage
takes. Refused: with an `InfeasibleError`, no cut fits; with a `PlanError`, a pinned cut that is none.

The best cut has the least largest stage, and of those the least sum of squares, with every stage inside the memory:
exact by dynamic programming,

    best(s, j) = min over i < j of max(best(s - 1, i), seconds(i..j)), where bytes(i..j) of stage s fit.

A rank without a parameter would give its optimizer nothing to step, which torch refuses: cut anew where that helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar.errors import InfeasibleError, PlanError
from autopar.schedule.table import Schedule


class States(NamedTuple):
    """Bytes of parameters on one device of a stage, with what goes with them.

    Fields:  device: weights, gradients and optimizer states. copy: one more version of the weights, in asynchronous
             pipelines. host: of offloaded states, in host memory.
    """

    device: float = 0.0
    copy: float = 0.0
    host: float = 0.0

    def plus(self, other: States) -> States:
        return States(*(a + b for a, b in zip(self, other, strict=True)))


NONE = States()


class Shared(NamedTuple):
    """A parameter that an earlier cell reads, too: a stage that begins behind `last`, that cell, holds it once more."""

    last: int
    states: States


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cut never divides: a block, or one op. Seconds of a whole batch, bytes of one device of a stage.

    Fields:  time_s: of all that follows: forward_s, input_grad_s, weight_grad_s of its ops, update_s of its parameters.
             states: of parameters that no earlier cell reads. shared: those that one does.
             passing_bytes: of gathered parameters and their gradients while it runs.
    """

    name: Any
    ops: tuple[str, ...]
    time_s: float
    activation_bytes: float
    states: States = NONE
    shared: tuple[Shared, ...] = ()
    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    update_s: float = 0.0
    passing_bytes: float = 0.0

    @property
    def has_parameters(self) -> bool:
        return bool(self.shared) or self.states.device + self.states.host > 0

    def in_stage(self, first: int) -> States:
        """Bytes that the cell adds to a stage that begins with cell `first`."""
        held = self.states
        for again in self.shared:  # of most cells none
            if again.last < first:
                held = held.plus(again.states)
        return held


def stage_states(cells: Sequence[Cell], first: int, size: int) -> States:
    """Bytes of the parameters of a stage, each once."""
    held = NONE
    for cell in cells[first : first + size]:
        held = held.plus(cell.in_stage(first))
    return held


def balance(
    cells: Sequence[Cell],
    stages: int,
    memory_bytes: float,
    share: Sequence[float],
    copies: Sequence[int] | None = None,
    owners: bool = False,
) -> list[int]:
    """How many cells each stage takes; exact.

    Args:    share: of the activations of a whole batch that a stage holds at once. copies: of its weights that it
             keeps beside the newest ones; None: none. owners: as few stages without a parameter as can be, before time.
    Raises:  InfeasibleError: no division fits the memory.
    """
    n, copies = len(cells), copies or [0] * stages
    time_s = list(itertools.accumulate((c.time_s for c in cells), initial=0.0))
    owned = list(itertools.accumulate((c.has_parameters for c in cells), initial=0))
    best: list[dict[int, tuple[int, float, float, int]]] = [{0: (0, 0.0, 0.0, -1)}]
    for s in range(stages):
        row: dict[int, tuple[int, float, float, int]] = {}
        for i, (bare, worst, squares, _) in best[s].items():
            for j, held in enumerate(_growing(cells, i, share[s], copies[s]), i + 1):
                if held > memory_bytes or j > n - (stages - s - 1):
                    break
                mine = time_s[j] - time_s[i]
                candidate = (bare + (owners and owned[i] == owned[j]), max(worst, mine), squares + mine * mine, i)
                if j not in row or candidate < row[j]:
                    row[j] = candidate
        best.append(row)
    if n not in best[-1]:
        least = min_peak(cells, stages, share, copies)
        raise InfeasibleError(
            f"no cut of {n} blocks into {stages} stages fits: the best one takes {least / 2**30:.2f} GiB on its "
            f"fullest stage, {(least - memory_bytes) / 2**30:.2f} GiB more than there are; "
            "pin more pipeline stages, zero=3 or recompute"
        )
    cuts, j = [], n
    for s in range(stages, 0, -1):
        i = best[s][j][-1]
        cuts.append(j - i)
        j = i
    return cuts[::-1]


def balance_ranks(
    cells: Sequence[Cell], schedule: Schedule, memory_bytes: float, share: Sequence[float], copies: Sequence[int]
) -> list[int]:
    """`balance` for ranks of several stages: the best cut of all, where each rank has room for its stages; else the
    best of those whose stages take no more than their part of that room. A rank without a parameter is avoided.

    Raises:  InfeasibleError: neither fits.
    """

    def best(limit: float) -> list[int]:
        sizes = balance(cells, schedule.depth, limit, share, copies)
        if bare_stage(cells, sizes, schedule) is None:
            return sizes
        return balance(cells, schedule.depth, limit, share, copies, owners=True)

    sizes = best(memory_bytes)
    firsts = itertools.accumulate(sizes, initial=0)
    held = [
        max(_growing(cells[: first + n], first, of_batch, kept))
        for first, n, of_batch, kept in zip(firsts, sizes, share, copies, strict=False)
    ]
    ranks = [sum(held[s % schedule.depth] for s in schedule.held(rank)) for rank in range(schedule.ranks)]
    return sizes if max(ranks) <= memory_bytes else best(memory_bytes * schedule.ranks / schedule.stages)


def _growing(cells: Sequence[Cell], first: int, share: float, copies: int) -> Iterator[float]:
    """Bytes of the stage that begins with cell `first`, with one cell, with two, and so on."""
    held = passing = 0.0
    for cell in cells[first:]:
        states = cell.in_stage(first)
        held += states.device + states.copy * copies + cell.activation_bytes * share
        passing = max(passing, cell.passing_bytes)
        yield held + passing


def min_peak(cells: Sequence[Cell], stages: int, share: Sequence[float], copies: Sequence[int] | None = None) -> float:
    """Bytes of the fullest stage of the division that keeps it smallest; arguments as `balance`."""
    n, copies = len(cells), copies or [0] * stages
    best: list[dict[int, float]] = [{0: 0.0}]
    for s in range(stages):
        row: dict[int, float] = {}
        for i, peak in best[s].items():
            for j, held in enumerate(_growing(cells, i, share[s], copies[s]), i + 1):
                row[j] = min(row.get(j, math.inf), max(peak, held))
        best.append(row)
    return best[-1][n]


def bare_stage(cells: Sequence[Cell], sizes: Sequence[int], schedule: Schedule) -> int | None:
    """The first stage of a rank whose stages have no parameter, which torch's optimizers refuse."""
    ends = list(itertools.accumulate(sizes, initial=0))
    owns = [any(c.has_parameters for c in cells[a:b]) for a, b in itertools.pairwise(ends)]
    for rank in range(schedule.ranks):
        mine = [s for s in range(len(owns)) if rank in schedule.ranks_of(s)]
        if not any(owns[s] for s in mine):
            return mine[0]
    return None


def pinned_sizes(pinned: Any, cells: Sequence[Cell], stages: int) -> list[int]:
    """Sizes of pinned stages: a count for each, or the names of its blocks."""
    if not isinstance(pinned, (list, tuple)) or len(pinned) != stages:
        got = len(pinned) if isinstance(pinned, (list, tuple)) else pinned
        raise PlanError(f"pin stages: the schedule has {stages} stages, the pin {got}")
    sizes = [p if isinstance(p, int) else len(p) for p in pinned]
    if sum(sizes) != len(cells) or min(sizes) < 1:
        raise PlanError(
            f"pin stages={pinned}: takes {sum(sizes)} blocks of {len(cells)}, at least one a stage; the blocks are "
            f"{', '.join(str(c.name) for c in cells)}"
        )
    at = 0
    for p, size in zip(pinned, sizes, strict=True):
        inside = [c.name for c in cells[at : at + size]]
        if not isinstance(p, int) and list(p) != inside:
            raise PlanError(
                f"pin stages: {list(p)} are not the blocks {inside} that stand there in the program's order"
            )
        at += size
    return sizes
