"""The simulator against a plain one, closed forms, and published bubble rates."""

from __future__ import annotations

import csv
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.simulate import StageTimes, simulate
from autopar.cost.timeline import Timeline
from autopar.errors import PlanError
from autopar.schedule import Action, Schedule, build
from autopar.schedule.build import KINDS

EQUAL = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
SYNCHRONOUS = sorted(name for name, kind in KINDS.items() if not kind.asynchronous)


def plain(schedule: Schedule, times: StageTimes) -> dict[tuple[int, Action], tuple[float, float]]:
    """(rank, action) -> start and end, one action at a time, with dictionaries. Replicas, skips, sends, gathers."""
    depth = schedule.depth
    reads = {s: {s - 1} if s else set() for s in range(depth)}
    for source, reader in times.skips:
        reads[reader].add(source)
    works = {
        "F": np.asarray(times.forward_s),
        "I": np.asarray(times.input_grad_s),
        "W": np.asarray(times.weight_grad_s),
    }

    def seconds(a: Action) -> float:
        figures = works["I"] + works["W"] if a.work == "B" else works[a.work]
        return float(figures[a.stage % depth][a.microbatch] if figures.ndim == 2 else figures[a.stage % depth])

    def send(source: int, reader: int, back: bool) -> float:
        if (source, reader) in times.skips:
            return times.skips[source, reader]
        figures = times.send_s if times.send_back_s is None or not back else times.send_back_s
        return float(np.asarray(figures)[source])

    def takers(a: Action) -> list[Action]:
        """What takes the action's result on other ranks."""
        base, s = a.stage - a.stage % depth, a.stage % depth
        if a.work == "F":
            found = [Action(base + r, "F", a.microbatch) for r in range(depth) if s in reads[r]]
        else:
            found = [Action(base + q, "B", a.microbatch) for q in reads[s]] if a.work in "BI" else []
        return [t for t in found if schedule.placement[t.stage] != schedule.placement[a.stage]]

    place = {
        (a.stage, "B" if a.work == "I" else a.work, a.microbatch): i for r in schedule.rows for i, a in enumerate(r)
    }
    done: dict[tuple[int, Action], tuple[float, float]] = {}
    arrived: dict[tuple[int, str, int, int], float] = {}
    link_free: dict[tuple[int, int], float] = {}
    waiting = [list(enumerate(row)) for row in schedule.rows]
    free, begun = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    gathered: dict[int, float] = {}
    if times.gather == "once":
        at = [0.0] * schedule.ranks
        order = {a.stage: i for row in schedule.rows for i, a in reversed(list(enumerate(row)))}
        for stage in sorted(order, key=order.__getitem__):
            rank = schedule.placement[stage]
            at[rank] += float(np.asarray(times.gather_s)[stage % depth])
            gathered[stage] = at[rank]
    while any(waiting):
        for rank in range(schedule.ranks):
            while waiting[rank]:
                _, a = waiting[rank][0]
                base, s = a.stage - a.stage % depth, a.stage % depth
                sources = [base + q for q in reads[s]] if a.work == "F" else []
                if a.work in "BI":
                    sources = [base + r for r in range(depth) if s in reads[r]]
                sources = [q for q in sources if schedule.placement[q] != rank]
                work = "F" if a.work == "F" else "B"
                if any((q, work, a.microbatch, a.stage) not in arrived for q in sources):
                    break
                start = max([free[rank], *(arrived[q, work, a.microbatch, a.stage] for q in sources)])
                fetch = float(np.asarray(times.gather_s)[s])
                start = max(start, begun[rank] + fetch if times.gather == "each" else gathered[a.stage])
                end = start + seconds(a)
                out = sorted(takers(a), key=lambda t: place[t.stage, t.work, t.microbatch])
                legs = [send(min(s, t.stage % depth), max(s, t.stage % depth), a.work != "F") for t in out]
                if not times.overlap_sends:
                    end, legs = end + sum(legs), [0.0] * len(legs)
                done[rank, a] = (start, end)
                free[rank], begun[rank] = end, start
                waiting[rank].pop(0)
                for taker, leg in zip(out, legs, strict=True):
                    link = rank, schedule.placement[taker.stage]
                    link_free[link] = max(link_free.get(link, 0.0), end) + leg
                    arrived[a.stage, work, a.microbatch, taker.stage] = link_free[link]
    return done


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StageTimes]:
    name = draw(st.sampled_from(SYNCHRONOUS))
    ranks = draw(st.integers(1, 5)) * (2 if name == "chimera" else 1)
    virtual = KINDS[name].virtual or draw(st.integers(1, 3))
    schedule = build(name, ranks, virtual, draw(st.integers(1, 9)))
    depth, rng = schedule.depth, np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (depth, schedule.microbatches) if draw(st.booleans()) else (depth,)
    pairs = [(a, b) for b in range(depth) for a in range(b - 1)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    times = StageTimes(
        forward_s=rng.random(shape),
        input_grad_s=rng.random(shape),
        weight_grad_s=rng.random(shape),
        send_s=rng.random(max(1, depth - 1)),
        send_back_s=draw(st.sampled_from([None, rng.random(max(1, depth - 1))])),
        skips={pair: float(rng.random()) for pair in chosen},
        overlap_sends=draw(st.booleans()),
        gather_s=rng.random(depth),
        gather=draw(st.sampled_from(["once", "each"])),
    )
    return schedule, times


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_a_plain_simulation(case: tuple[Schedule, StageTimes]) -> None:
    schedule, times = case
    found, wanted = simulate(schedule, times), plain(schedule, times)
    by_action = {(e.rank, e.label): e for e in found.events() if e.stream == "compute" and e.kind != "optimizer"}
    assert len(by_action) == len(wanted)
    for (rank, action), (start, end) in wanted.items():
        event = by_action[rank, str(action)]
        assert (event.start_s, event.end_s) == pytest.approx((start, end), abs=1e-12)


def test_gpipe_and_1f1b_closed_forms() -> None:
    """Equal stages: (m + p - 1)(F + B), and for sends that overlap the pipeline's latency on top."""
    for p in (1, 2, 4, 7):
        for m in (1, 3, 4, 16):
            for name in ("gpipe", "1f1b"):
                assert simulate(build(name, p, 1, m), EQUAL).step_time_s == pytest.approx((m + p - 1) * 3)
            sent = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, send_s=0.25)
            assert simulate(build("gpipe", p, 1, m), sent).step_time_s == pytest.approx(
                (m + p - 1) * 3 + 2 * (p - 1) * 0.25
            )


def test_interleaving_divides_the_bubble() -> None:
    """Narayanan et al. 2021, section 2.2: the idle time is (p - 1)(F + B) / v for m a multiple of p."""
    for v in (1, 2, 4):
        part = StageTimes(forward_s=1 / v, input_grad_s=1 / v, weight_grad_s=1 / v)
        found = simulate(build("interleaved-1f1b", 4, v, 8), part)
        assert found.step_time_s == pytest.approx(8 * 3 + 3 * 3 / v)


def test_zero_bubble_formulas() -> None:
    """Qi et al. 2023, section 2: idle (p - 1)(F + B - W) for H1, (p - 1)(F + B - 2 W) for H2, 0 of equal works."""
    p, m = 4, 16
    for f, b, w in ((1.0, 1.0, 1.0), (1.0, 1.1, 0.8)):
        times = StageTimes(forward_s=f, input_grad_s=b, weight_grad_s=w)
        h1 = largest_stage_s(simulate(build("zb-h1", p, 1, m), times))
        assert h1 == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))
    assert largest_stage_s(simulate(build("zb-2p", p, 1, m), EQUAL)) == pytest.approx(m * 3)
    half = StageTimes(forward_s=0.5, input_grad_s=0.5, weight_grad_s=0.5)
    assert largest_stage_s(simulate(build("zb-v", p, 2, m), half)) == pytest.approx(m * 3)


def test_asynchronous_calls_leave_nothing_idle() -> None:
    for m in (1, 2, 4, 9):
        assert simulate(build("async-1f1b", 4, 1, m), EQUAL).step_time_s == pytest.approx(3 * m)
    uneven = StageTimes(forward_s=[1, 2, 1, 1], input_grad_s=1.0, weight_grad_s=1.0, optimizer_s=0.5)
    assert simulate(build("2bw", 4, 1, 4), uneven).step_time_s == pytest.approx(4 * 4 + 0.5)
    # p micro-batches in flight: the round trip of one bounds the rate.
    slow = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, send_s=2.0)
    assert simulate(build("async-1f1b", 4, 1, 4), slow).step_time_s == pytest.approx(4 * 3 + 2 * 3 * 2.0)


def largest_stage_s(found: Timeline) -> float:
    """The longest time from the first start to the last end on one rank."""
    ranks = range(found.schedule.ranks)
    spans = [found.actions.rank == rank for rank in ranks]
    return float(max(found.actions.end_s[mine].max() - found.actions.start_s[mine].min() for mine in spans))


ZERO_BUBBLE = Path(__file__).parent / "data" / "zero_bubble_2023.csv"


def published() -> list[dict[str, str]]:
    return list(csv.DictReader(line for line in ZERO_BUBBLE.read_text().splitlines() if not line.startswith("#")))


@pytest.mark.parametrize(
    ("column", "name"), [("1f1b", "1f1b"), ("zb-h1", "zb-h1"), ("zb-h2", "zb-2p"), ("zb-1p", "interleaved-zb")]
)
def test_bubble_rates_of_the_zero_bubble_paper(column: str, name: str) -> None:
    """From its profiled seconds; within 0.3 % of each of its twelve rates (they are printed with four digits)."""
    assert len(published()) == 12
    for row in published():
        p, m = int(row["ranks"]), int(row["microbatches"])
        f, b, w, c = (float(row[f"{key}_ms"]) for key in "FBWC")
        times = StageTimes(forward_s=f, input_grad_s=b, weight_grad_s=w, send_s=c)
        cost = largest_stage_s(simulate(build(name, p, 1, m), times))
        assert (cost - m * (f + b + w)) / cost == pytest.approx(float(row[column]), rel=3e-3), row


def test_sends_that_do_not_overlap() -> None:
    """Every micro-batch then pays two sends on an inner stage: (m + p - 1)(F + B + W + 2 C), as measured for 1F1B."""
    p, m = 8, 24
    times = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.5, send_s=0.05, overlap_sends=False)
    assert simulate(build("1f1b", p, 1, m), times).step_time_s == pytest.approx((m + p - 1) * 2.6, rel=2e-3)


def test_reductions_follow_the_backward() -> None:
    times = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "reduce_s": 2.0, "optimizer_s": 0.5}
    table = build("1f1b", 2, 1, 4)
    assert simulate(table, StageTimes(**times)).step_time_s == pytest.approx(15 + 2 + 0.5)
    # In 4 buckets, the last ready at 15, each of 0.5 s: the first at 13.5 and then one after another.
    assert simulate(table, StageTimes(**times, buckets=4)).step_time_s == pytest.approx(13.5 + 4 * 0.5 + 0.5)
    # After each backward: only what does not fit behind the backwards is left; the last begins at 15.
    each = simulate(table, StageTimes(**times, reduce="each"))
    assert each.step_time_s == pytest.approx(15 + 2 + 0.5)
    assert len(each.reductions) == 2 * 4
    # Two stages of one rank share its reducing stream: the last backwards end at 8 and 12.
    loop = simulate(build("looped-bfs", 1, 2, 2), StageTimes(**times | {"reduce_s": 7.0}))
    assert loop.step_time_s == pytest.approx(8 + 7 + 7 + 2 * 0.5)


def test_clipping_waits_for_all_ranks() -> None:
    uneven = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "optimizer_s": [0.25, 3.0]}
    assert simulate(build("1f1b", 2, 1, 1), StageTimes(**uneven)).step_time_s == pytest.approx(4 + 3)
    assert simulate(build("1f1b", 2, 1, 1), StageTimes(**uneven, clipped=True)).step_time_s == pytest.approx(6 + 3)


def test_gathers() -> None:
    table = build("gpipe", 2, 1, 2)
    once = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, gather_s=[0.5, 4.0])
    found = simulate(table, once)
    assert found.actions.start_s[:2].tolist() == [0.5, 1.5]
    assert found.step_time_s == pytest.approx(4 + 2 + 2 * 2 + 2)
    each = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, gather_s=1.5, gather="each")
    rank0 = simulate(build("gpipe", 1, 1, 2), each)
    # The first waits for its own; the later ones come while the action before runs: 1.5 after it began.
    assert rank0.actions.start_s.tolist() == [1.5, 3.0, 4.5, 6.5]
    assert [(e.start_s, e.end_s) for e in rank0.events() if e.kind == "gather"][:2] == [(0.0, 1.5), (1.5, 3.0)]


def test_idle_shares_flight_and_events() -> None:
    found = simulate(build("1f1b", 2, 1, 3), EQUAL)
    assert found.pipeline_s == found.step_time_s == 12
    assert found.bubble == pytest.approx([0.25, 0.25])
    assert found.in_flight == (2, 1)
    events = list(found.events())
    assert [e.label for e in events if e.rank == 1 and e.stream == "compute"][:2] == ["1F0", "1B0"]
    assert [e.label for e in events if e.kind == "send"][:2] == ["0>1 0", "0>1 1"]
    for stream in ("compute", "reduce", "gather"):
        for rank in range(2):
            spans = sorted((e.start_s, e.end_s) for e in events if (e.rank, e.stream) == (rank, stream))
            assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))


def test_bytes_held_over_time() -> None:
    found = simulate(build("zb-h1", 2, 1, 3), EQUAL)
    stages = found.held_by_stage([10.0, 20.0], until_weight_gradient=0.5, constant_bytes=[100.0, 200.0])
    assert [s.size_bytes[0] for s in stages] == [100, 200]
    assert [s.size_bytes[-1] for s in stages] == [100, 200]
    assert stages[0].peak_bytes == 100 + 2 * 10
    assert stages[1].peak_bytes == 200 + 20 + 10  # a whole micro-batch, and half of one that waits for its W
    gpipe = simulate(build("looped-bfs", 1, 2, 3), EQUAL)
    assert gpipe.held_by_rank(1.0)[0].peak_bytes == 6
    assert [h.peak_bytes for h in simulate(build("1f1b", 4, 1, 8), EQUAL).held_by_stage(1.0)] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_peak_bytes_are_the_micro_batches_in_flight(name: str) -> None:
    found = simulate(build(name, 4, KINDS[name].virtual or 2, 8), EQUAL)
    assert [h.peak_bytes for h in found.held_by_rank(1.0)] == list(found.in_flight)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"forward_s": [1.0, 2.0, 3.0]}, r"forward_s: \(3,\) figures; give one, or one for each of 2 stages"),
        ({"input_grad_s": -1.0}, "input_grad_s: -1.0 is negative"),
        ({"optimizer_s": float("nan")}, "optimizer_s: nan is negative or not finite"),
        ({"forward_s": np.ones((2, 4))}, "forward_s"),
        ({"skips": {(1, 0): 1.0}}, "no stage 0 that could take values from stage 1"),
        ({"gather": "never"}, "gather='never' is none of once, each"),
        ({"buckets": 0}, "buckets=0 must be"),
    ],
)
def test_refusals(figures: dict[str, object], message: str) -> None:
    fields = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    with pytest.raises(PlanError, match=message):
        simulate(build("1f1b", 2, 1, 3), StageTimes(**fields | figures))  # type: ignore[arg-type]


def test_large_steps_are_fast() -> None:
    """128 stages x 512 micro-batches: 50 ms is wanted and about 30 measured; twice that, since machines are busy."""
    table = build("1f1b", 128, 1, 512)
    times = StageTimes(forward_s=np.linspace(1, 2, 128), input_grad_s=1.0, weight_grad_s=1.0, send_s=0.1, reduce_s=5.0)
    simulate(table, times)
    taken = []
    for _ in range(5):
        begun = time.process_time()
        simulate(table, times)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.1
