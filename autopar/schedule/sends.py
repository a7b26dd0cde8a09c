"""What goes between the ranks of a table, and in which order.

Enters: `Waves`. Leaves: `Sends`, as arrays for the simulator; `rounds`, what each rank posts and when, for a runtime.

A result is sent when it is made, in the slot order of `waves`. In that order every rank meets the others' sends and
receives in the same sequence: those of one slot are posted together, and what is posted in slot t waits for nothing of
a later slot. So a table that passes `check` can't deadlock even where a batch blocks until all its peers have come.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.schedule.table import FORWARD, Action, Ints, Schedule
from autopar.schedule.waves import Reads, Waves, waves


@dataclass(frozen=True, slots=True, eq=False)
class Sends:
    """The sends of a table, e of them, sorted by slot; n is the number of actions.

    Fields:  source, target: [e] places of the action that makes the value and of the one that takes it. back: [e] a
             gradient. before: [e] n + 1 + number of the send that goes over the same pair of ranks before this one, or
             n for none. inputs: [k, n] for each action what it waits for besides values of its own rank: the place of
             the action before it on its rank (row 0), and n + 1 + number of each send it takes; n for nothing.
             levels: for each slot the (first, last + 1) sends that depend on none of their own level; in turn.
    """

    source: Ints
    target: Ints
    back: Ints
    before: Ints
    inputs: Ints
    levels: tuple[tuple[tuple[int, int], ...], ...]


@lru_cache(maxsize=64)
def sends_of(w: Waves) -> Sends:
    """The sends of a table's waves."""
    n, ranks = len(w.stage), int(w.rank.max(initial=0)) + 1
    slot = np.repeat(np.arange(len(w.bounds) - 1), np.diff(w.bounds))
    source, target = w.edges.T
    link = w.rank[source] * ranks + w.rank[target]
    # Values of one action for several stages of one rank (skips) follow one another: the turn of each among its like.
    order = np.lexsort((target, link, slot[source]))
    source, target, link = source[order], target[order], link[order]
    same = (np.diff(link, prepend=-1) == 0) & (np.diff(source, prepend=-1) == 0)
    position = np.arange(len(source))
    turn = position - np.maximum.accumulate(np.where(same, 0, position))
    order = np.lexsort((link, turn, slot[source]))
    source, target, link, turn = source[order], target[order], link[order], turn[order]

    before = np.full(len(source), n)
    by_link = np.lexsort((turn, source, link))
    follows = np.flatnonzero(np.diff(link[by_link], prepend=-1) == 0)
    before[by_link[follows]] = n + 1 + by_link[follows - 1]

    by_target = np.argsort(target, kind="stable")
    taker = target[by_target]
    row = position - np.maximum.accumulate(np.where(np.diff(taker, prepend=-1) == 0, 0, position))
    inputs = np.full((2 + int(row.max(initial=0)), n), n)
    inputs[0] = w.before
    inputs[1 + row, taker] = n + 1 + by_target

    levels: list[list[tuple[int, int]]] = [[] for _ in range(len(w.bounds) - 1)]
    changes = (np.diff(slot[source]) != 0) | (np.diff(turn) != 0)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(source)]
    for (a, b), t in zip(
        itertools.pairwise(cuts), slot[source][cuts[:-1]].tolist() if len(source) else (), strict=False
    ):
        levels[t].append((a, b))
    return Sends(source, target, w.work[source] != FORWARD, before, inputs, tuple(map(tuple, levels)))


class Message(NamedTuple):
    """A value on its way: made by `source` on `source_rank`, taken by `target` on `target_rank`."""

    source: Action
    target: Action
    source_rank: int
    target_rank: int


class Round(NamedTuple):
    """What a rank posts at once.

    Fields:  after: how many of its actions a rank has run by then. sends, receives: messages; those between the same
             two ranks stand in the same order on both.
    """

    after: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def rounds(schedule: Schedule, reads: Reads | None = None) -> tuple[tuple[Round, ...], ...]:
    """For each rank its rounds in order: one for each slot in which it sends or receives anything.

    Raises:  PlanError: as `waves`.
    """
    w = waves(schedule, reads)
    sends = sends_of(w)
    slot = np.repeat(np.arange(len(w.bounds) - 1), np.diff(w.bounds))
    posted: list[dict[int, tuple[list[Message], list[Message]]]] = [{} for _ in range(schedule.ranks)]
    for source, target in zip(sends.source.tolist(), sends.target.tolist(), strict=True):
        message = Message(w.action(source), w.action(target), int(w.rank[source]), int(w.rank[target]))
        for rank, side in ((message.source_rank, 0), (message.target_rank, 1)):
            posted[rank].setdefault(int(slot[source]), ([], []))[side].append(message)
    found = []
    for rank, by_slot in enumerate(posted):
        own = slot[w.rank == rank]
        found.append(
            tuple(
                Round(int(np.searchsorted(own, t, side="right")), tuple(by_slot[t][0]), tuple(by_slot[t][1]))
                for t in sorted(by_slot)
            )
        )
    return tuple(found)
