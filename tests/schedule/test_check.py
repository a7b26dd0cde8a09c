"""Every named table is complete and free of deadlock, and holds what its paper says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.schedule import Action, Schedule, build, check, parse
from autopar.schedule.build import KINDS
from autopar.schedule.check import in_flight


def possible(name: str, ranks: int, microbatches: int) -> bool:
    return not ((name == "chimera" and ranks % 2) or (name == "2bw" and microbatches < ranks - 1))


@st.composite
def tables(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(KINDS)))
    ranks, microbatches = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    if not possible(name, ranks, microbatches):
        ranks, microbatches = 2 * ranks, microbatches + 2 * ranks
    return build(name, ranks, KINDS[name].virtual or draw(st.integers(1, 4)), microbatches)


def stall(schedule: Schedule, reads: dict[int, list[int]]) -> tuple[int, str] | None:
    """Run the rows with plain sets: (rank, action) that never runs, or None."""
    depth = schedule.depth
    done: set[tuple[int, str, int]] = set()
    at = [0] * schedule.ranks
    rows = [list(row) for row in schedule.rows]

    def ready(a: Action) -> bool:
        base = a.stage - a.stage % depth
        if a.microbatch < 0:  # begun by the call before, which the asynchronous tables are shaped for
            return all(
                (r, "B", a.microbatch) in done or Action(r, "B", a.microbatch) not in rows[schedule.placement[r]]
                for r in range(schedule.stages)
                if a.stage - base in reads.get(r - base, [])
            )
        if a.work == "F":
            return all((base + s, "F", a.microbatch) in done for s in reads.get(a.stage - base, []))
        if a.work == "W":
            return (a.stage, "G", a.microbatch) in done
        readers = [r for r in range(depth) if a.stage - base in reads.get(r, [])]
        return (a.stage, "F", a.microbatch) in done and all((base + r, "G", a.microbatch) in done for r in readers)

    while any(at[r] < len(rows[r]) for r in range(schedule.ranks)):
        moved = False
        for rank in random.Random(0).sample(range(schedule.ranks), schedule.ranks):
            while at[rank] < len(rows[rank]) and ready(rows[rank][at[rank]]):
                a = rows[rank][at[rank]]
                done |= {(a.stage, "G" if a.work in "BI" else a.work, a.microbatch), (a.stage, a.work, a.microbatch)}
                at[rank] += 1
                moved = True
        if not moved:
            rank = next(r for r in range(schedule.ranks) if at[r] < len(rows[r]))
            return rank, str(rows[rank][at[rank]])
    return None


@settings(max_examples=150, deadline=None)
@given(tables(), st.data())
def test_every_table_runs_with_every_pattern_of_skips(schedule: Schedule, data: st.DataObject) -> None:
    reads = {
        stage: sorted({stage - 1, *data.draw(st.lists(st.integers(0, stage - 1), max_size=3))})
        for stage in range(1, schedule.depth)
    }
    facts = check(schedule, reads)
    assert stall(schedule, reads) is None
    for changed in (schedule.forward_only(), schedule.forwards_first()):
        if not schedule.asynchronous:
            assert stall(changed, reads) is None
    n = schedule.microbatches * len(schedule.held(0))
    assert max(facts.in_flight) <= n + (schedule.depth if schedule.asynchronous else 0)
    # What is received and not yet used is at most what the reading stages of a rank could ever take in.
    inputs = [sum(len(reads.get(s % schedule.depth, [])) for s in schedule.held(r)) for r in range(schedule.ranks)]
    readers = [
        sum(s % schedule.depth in rs for rs in reads.values() for s in schedule.held(r)) for r in range(schedule.ranks)
    ]
    most = schedule.microbatches + schedule.depth * schedule.asynchronous
    assert all(b <= (i + o) * most for b, i, o in zip(facts.received, inputs, readers, strict=True))


def peaks(name: str, ranks: int, virtual: int, microbatches: int) -> list[int]:
    return list(check(build(name, ranks, virtual, microbatches)).in_flight)


def test_peaks_in_flight_are_those_of_the_papers() -> None:
    p, m = 4, 16
    assert peaks("gpipe", p, 1, m) == [m] * p
    assert peaks("1f1b", p, 1, m) == [4, 3, 2, 1]
    assert peaks("zb-h1", p, 1, m) == [p] * p
    assert peaks("zb-2p", p, 1, m) == [2 * p - 1] * p
    assert peaks("looped-bfs", p, 2, m) == [2 * m] * p
    assert peaks("interleaved-1f1b", p, 2, m) == [(2 - 1) * p + 2 * (p - 1 - r) + 1 for r in range(p)]
    assert peaks("zb-v", p, 2, m) == [2 * p] * p  # half stages: the activations of p whole ones
    assert peaks("dualpipe-v", p, 2, m) == [2 * p + 1] * p
    assert peaks("async-1f1b", p, 1, m) == peaks("2bw", p, 1, m) == peaks("1f1b", p, 1, m)
    for few in (1, 2, 3, 7):
        assert peaks("async-1f1b", p, 1, few) == [4, 3, 2, 1]  # begun by several calls
    assert all(p // 2 < n <= p for n in peaks("chimera", p, 1, p))


def test_fewer_microbatches_than_ranks_hold_no_more_than_there_are() -> None:
    for name, kind in KINDS.items():
        if not kind.asynchronous:
            assert max(peaks(name, 8, kind.virtual or 2, 3)) <= 3 * (kind.virtual or 2) * kind.replicas


def test_chimera_fills_its_bubbles_as_the_paper_says() -> None:
    for p in (2, 4, 6, 8):
        assert check(build("chimera", p, 1, p)).slots == 2 * p + (p - 2)
        assert check(build("1f1b", p, 1, p)).slots == 2 * p + 2 * (p - 1)


def test_in_flight_after_each_action() -> None:
    assert in_flight(build("1f1b", 2, 1, 3).rows[0]) == (1, 2, 1, 2, 1, 0)
    assert in_flight(build("zb-h1", 2, 1, 2).rows[1]) == (1, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 \n 1F0", "stage 1, micro-batch 0 has 1 F, 0 B, 0 I, 0 W; it needs one F, and one B or one I and"),
        ("0F0 0I0 \n 1F0 1B0", "stage 0, micro-batch 0 has 1 F, 0 B, 1 I, 0 W"),
        ("0F0 0F0 0B0 \n 1F0 1B0", "stage 0, micro-batch 0 has 2 F"),
        ("0B0 0F0 \n 1F0 1B0", r"deadlock: rank 0 waits at 0B0 for 1B0, 0F0; rank 1 waits at 1F0 for 0F0"),
        ("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1", "rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1"),
        ("0F0 0W0 0I0", "deadlock: rank 0 waits at 0W0 for 0I0"),
    ],
)
def test_faulty_tables_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(parse(text))


def test_limit_and_reads_are_refused_with_numbers() -> None:
    with pytest.raises(PlanError, match="rank 1 holds 4 micro-batches, allowed 3"):
        check(build("gpipe", 2, 1, 4), limit=(4, 3))
    with pytest.raises(PlanError, match="stage 1 reads stage 2"):
        check(build("gpipe", 4, 1, 4), {1: [2]})


def test_a_skip_can_deadlock_what_neighbours_alone_do_not() -> None:
    # Stage 2 shares rank 0 with stage 0; its backward must come before stage 0's once it reads stage 0 itself.
    table = parse("0F0 2F0 0B0 2B0 \n 1F0 1B0")
    with pytest.raises(PlanError, match="rank 0 waits at 0B0 for 2B0"):
        check(table, {1: [0], 2: [0]})
