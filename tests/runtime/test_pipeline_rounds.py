"""Rounds of messages: every schedule, with skips, gets through even where each batch of messages blocks both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.runtime.pipeline_rounds import Event, events
from autopar.schedule.build import build
from autopar.schedule.table import Action, Schedule, parse

SCHEDULES = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-2p",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zb",
    "zb-v",
    "dualpipe-v",
    "async-1f1b",
    "2bw",
    "chimera",
)


def walk(schedule: Schedule, edges: list[tuple[int, int, bool]]) -> None:
    """Run all ranks, each waiting in every batch until all its partners stand at theirs, or are past it."""

    def of(k: int) -> list[tuple[int, int, bool]]:
        first = schedule.path(k)[0]
        return [(first + a, first + b, grad) for a, b, grad in edges]

    rows: list[tuple[Event, ...]] = [events(schedule, of, rank) for rank in range(schedule.ranks)]
    place = schedule.placement
    batch = [{m: i for i, event in enumerate(row) for m in event.messages} for row in rows]
    at = [0] * schedule.ranks

    def through(rank: int) -> bool:
        pairs = [(m, {place[m.source], place[m.target]}) for m in rows[rank][at[rank]].messages]
        return all(at[p] >= batch[p][m] for m, both in pairs for p in both)

    while any(at[r] < len(rows[r]) for r in range(schedule.ranks)):
        ready = [r for r in range(schedule.ranks) if at[r] < len(rows[r]) and through(r)]
        assert ready, f"stuck at {[str(row[i]) for i, row in zip(at, rows, strict=True) if i < len(row)]}"
        for rank in ready:
            at[rank] += 1
    for rank, row in enumerate(rows):
        action = {event.action: i for i, event in enumerate(row) if event.action is not None}
        assert list(action) == list(schedule.rows[rank])
        for message, i in batch[rank].items():
            k, works = message.microbatch, ("F",) if message.kind == "F" else ("B", "I")
            if place[message.source] == rank:
                assert any(action.get(Action(message.source, w, k), i) < i for w in works), f"{message} is not made yet"
            if place[message.target] == rank:
                assert all(action.get(Action(message.target, w, k), i + 1) > i for w in works), f"{message} comes late"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_schedule_gets_through_with_skips(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULES))
    ranks = data.draw(st.integers(1, 4)) if name != "chimera" else data.draw(st.sampled_from((2, 4)))
    virtual = 2 if name in ("zb-v", "dualpipe-v") else data.draw(st.integers(1, 3)) if "-" in name[4:] else 1
    if name.startswith(("zb-h", "async")) or name == "zb-2p":
        virtual = 1
    schedule = build(name, ranks, virtual, data.draw(st.integers(max(1, ranks - 1) if name == "2bw" else 1, 8)))
    neighbours = {(s, s + 1): True for s in range(schedule.depth - 1)}
    pairs = [(a, b) for b in range(schedule.depth) for a in range(b - 1)]
    skips = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    grads = {pair: data.draw(st.booleans()) for pair in skips}
    walk(schedule, [(a, b, g) for (a, b), g in sorted((neighbours | grads).items())])


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("async-1f1b", 4, 1), ("async-1f1b", 3, 2), ("2bw", 3, 2)])
def test_gradients_of_asynchronous_calls_travel_once(name: str, ranks: int, microbatches: int) -> None:
    """In a call every boundary is crossed once by each micro-batch, both ways, whichever call it belongs to."""
    schedule = build(name, ranks, 1, microbatches)
    edges = [(s, s + 1, True) for s in range(ranks - 1)]
    for rank in range(ranks):
        sent = [m for event in events(schedule, lambda k: edges, rank) for m in event.messages]
        crossings = [(m.kind, m.source, m.target, m.microbatch % microbatches) for m in sent]
        wanted = [(k, *(pair if k == "F" else pair[::-1])) for k in "FB" for *pair, _ in edges if rank in pair]
        assert sorted(crossings) == sorted((*w, j) for w in wanted for j in range(microbatches))


def test_a_table_that_deadlocks_is_refused() -> None:
    wrong = parse("0F0 0B0\n1F0 1B0")
    assert events(wrong, lambda k: [(0, 1, True)], 0)
    crossed = parse("0B0 0F0\n1F0 1B0")
    with pytest.raises(PlanError, match="rank 0 at 0B0 for"):
        events(crossed, lambda k: [(0, 1, True)], 0)
