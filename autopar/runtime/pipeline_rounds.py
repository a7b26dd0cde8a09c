"""When messages travel: an order of sends and receives in which no rank can wait for ever.

Enters: a schedule and which stage sends to which. Leaves: for each rank its events in order: actions, and rounds of
messages. Refused, with a `PlanError`: a table in which ranks wait for each other.

Every action gets a round, as if each took one unit of time. What an action makes is sent in its round, and received in
the same round: the sends and receives of a round are one batch, and all ranks go through the rounds in one order. So
the batch that a rank waits in is one that its partners reach without waiting for it.

In an asynchronous table a gradient may be taken in a later call than the one that makes it: both ranks post it in the
call that makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.schedule.table import Action, Schedule


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """All that one stage sends to another for one micro-batch: values (kind "F") or their gradients ("B")."""

    microbatch: int
    kind: str
    source: int
    target: int

    def __str__(self) -> str:
        what = "activations" if self.kind == "F" else "gradients"
        return f"{what} of micro-batch {self.microbatch} from stage {self.source} for stage {self.target}"


Edges = Callable[[int], Iterable[tuple[int, int, bool]]]
"""Micro-batch -> (sending stage, reading stage, do gradients come back?)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a rank: an action, or a batch of messages of which it sends or receives some."""

    action: Action | None
    messages: tuple[Message, ...] = ()


def events(schedule: Schedule, edges: Edges, rank: int) -> tuple[Event, ...]:
    """What one rank does, in order. Raises: PlanError: deadlock."""
    needs, gives = _messages(schedule, edges)
    rounds = _rounds(schedule, needs)
    by_round: dict[int, list[Message]] = defaultdict(list)
    for action, made in gives.items():
        by_round[rounds[action]] += made
    place = schedule.placement
    own = {rounds[a]: a for a in schedule.rows[rank]}
    out: list[Event] = []
    for at in sorted({*own, *by_round}):
        if at in own:
            out.append(Event(own[at]))
        mine = [m for m in sorted(by_round.get(at, [])) if rank in (place[m.source], place[m.target])]
        if mine:
            out.append(Event(None, tuple(mine)))
    return tuple(out)


def _messages(
    schedule: Schedule, edges: Edges
) -> tuple[Mapping[Action, Sequence[Action]], Mapping[Action, list[Message]]]:
    """For each action those it waits for, and the messages it makes."""
    present = {a for row in schedule.rows for a in row}
    needs: dict[Action, list[Action]] = defaultdict(list)
    gives: dict[Action, list[Message]] = defaultdict(list)
    for k in sorted({a.microbatch for a in present}):
        for source, target, grad in edges(k):
            forward, reader = Action(source, "F", k), Action(target, "F", k)
            if forward in present and reader in present:
                needs[reader].append(forward)
                gives[forward].append(Message(k, "F", source, target))
            for back in (Action(target, made, k) for made in "BI"):
                if not grad or back not in present:
                    continue
                waiting = [a for a in (Action(source, work, k) for work in "BI") if a in present]
                for action in waiting:
                    needs[action].append(back)
                if waiting or schedule.asynchronous:  # else it is taken in a later call
                    gives[back].append(Message(k, "B", target, source))
    return needs, gives


def _rounds(schedule: Schedule, needs: Mapping[Action, Sequence[Action]]) -> dict[Action, int]:
    rows = [list(row) for row in schedule.rows]
    at: list[int] = [0] * len(rows)
    done: dict[Action, int] = {}
    clock = [0] * len(rows)
    left = sum(map(len, rows))
    while left:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(a in done for a in needs.get(row[at[rank]], ())):
                action = row[at[rank]]
                clock[rank] = done[action] = max([clock[rank], *(done[a] for a in needs.get(action, ()))]) + 1
                at[rank] += 1
                left -= 1
                moved = True
        if not moved:
            waiting = ", ".join(
                f"rank {r} at {row[at[r]]} for {next(str(a) for a in needs[row[at[r]]] if a not in done)}"
                for r, row in enumerate(rows)
                if at[r] < len(row)
            )
            raise PlanError(f"schedule {schedule.name}: ranks wait for each other: {waiting}")
    return done
