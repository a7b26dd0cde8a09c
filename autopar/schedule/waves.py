"""What waits for what in a table, and a legal order of all actions.

Enters: a `Schedule`, and which earlier stages each stage reads. Leaves: `Waves`: the actions of all ranks sorted into
slots, each with the actions it needs, as arrays that a simulator runs through.
Refused, with a `PlanError`: tables that deadlock (the message says what each rank waits for), actions that occur twice
or without what they need.

    F of stage s   needs F of each stage that s reads
    B, I of s      need B or I of each stage that reads s, and F of s itself
    W of s         needs I of s

A slot is what each rank can do when every action takes one unit of time and sends take none: rank r runs its next
action in the first slot after all that it needs. If no rank can go on, none ever can, however long actions take: a
table that gets through the slots runs with any seconds, as long as sends do not wait for the receiver's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.errors import PlanError
from autopar.schedule.table import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, WORKS, Action, Ints, Schedule

Reads = Mapping[int, Sequence[int]]
"""Stage -> the earlier stages whose outputs it takes; stages of one replica, numbered from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Waves:
    """All actions of a table by slot, then rank; n is their number, and place n stands for "nothing to wait for".

    Fields:  stage, work, microbatch, rank: [n]. before: [n] place of the rank's previous action, or n.
             needs: [n, k] places of the actions whose results it takes, n where there are fewer than k.
             bounds: [slots + 1] slot t holds the places bounds[t] to bounds[t + 1].
             edges: [e, 2] (needed place, needing place) for results that cross ranks, sorted by needed place.
    """

    stage: Ints
    work: Ints
    microbatch: Ints
    rank: Ints
    before: Ints
    needs: Ints
    bounds: Ints
    edges: Ints

    def action(self, place: int) -> Action:
        """The action at a place."""
        return Action(int(self.stage[place]), WORKS[self.work[place]], int(self.microbatch[place]))


def waves(schedule: Schedule, reads: Reads | None = None) -> Waves:
    """The actions of a schedule in a legal order; kept, so that asking again costs nothing.

    Args:    reads: as `Reads`; None: each stage reads the one before it.
    Raises:  PlanError: a deadlock, an action that is there twice, or needs one that is nowhere in the table.
    """
    return _waves(schedule, edges_of(schedule, reads))


def edges_of(schedule: Schedule, reads: Reads | None = None) -> tuple[tuple[int, int], ...]:
    """(source stage, reading stage) of every stage boundary that values cross, in all replicas.

    Raises:  PlanError: a stage reads itself, a later stage or one that does not exist.
    """
    depth = schedule.depth
    if reads is None:
        reads = {stage: (stage - 1,) for stage in range(1, depth)}
    for stage, sources in reads.items():
        for source in sources:
            if not 0 <= source < stage < depth:
                raise PlanError(
                    f"schedule {schedule.name}: stage {stage} reads stage {source}; a stage reads earlier ones, and "
                    f"there are {depth}"
                )
    return tuple(
        (copy * depth + source, copy * depth + stage)
        for copy in range(schedule.replicas)
        for stage in sorted(reads)
        for source in sorted(set(reads[stage]))
    )


@lru_cache(maxsize=64)
def _waves(schedule: Schedule, edges: tuple[tuple[int, int], ...]) -> Waves:
    codes = np.concatenate([row.codes for row in schedule.rows])
    lengths = np.array([len(row) for row in schedule.rows])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    needs = _needs(schedule, codes, edges)
    slot = _slots(schedule, codes, lengths, starts, needs)

    n = len(codes)
    rank = np.repeat(np.arange(schedule.ranks), lengths)
    order = np.lexsort((rank, slot))
    place = np.empty(n + 1, dtype=np.int64)  # from place in the rows to place by slot
    place[order], place[n] = np.arange(n), n
    before = np.where(np.arange(n) == starts[rank], n, np.arange(n) - 1)
    stage, work, microbatch = codes[order].T.astype(np.int64)
    rank, needs = rank[order], place[needs[order]]
    target, column = np.nonzero(needs < n)
    crossing = rank[needs[target, column]] != rank[target]
    pairs = np.stack([needs[target, column], target], axis=1)[crossing]
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    bounds = np.searchsorted(slot[order], np.arange((int(slot.max()) if n else -1) + 2))
    return Waves(stage, work, microbatch, rank, place[before[order]], needs, bounds, pairs)


def _needs(schedule: Schedule, codes: Ints, edges: Sequence[tuple[int, int]]) -> Ints:
    """[n, k] for each action, in the order of the rows, the places of what it needs; n for nothing."""
    n = len(codes)
    stage, work, microbatch = codes.T.astype(np.int64)
    low = int(microbatch.min()) if n else 0
    width = schedule.microbatches - low
    cell = stage * width + (microbatch - low)

    kinds = {
        "F": work == FORWARD,
        "B or I": (work == BACKWARD) | (work == INPUT_GRAD),
        "W": work == WEIGHT_GRAD,
    }
    found, filled = {}, np.zeros(n, dtype=np.int64)
    for what, chosen in kinds.items():
        at = np.flatnonzero(chosen)
        found[what] = np.full(schedule.stages * width, n)
        found[what][cell[at]] = at
        twice = at[found[what][cell[at]] != at]
        if len(twice):
            raise PlanError(
                f"schedule {schedule.name}: {what} of stage {stage[twice[0]]}, micro-batch {microbatch[twice[0]]} "
                f"is there twice"
            )

    forwards, backwards, weights = (np.flatnonzero(chosen) for chosen in kinds.values())
    sources, readers = _table(edges, 1, schedule.stages), _table(edges, 0, schedule.stages)
    needs = np.full((n, 1 + max(sources.shape[1], readers.shape[1])), n)
    for at, what, others in (
        *((forwards, "F", column) for column in sources.T),
        *((backwards, "B or I", column) for column in readers.T),
        (backwards, "F", np.arange(schedule.stages)),
        (weights, "B or I", np.arange(schedule.stages)),
    ):
        other = others[stage[at]]
        has = other >= 0
        at, other = at[has], other[has]
        places = found[what][other * width + microbatch[at] - low]
        if n in places:
            _refuse_missing(schedule, codes[at[places == n]], what)
        needs[at, filled[at]] = places
        filled[at] += 1
    return needs


def _table(edges: Sequence[tuple[int, int]], by: int, stages: int) -> Ints:
    """[stages, most] the other ends of the edges of each stage, which stands at place `by` of them; -1 for none."""
    others: list[list[int]] = [[] for _ in range(stages)]
    for edge in edges:
        others[edge[by]].append(edge[1 - by])
    most = max(map(len, others))
    return np.array([row + [-1] * (most - len(row)) for row in others], dtype=np.int64).reshape(stages, most)


def _refuse_missing(schedule: Schedule, codes: Ints, what: str) -> None:
    """Some actions need what is not in the table; in an asynchronous one the call before may have run it."""
    if schedule.asynchronous:
        codes = codes[codes[:, 2] >= 0]
    for stage, work, microbatch in codes[:1].tolist():
        raise PlanError(
            f"schedule {schedule.name}: {stage}{WORKS[work]}{microbatch} needs {what} of micro-batch {microbatch}, "
            f"which is missing on a stage that it takes values from"
        )


def _slots(schedule: Schedule, codes: Ints, lengths: Ints, starts: Ints, needs: Ints) -> Ints:
    """The slot of each action, in the order of the rows. Raises: PlanError: a deadlock."""
    n = len(codes)
    slot, done = np.zeros(n, dtype=np.int64), np.zeros(n + 1, dtype=bool)
    done[n] = True
    needs = np.concatenate([needs, np.full((1, needs.shape[1]), n)])  # a rank that is through stands at place n
    at, end = starts[:-1].copy(), starts[1:]
    active = np.flatnonzero(lengths)
    time = 0
    while len(active):
        ready = active[done[needs[at[active]]].all(axis=1)]
        if not len(ready):
            raise PlanError(_deadlock(schedule, codes, at, active, needs, done))
        ran = at[ready]
        slot[ran], done[ran] = time, True
        at[ready] += 1
        if (at[ready] == end[ready]).any():
            active = active[at[active] < end[active]]
        time += 1
    return slot


def _deadlock(schedule: Schedule, codes: Ints, at: Ints, active: Ints, needs: Ints, done: Ints) -> str:
    def text(place: int) -> str:
        stage, work, microbatch = codes[place].tolist()
        return f"{stage}{WORKS[work]}{microbatch}"

    waiting = []
    for rank in active[:4]:
        missing = [text(p) for p in needs[at[rank]] if not done[p]]
        waiting.append(f"rank {rank} waits at {text(at[rank])} for {', '.join(missing)}")
    more = f" (and {len(active) - 4} ranks more)" if len(active) > 4 else ""
    return f"schedule {schedule.name}: deadlock: {'; '.join(waiting)}{more}"
