"""Event simulation of one training step of a pipeline.

Enters: a schedule table, and seconds by stage (`StageTimes`). Leaves: a `Timeline`.
Refused, with a `PlanError`: figures that are negative, not finite or not one for each stage; tables that deadlock.

What runs at the same time on a rank, and what waits for what:

    compute   actions in the order of the rank's row; each waits for the previous one and for what it needs
    send      a result leaves for another rank when it is made and the link between the two ranks is free
    gather    "once": parameters of the rank's stages one after another from time 0, before the first forward of each;
              "each": before every action of a stage, fetched while the action before it runs, not earlier
    reduce    "last": gradients of a stage once its last micro-batch has made them, the buckets of the last backward
              as they come; "each": after every backward or weight gradient
    optimizer after the rank's last action and reduction; `clipped`: after those of all ranks

The recurrence  start(a) = max(end(previous on the rank), end of what a needs, ...), end(a) = start(a) + seconds  is
run slot by slot (`waves`), all ranks of a slot at once: 128 stages x 512 micro-batches take about 30 ms [measured].
An asynchronous schedule is run for several calls in a row, and its step is the time from one call to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from autopar.cost.timeline import Floats, Spans, Timeline, by_stage
from autopar.errors import PlanError
from autopar.schedule.asynchronous import in_sequence
from autopar.schedule.sends import sends_of
from autopar.schedule.table import BACKWARD, FORWARD, WEIGHT_GRAD, Ints, Schedule
from autopar.schedule.waves import waves

_WHEN = {"gather": ("once", "each"), "reduce": ("last", "each")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of everything a step does, by stage of one replica; a scalar stands for all stages.

    Fields:  forward_s, input_grad_s, weight_grad_s: of one micro-batch: [stages] or [stages, microbatches]. A whole
             backward takes the sum of the last two.
             send_s: [stages - 1] of what goes from stage s to s + 1; send_back_s: of its gradient, None: the same.
             Stages on one rank pass values for nothing. skips: (source, reader) -> seconds each way, for values that
             stages take from others than the one before.
             overlap_sends: False: a send keeps its rank from computing.
             gather_s: [stages], gather: "once" or "each". reduce_s: [stages], reduce: "last" or "each", buckets: in
             how many pieces the last backward of a stage makes its gradients.
             optimizer_s: [stages]. clipped: the optimizer needs the gradient norm over all ranks.
    Raises:  PlanError: `gather`, `reduce` or `buckets` is none of the above.
    """

    forward_s: ArrayLike
    input_grad_s: ArrayLike
    weight_grad_s: ArrayLike
    send_s: ArrayLike = 0.0
    send_back_s: ArrayLike | None = None
    skips: Mapping[tuple[int, int], float] = field(default_factory=dict)
    overlap_sends: bool = True
    gather_s: ArrayLike = 0.0
    gather: str = "once"
    reduce_s: ArrayLike = 0.0
    reduce: str = "last"
    buckets: int = 1
    optimizer_s: ArrayLike = 0.0
    clipped: bool = False

    def __post_init__(self) -> None:
        for name, known in _WHEN.items():
            if getattr(self, name) not in known:
                raise PlanError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}")
        if not isinstance(self.buckets, int) or self.buckets < 1:
            raise PlanError(f"buckets={self.buckets!r} must be an integer of at least 1")


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """Run one step.

    Raises:  PlanError: figures that do not fit the schedule's stages; a table that deadlocks.
    """
    if schedule.asynchronous:
        return _steady(schedule, times)
    run = _Run(schedule, times)
    run.compute()
    return run.timeline()


def _steady(schedule: Schedule, times: StageTimes) -> Timeline:
    """Calls in a row, each with its reductions and optimizer step after the rank's last backward of it."""
    half = 2 + -(-schedule.depth // schedule.microbatches)  # calls until the pipeline is full, and some to even out
    calls = in_sequence(schedule, 2 * half)
    run = _Run(calls, times, per_call=schedule.microbatches)
    run.compute()
    backwards = np.flatnonzero((run.w.work != FORWARD) & (run.w.rank == 0))
    ends = run.ready[backwards[schedule.microbatches - 1 :: schedule.microbatches]]
    return run.timeline(step_time_s=float(ends[-1] - ends[half - 1]) / half)


class _Run:
    """The arrays of one simulation."""

    def __init__(self, schedule: Schedule, times: StageTimes, per_call: int | None = None) -> None:
        self.schedule, self.times = schedule, times
        depth, m = schedule.depth, schedule.microbatches
        reads = {stage: {stage - 1} for stage in range(1, depth)}
        for source, reader in times.skips:
            if not 0 <= source < reader < depth:
                raise PlanError(f"skips: no stage {reader} that could take values from stage {source} of {depth}")
            reads[reader].add(source)
        sources = {stage: sorted(read) for stage, read in reads.items()}
        self.w = w = waves(schedule, sources)
        self.sends = sends_of(w)
        self.n, n = len(w.stage), len(w.stage)

        calls = per_call or m  # figures are of the micro-batches of one call
        at = w.stage % depth, w.microbatch % calls
        parts = [
            by_stage(name, getattr(times, name), depth, calls)[at]
            for name in ("forward_s", "input_grad_s", "weight_grad_s")
        ]
        self.seconds = np.choose(w.work, [parts[0], parts[1] + parts[2], parts[1], parts[2]])
        self.work_s = self.seconds
        self.send_s = self._send_seconds()
        if not times.overlap_sends:
            self.seconds = self.seconds + np.bincount(self.sends.source, self.send_s, minlength=n)
            self.send_s = np.zeros_like(self.send_s)
        self.gather_s = by_stage("gather_s", times.gather_s, depth)
        self.reduce_s = by_stage("reduce_s", times.reduce_s, depth)
        self.optimizer_s = by_stage("optimizer_s", times.optimizer_s, depth)
        if per_call is not None:
            self._after_each_call(per_call)
        self.ready = np.zeros(n + 1 + len(self.send_s))
        self.start = np.zeros(n)
        self.gathers = self._gather_once() if times.gather == "once" else None

    def _send_seconds(self) -> Floats:
        """[sends] seconds on the link."""
        depth, times, sends, stage = self.schedule.depth, self.times, self.sends, self.w.stage
        ahead = by_stage("send_s", times.send_s, max(1, depth - 1))
        back = ahead if times.send_back_s is None else by_stage("send_back_s", times.send_back_s, max(1, depth - 1))
        ends = np.sort(np.stack([stage[sends.source], stage[sends.target]]) % depth, axis=0)
        seconds = np.where(sends.back, back[ends[0] % len(back)], ahead[ends[0] % len(ahead)])
        for (source, reader), skip in times.skips.items():
            seconds = np.where((ends[0] == source) & (ends[1] == reader), by_stage("skips", skip, 1)[0], seconds)
        return seconds

    def _after_each_call(self, per_call: int) -> None:
        """Asynchronous: a stage's last backward of a call is followed by its reduction and optimizer step."""
        w, extra = self.w, self.reduce_s + self.optimizer_s
        backward = np.flatnonzero(w.work != FORWARD)
        for stage in range(self.schedule.stages):
            mine = backward[w.stage[backward] == stage]
            self.seconds[mine[per_call - 1 :: per_call]] += extra[stage % self.schedule.depth]

    def _gather_once(self) -> tuple[Ints, Floats, Floats]:
        """(stages, starts, ends) of the gathers at the beginning, and the bound that they are for the actions."""
        stages = self.w.stage[np.sort(np.unique(self.w.stage, return_index=True)[1])]  # in order of first use
        seconds = self.gather_s[stages % self.schedule.depth]
        ends = np.zeros(self.schedule.stages)
        free = np.zeros(self.schedule.ranks)
        for stage, time_s in zip(stages.tolist(), seconds.tolist(), strict=True):
            rank = self.schedule.placement[stage]
            free[rank] += time_s
            ends[stage] = free[rank]
        return stages, ends[stages] - seconds, ends[stages]

    def compute(self) -> None:
        """Fill `start` and `ready`."""
        w, n, ready, start, seconds = self.w, self.n, self.ready, self.start, self.seconds
        inputs, source, before, send_s = self.sends.inputs, self.sends.source, self.sends.before, self.send_s
        bounds, base = w.bounds.tolist(), n + 1
        least = None
        if self.gathers is not None and self.gather_s.any():
            ends = np.empty(self.schedule.stages)
            ends[self.gathers[0]] = self.gathers[2]
            least = ends[w.stage]
        fetch = self.gather_s[w.stage % self.schedule.depth] if self.times.gather == "each" else None
        begun = np.zeros(n + 1)  # by place: when the action started; place n is time 0
        for t, sends in enumerate(self.sends.levels):
            lo, hi = bounds[t], bounds[t + 1]
            now = ready[inputs[:, lo:hi]].max(axis=0)
            if least is not None:
                np.maximum(now, least[lo:hi], out=now)
            if fetch is not None:
                np.maximum(now, begun[w.before[lo:hi]] + fetch[lo:hi], out=now)
                begun[lo:hi] = now
            start[lo:hi] = now
            ready[lo:hi] = now + seconds[lo:hi]
            for a, b in sends:
                ready[base + a : base + b] = np.maximum(ready[source[a:b]], ready[before[a:b]]) + send_s[a:b]

    def timeline(self, step_time_s: float | None = None) -> Timeline:
        """Reductions and optimizer after the actions, and all of it as spans."""
        w, n, schedule = self.w, self.n, self.schedule
        end = self.ready[:n]
        nothing = Spans(*(np.zeros(0, dtype=np.int64),) * 3, np.zeros(0), np.zeros(0))
        reductions = optimizer = nothing
        pipeline_s = float(end.max(initial=0.0))
        if step_time_s is None:
            reductions = self._reductions()
            optimizer = self._optimizer(reductions)
            step_time_s = float(optimizer.end_s.max(initial=0.0))
        sent, made = self.ready[n + 1 :], self.sends.source
        sends = Spans(
            w.rank[made], w.stage[made], w.microbatch[made], sent - self.send_s, sent, w.rank[self.sends.target]
        )
        return Timeline(
            schedule,
            w.work,
            Spans(w.rank, w.stage, w.microbatch, self.start, end),
            sends,
            reductions,
            self._gathers(),
            optimizer,
            pipeline_s,
            step_time_s,
            np.bincount(w.rank, self.work_s, minlength=schedule.ranks).astype(np.float64),
        )

    def _gathers(self) -> Spans:
        w, depth = self.w, self.schedule.depth
        if self.gathers is not None:
            stages, starts, ends = self.gathers
            some = ends > starts
            rank = np.array(self.schedule.placement)[stages]
            none = np.full(len(stages), -1)
            return Spans(rank[some], stages[some], none[some], starts[some], ends[some])
        seconds = self.gather_s[w.stage % depth]
        some = seconds > 0
        starts = np.concatenate([self.start, [0.0]])[w.before][some]
        return Spans(w.rank[some], w.stage[some], w.microbatch[some], starts, starts + seconds[some])

    def _reductions(self) -> Spans:
        w, times, end = self.w, self.times, self.ready[: self.n]
        makes = np.flatnonzero((w.work == BACKWARD) | (w.work == WEIGHT_GRAD))
        seconds = self.reduce_s[w.stage[makes] % self.schedule.depth]
        pieces = 1
        if times.reduce == "last":
            last = np.zeros(self.schedule.stages, dtype=np.int64)
            last[w.stage[makes]] = makes  # places of one stage come in the order of its row: the last one stays
            makes = np.unique(last[np.unique(w.stage[makes])])
            seconds, pieces = self.reduce_s[w.stage[makes] % self.schedule.depth], times.buckets
        makes, seconds = makes[seconds > 0], seconds[seconds > 0]
        part = (np.arange(pieces) + 1) / pieces
        ready = (self.start[makes, None] + self.work_s[makes, None] * part).ravel()
        ready = np.where(np.tile(part, len(makes)) == 1, np.repeat(end[makes], pieces), ready)
        makes, seconds = np.repeat(makes, pieces), np.repeat(seconds / pieces, pieces)
        order = np.lexsort((ready, w.rank[makes]))
        makes, seconds, ready = makes[order], seconds[order], ready[order]
        ends = np.empty(len(makes))
        for rank in np.unique(w.rank[makes]):  # end(i) = max(ready(i), end(i - 1)) + seconds(i), in closed form
            mine = w.rank[makes] == rank
            total = np.cumsum(seconds[mine])
            ends[mine] = total + np.maximum.accumulate(ready[mine] - (total - seconds[mine]))
        each = w.microbatch[makes] if times.reduce == "each" else np.full(len(makes), -1)
        return Spans(w.rank[makes], w.stage[makes], each, ends - seconds, ends)

    def _optimizer(self, reductions: Spans) -> Spans:
        ranks, placement = self.schedule.ranks, np.array(self.schedule.placement)
        begin = np.zeros(ranks)
        np.maximum.at(begin, self.w.rank, self.ready[: self.n])
        np.maximum.at(begin, reductions.rank, reductions.end_s)
        if self.times.clipped:
            begin[:] = begin.max()
        seconds = np.bincount(placement, np.tile(self.optimizer_s, self.schedule.replicas), minlength=ranks)
        none = np.full(ranks, -1)
        return Spans(np.arange(ranks), none, none, begin, begin + seconds)
