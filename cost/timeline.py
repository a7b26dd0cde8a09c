"""One simulated step as data: when each action, send, reduction, gather and optimizer step begins and ends.

Enters: what `simulate` found. Leaves: `Timeline`: events for people and traces, idle shares, micro-batches in flight,
bytes held over time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import PlanError
from autopar.schedule.check import in_flight
from autopar.schedule.table import FORWARD, WORKS, Ints, Schedule

Floats = NDArray[np.float64]

KINDS = (
    "forward",
    "backward",
    "input gradient",
    "weight gradient",
    "send",
    "reduce",
    "gather",
    "optimizer",
)
"""What an event can be; the first four in the order of the works F, B, I, W."""

STREAMS = ("compute", "send", "reduce", "gather")
"""What a rank does at the same time: events of one stream never overlap, except sends to different ranks."""


class Event(NamedTuple):
    """Something that takes time on one stream of one rank."""

    rank: int
    stream: str
    kind: str
    stage: int
    """-1 for an optimizer step, which is of all stages of the rank."""
    microbatch: int
    """-1 where it is of none."""
    start_s: float
    end_s: float
    target: int = -1
    """Rank that a send goes to."""

    @property
    def label(self) -> str:
        """`2F5`; `2>3 5` for a send; the kind for the rest."""
        if self.kind in KINDS[:4]:
            return f"{self.stage}{WORKS[KINDS.index(self.kind)]}{self.microbatch}"
        return f"{self.rank}>{self.target} {self.microbatch}" if self.kind == "send" else f"{self.kind} {self.stage}"


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Events of one kind as arrays of equal length; stage or micro-batch -1 where an event is of none."""

    rank: Ints
    stage: Ints
    microbatch: Ints
    start_s: Floats
    end_s: Floats
    target: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Bytes that one stage or rank holds: `size_bytes[i]` from `time_s[i]` on; both begin at time 0."""

    time_s: Floats
    size_bytes: Floats

    @property
    def peak_bytes(self) -> float:
        """The most."""
        return float(self.size_bytes.max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What one step of a schedule takes.

    Fields:  schedule: the table that was run (of an asynchronous one: several calls in a row). work: codes of the works
             (places in "FBIW") of `actions`. actions, sends, reductions, gathers, optimizer: spans.
             pipeline_s: end of the last action. step_time_s: of the whole step, the optimizer's included; of an
             asynchronous schedule the time between two calls. busy_s: [ranks] seconds of computation.
    """

    schedule: Schedule
    work: Ints
    actions: Spans
    sends: Spans
    reductions: Spans
    gathers: Spans
    optimizer: Spans
    pipeline_s: float
    step_time_s: float
    busy_s: Floats

    @property
    def bubble(self) -> Floats:
        """[ranks] share of `pipeline_s` in which a rank computes nothing."""
        return 1 - self.busy_s / self.pipeline_s if self.pipeline_s else np.zeros(len(self.busy_s))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each rank the most micro-batches whose activations it holds at once."""
        return tuple(max(in_flight(row), default=0) for row in self.schedule.rows)

    def events(self) -> Iterator[Event]:
        """Everything, by kind, then time."""
        for spans, stream, kinds in (
            (self.actions, "compute", np.array(KINDS)[self.work]),
            (self.sends, "send", "send"),
            (self.reductions, "reduce", "reduce"),
            (self.gathers, "gather", "gather"),
            (self.optimizer, "compute", "optimizer"),
        ):
            kind = np.broadcast_to(kinds, len(spans))
            target = spans.target if len(spans.target) else np.full(len(spans), -1)
            for i in np.argsort(spans.start_s, kind="stable"):
                yield Event(
                    int(spans.rank[i]),
                    stream,
                    str(kind[i]),
                    int(spans.stage[i]),
                    int(spans.microbatch[i]),
                    float(spans.start_s[i]),
                    float(spans.end_s[i]),
                    int(target[i]),
                )

    def held_by_stage(
        self, activation_bytes: ArrayLike, until_weight_gradient: ArrayLike = 1.0, constant_bytes: ArrayLike = 0.0
    ) -> tuple[Held, ...]:
        """Bytes of each stage over time.

        A forward takes its activations from its start on. Its whole backward lets them go at its end; where the
        backward is split, the input gradient keeps the share that the weight gradient still needs.

        Args:    activation_bytes: of one micro-batch; scalar or [stages of one replica]. until_weight_gradient: share
                 of them, in 0..1, that lives until the weight gradient. constant_bytes: weights, gradients, optimizer.
        Raises:  PlanError: not one figure, nor one a stage; a negative one.
        """
        depth = self.schedule.depth
        activation, share, constant = (
            np.tile(by_stage(name, figure, depth), self.schedule.replicas)
            for name, figure in (
                ("activation_bytes", activation_bytes),
                ("until_weight_gradient", until_weight_gradient),
                ("constant_bytes", constant_bytes),
            )
        )
        stage = self.actions.stage
        change = activation[stage] * np.choose(self.work, [np.ones(len(stage)), -1, share[stage] - 1, -share[stage]])
        when = np.where(self.work == FORWARD, self.actions.start_s, self.actions.end_s)
        held = []
        for s in range(self.schedule.stages):
            mine = np.flatnonzero(stage == s)
            before = activation[s] * max(0, -int(self.actions.microbatch[mine].min(initial=0)))  # of the call before
            held.append(_held(when[mine], change[mine], constant[s] + before))
        return tuple(held)

    def held_by_rank(
        self, activation_bytes: ArrayLike, until_weight_gradient: ArrayLike = 1.0, constant_bytes: ArrayLike = 0.0
    ) -> tuple[Held, ...]:
        """The sum over the stages of each rank; arguments as `held_by_stage`."""
        stages = self.held_by_stage(activation_bytes, until_weight_gradient, constant_bytes)
        held = []
        for rank in range(self.schedule.ranks):
            parts = [stages[s] for s in self.schedule.held(rank)]
            times = np.concatenate([part.time_s[1:] for part in parts])
            changes = np.concatenate([np.diff(part.size_bytes) for part in parts])
            held.append(_held(times, changes, sum(float(part.size_bytes[0]) for part in parts)))
        return tuple(held)


def by_stage(name: str, figure: ArrayLike, depth: int, microbatches: int | None = None) -> Floats:
    """[depth], or [depth, microbatches] where that is given, of a figure that is one for all or one for each.

    Raises:  PlanError: another number of figures, a negative one, NaN or infinity.
    """
    given = np.asarray(figure, dtype=np.float64)
    shape = (depth,) if microbatches is None else (depth, microbatches)
    if given.ndim == 1 and microbatches is not None:
        given = given[:, None]
    wrong = given.ndim > len(shape) or any(n not in (1, m) for n, m in zip(given.shape, shape, strict=False))
    if wrong or (given.ndim and given.shape[0] != depth):
        raise PlanError(f"{name}: {np.shape(figure)} figures; give one, or one for each of {depth} stages")
    if not (np.isfinite(given).all() and (given >= 0).all()):
        worst = given[~(np.isfinite(given) & (given >= 0))].flat[0]
        raise PlanError(f"{name}: {worst} is negative or not finite")
    return np.broadcast_to(given, shape)


def _held(when_s: Floats, change_bytes: Floats, begin_bytes: float) -> Held:
    order = np.lexsort((change_bytes, when_s))  # at one moment let go before taking
    sizes = begin_bytes + np.concatenate([[0.0], np.cumsum(change_bytes[order])])
    return Held(np.concatenate([[0.0], when_s[order]]), sizes)


__all__ = ["KINDS", "STREAMS", "Event", "Floats", "Held", "Spans", "Timeline", "by_stage"]
