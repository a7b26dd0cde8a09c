"""Sends between ranks: every value that crosses is sent once, and batches that block cannot deadlock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule import Action, Schedule, build
from autopar.schedule.build import KINDS
from autopar.schedule.sends import Message, rounds

SYNCHRONOUS = sorted(name for name, kind in KINDS.items() if not kind.asynchronous)


def stuck(schedule: Schedule, reads: dict[int, list[int]]) -> list[str]:
    """Run the rounds the strictest way: a message moves only while both its ranks stand at the round that has it.

    No rank goes past a round, nor runs another action, before all messages of the round have moved.

    Returns: what each rank still waits for; nothing when all get through.
    """
    posted = rounds(schedule, reads)
    at, moved, ran = [0] * schedule.ranks, set[Message](), set[Action]()
    for row, mine in zip(schedule.rows, posted, strict=True):
        assert [r.after for r in mine] == sorted(r.after for r in mine)
        ran |= set(row[: mine[0].after] if mine else row)
    going = True
    while going:
        going = False
        now = [set() if at[r] == len(p) else {*p[at[r]].sends, *p[at[r]].receives} for r, p in enumerate(posted)]
        for message in set().union(*now) - moved:
            if message in now[message.source_rank] & now[message.target_rank]:
                assert message.source in ran, f"{message} is sent before it is made"
                assert message.target not in ran, f"{message} comes after it is used"
                moved.add(message)
                going = True
        for rank, mine in enumerate(posted):
            if at[rank] < len(mine) and now[rank] <= moved:
                begin = mine[at[rank]].after
                at[rank] += 1
                end = mine[at[rank]].after if at[rank] < len(mine) else len(schedule.rows[rank])
                ran |= set(schedule.rows[rank][begin:end])
                going = True
    return [f"rank {r}: {p[at[r]]}" for r, p in enumerate(posted) if at[r] < len(p)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_blocking_batches_get_through(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SYNCHRONOUS))
    ranks = data.draw(st.integers(1, 4)) * (2 if name == "chimera" else 1)
    schedule = build(name, ranks, KINDS[name].virtual or data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8)))
    reads = {
        stage: sorted({stage - 1, *data.draw(st.lists(st.integers(0, stage - 1), max_size=2))})
        for stage in range(1, schedule.depth)
    }
    assert stuck(schedule, reads) == []

    posted = rounds(schedule, reads)
    sent = [m for mine in posted for r in mine for m in r.sends]
    got = [m for mine in posted for r in mine for m in r.receives]
    crossing = [
        (a + c * schedule.depth, b + c * schedule.depth)
        for c in range(schedule.replicas)
        for b in reads
        for a in reads[b]
        if schedule.placement[a + c * schedule.depth] != schedule.placement[b + c * schedule.depth]
    ]
    through = [(pair, j) for pair in crossing for j in range(schedule.microbatches) if pair[0] in schedule.path(j)]
    assert sorted(sent) == sorted(got)
    assert len(set(sent)) == len(sent) == 2 * len(through)  # each value goes once, and its gradient comes back once
    for (a, b), j in through:
        assert any(m.source == (a, "F", j) and m.target == (b, "F", j) for m in sent)
        assert any((m.source.stage, m.target.stage, m.source.microbatch) == (b, a, j) for m in sent)


def test_messages_of_two_ranks_stand_in_one_order_on_both() -> None:
    posted = rounds(build("zb-v", 3, 2, 6), {1: [0], 2: [0, 1], 3: [2, 0], 4: [3, 1], 5: [4, 0]})
    for a in range(3):
        for b in range(3):
            out = [m for r in posted[a] for m in r.sends if m.target_rank == b]
            assert out == [m for r in posted[b] for m in r.receives if m.source_rank == a]


def test_rounds_by_hand() -> None:
    first, second = rounds(build("1f1b", 2, 1, 2))
    go = [Message(Action(0, "F", j), Action(1, "F", j), 0, 1) for j in range(2)]
    back = [Message(Action(1, "B", j), Action(0, "B", j), 1, 0) for j in range(2)]
    assert [(r.after, r.sends, r.receives) for r in first] == [
        (1, (go[0],), ()),
        (2, (go[1],), ()),
        (2, (), (back[0],)),
        (3, (), (back[1],)),
    ]
    assert [(r.after, r.sends, r.receives) for r in second] == [
        (0, (), (go[0],)),
        (1, (), (go[1],)),
        (2, (back[0],), ()),
        (4, (back[1],), ()),
    ]
