"""Choose the shape of a run: pipeline ranks, micro-batches, schedule, and a ZeRO level of all parameters.

What enters: an `Analysis`, the topology, settings. What leaves: `Shaped`: the best shape, its solved problem, its cut.
Refused, with the first shape's error: none fits the memory, or keeps the pins.

Each shape is a problem of its own (`search`), for the devices of one stage; its solution is cut into stages for each
schedule, and that is simulated. What is pinned is the only one tried. A problem whose bound, shared by all stages
without a bubble, is no better than the best step so far is not solved.

A pipeline has to be faster by `MARGIN`, since it asks more of a user: its loss is differentiated inside the call. So
only a model that returns one, and trains, gets one unasked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.cost.hardware import Profile
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.layout import chunk
from autopar.mesh import Mesh, factor_axes, inside_stage
from autopar.pins import SPLIT_BACKWARD
from autopar.rules.analyse import Analysis
from autopar.schedule.build import build
from autopar.solver.decide import decide, zero_level
from autopar.solver.optimise import Beaten
from autopar.solver.roles import Roles
from autopar.solver.search import GAP, Found, search
from autopar.solver.settings import Settings, Shape
from autopar.solver.stages import Cut, cut, default_virtual, held_at_once, largest_share, stage_inside
from autopar.solver.step import step_of

MARGIN = 0.05
"""By how much a pipeline has to be faster than none: more than the predictions' median error."""
SIMPLER = 0.02
"""By how much a later choice (more micro-batches, another schedule or ZeRO level) has to be faster than an earlier."""
BEATEN = "the best step is faster than this one can be"
CROWDED = "the best step is faster than this one can be in the memory there is"
PATIENCE = 2
"""So many numbers of stages in a row, each no faster than the best shape, end the search in their direction; one does
where the best shape has stages."""
MICROBATCHES_A_STAGE = (2, 4, 8)
"""Micro-batches tried for each pipeline rank, as far as the batch has rows for them; the middle one first."""
MICROBATCHES_ALONE = (2, 4, 8, 16, 32, 64, 128, 256)
"""The same without stages, where a whole batch at once takes too much memory."""
UNASKED = (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2))
"""Schedules, with stages a rank, that a pipeline may have without a pin: the plainest first. The others take no less
time (gpipe, zb-h1, interleaved-zb) or more memory (looped-bfs, zb-2p, dualpipe-v)."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A shape and what came of it: a step, or None, with the reason. schedule: the best one."""

    shape: Shape
    step_s: float | None
    schedule: str = ""
    recompute: str = "none"
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it."""
        shape = {"pp": self.shape.stages, "microbatches": self.shape.microbatches, "zero": self.shape.zero}
        if self.step_s is None:
            return {**shape, "step_time_s": None, "refused": self.refused}
        return {**shape, "step_time_s": self.step_s, "schedule": self.schedule, "recompute": self.recompute}


@dataclass(frozen=True, eq=False)
class Shaped:
    """settings: inside a stage, with the shape as pins. cut: None without stages and micro-batches."""

    shape: Shape
    found: Found
    settings: Settings
    cut: Cut | None
    step_s: float
    notes: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()


@dataclass(eq=False)
class ShapeSearch:
    """levels: of recomputation that may be chosen. unasked: stages and micro-batches may be chosen, too."""

    analysis: Analysis
    topology: Mesh
    profile: Profile
    settings: Settings
    sinks: Mapping[int, str]
    levels: Sequence[str]
    unasked: bool
    progress: Callable[[str], None] = lambda stage: None
    best: Shaped | None = field(default=None, init=False)
    rough: bool = field(default=False, init=False)
    """Was the best one solved quickly?"""
    refusal: AutoparError | None = field(default=None, init=False)
    tried: list[Tried] = field(default_factory=list, init=False)

    @cached_property
    def rows(self) -> int:
        """Of the global batch."""
        mesh = factor_axes(self.topology, {})
        return Roles(self.analysis, mesh, self.settings.pins, self.settings.batch_dims or {}).rows

    @property
    def blocks(self) -> int:
        return len(self.analysis.program.blocks)

    def chosen(self) -> Shaped:
        """The best shape. Raises: InfeasibleError: none fits the memory. PlanError: none keeps the pins."""
        self.run()
        if self.best is None:
            assert self.refusal is not None
            raise self.refusal
        return replace(self.best, tried=tuple(self.tried))

    def run(self) -> None:
        pins = self.settings.pins
        first = pins.degrees.get("pp", 1)
        if "pp" in pins.degrees or not self.asks_for_stages():
            self.try_stages(first)
        if self.best is None and "pp" in pins.degrees and "microbatches" not in pins.given:
            self.consider(Shape(first, 1, pins.zero))  # a model that needs its whole batch at once
            if self.best is not None:
                self.best = replace(self.best, notes=(f"one micro-batch: {self.refusal}",))
        counts = self.stage_counts()
        middle = len(counts) // 2
        for way in (counts[middle:], counts[:middle][::-1]):
            if self.best is not None and counts and self.best.shape.stages > counts[middle]:
                break  # it became faster with every step away from the other direction
            slower = 0
            for stages in way:
                found = self.best is not None and self.best.shape.stages > 1
                if slower == (1 if found else PATIENCE) or not self.promising():
                    break
                before = self.best
                self.try_stages(stages)
                slower = 0 if self.best is not before else slower + 1
        if self.best is not None and self.rough:
            shape = self.best.shape
            if shape.zero != pins.zero:  # each parameter's own choice, too
                self.consider(replace(shape, zero=pins.zero), self.best.found.solution.objective_s)
            self.polish(self.best)

    def asks_for_stages(self) -> bool:
        """Do the pins name what only a pipeline has? Raises: PlanError: they do, and none is to be had."""
        given = self.settings.pins.given
        asked = {k: given[k] for k in ("schedule", "virtual_stages", "stages") if given.get(k, 1) not in (1, "1f1b")}
        if asked and not self.stage_counts():
            key, value = next(iter(asked.items()))
            raise PlanError(f"pin {key}={value!r}: only a pipeline has it; pin pp=2 or more, too")
        return bool(asked)

    def polish(self, best: Shaped) -> None:
        """The best shape once more, at its level of recomputation over all factorings, and to the full gap."""
        found = best.found
        if found.solution.gap <= GAP and len(found.mesh.axes) < 2:
            return
        try:
            again = self.solved(best.shape, False, [found.recompute], found.solution.objective_s * (1 + GAP))
        except (Beaten, InfeasibleError, PlanError):
            return
        if again.step_s < best.step_s * (1 + GAP):
            self.best = replace(again, notes=best.notes)

    # what is tried

    def stage_counts(self) -> list[int]:
        """Pipeline ranks that may be chosen unasked; the middle one is tried first."""
        pins = self.settings.pins
        if "pp" in pins.degrees or not self.unasked or pins.layouts:
            return []
        left = self.topology.size // math.prod(pins.degrees.values())
        return [n for n in range(2, min(left, self.blocks) + 1) if left % n == 0]

    def promising(self) -> bool:
        """Is there more than compute to save?"""
        best = self.best
        if best is None:
            return True
        step = step_of(best.found.built, best.found.solution.options, best.found.solution.objective_s)
        return best.step_s * (1 - MARGIN) > step.compute_s / best.settings.pipeline_ranks

    def try_stages(self, stages: int) -> None:
        """Tries numbers of micro-batches, divisors of the batch."""
        given, unasked = self.settings.pins.given, self.unasked
        data = self.settings.pins.degrees.get("dp", 1)
        rows = max(1, self.rows // data)
        if "microbatches" in given:
            self.try_zeros(stages, int(given["microbatches"]))
        elif stages == 1:
            self.try_zeros(1, 1)
            wanted = (*itertools.takewhile(lambda n: n < rows, MICROBATCHES_ALONE), rows)
            for count in dict.fromkeys(self.near(n, rows) for n in wanted if unasked and n > 1):
                if not (self.crowded() or self.best_is_alone()):
                    break
                before = self.best
                self.try_zeros(1, count)
                if self.best is before and (not self.crowded() or self.tried[-1].refused == BEATEN):
                    break  # fewer rows at once were no faster
        else:
            far = math.prod(inside_stage(self.topology, stages).levels[1:])
            most = min(rows, max(1, self.rows // far))  # else an axis over nodes has no rows to divide
            fewer, middle, more = (self.near(factor * stages, most) for factor in MICROBATCHES_A_STAGE)
            step_s = self.try_zeros(stages, middle)
            if unasked:
                other = self.try_zeros(stages, fewer) if fewer < middle else math.inf
                if more > middle and step_s < other:
                    self.try_zeros(stages, more)

    def near(self, count: int, most: int) -> int:
        """The divisor of the batch next to `count`, below it or above; else a number of uneven micro-batches."""
        count = min(count, most)
        near = (*range(count, count // 2, -1), *range(count + 1, min(2 * count, most + 1)))
        even = (n for n in near if self.rows % n == 0)
        full = (n for n in range(count, 0, -1) if chunk(self.rows, n, n - 1)[1])
        return next(even, None) or next(full)

    def crowded(self) -> bool:
        """Does memory bind so much that a whole batch at once is recomputed, or cannot be?"""
        return self.best is None or self.best.found.recompute != "none" or self.best.found.loss_chunks > 1

    def best_is_alone(self) -> bool:
        """Has the best shape micro-batches and no stages?"""
        return self.best is not None and self.best.shape.stages == 1 and self.best.shape.microbatches > 1

    def try_zeros(self, stages: int, count: int) -> float:
        """Tries all parameters gathered once a step, or, where that takes too much memory, each one's own choice of
        ZeRO 0 or 3; the step.
        """
        pins = self.settings.pins
        free = pins.zero is None and not pins.layouts and pins.given.get("offload", "none") == "none"
        others = math.prod(n for role, n in pins.degrees.items() if role not in ("pp", "dp", "cp"))
        if not (free and self.unasked and self.topology.size > stages * others):
            return self.consider(Shape(stages, count, pins.zero))
        if count == 1:
            step_s = self.consider(Shape(stages, 1))
            return step_s if self.crowded() else min(step_s, self.consider(Shape(stages, 1, 2)))
        once = self.consider(Shape(stages, count, 1))
        if once < math.inf or self.tried[-1].refused == BEATEN:
            return once
        return self.consider(Shape(stages, count))

    def schedules(self, stages: int, chunks: int) -> Iterator[tuple[str, int]]:
        given = self.settings.pins.given
        if "schedule" in given:
            yield given["schedule"], default_virtual(given["schedule"], given)
        elif given.get("virtual_stages", 1) > 1:
            yield "interleaved-1f1b", int(given["virtual_stages"])
        else:
            plain, *others = UNASKED
            yield plain
            if stages > 1 and self.unasked and "stages" not in given:
                able = (s for s in others if chunks == 1 or s[0] not in SPLIT_BACKWARD)
                yield from (s for s in able if s[1] * stages <= self.blocks)

    # one shape

    def consider(self, shape: Shape, beaten_s: float = math.inf) -> float:
        """Try a shape; its step, inf where it is refused or cannot be the best. beaten_s: what another solution of as
        many stages and micro-batches costs.
        """
        if len(self.tried) > 1 or shape.stages > 1:
            self.progress(f"solve pp={shape.stages} microbatches={shape.microbatches}")
        quick = self.best is not None
        try:
            beaten_s = min(beaten_s, self.least(shape) * shape.stages) if quick else math.inf
            shaped = self.solved(shape, quick, self.levels, beaten_s)
        except Beaten as error:
            self.tried.append(Tried(shape, None, refused=BEATEN if error.whatever_memory else CROWDED))
            return math.inf
        except (InfeasibleError, PlanError) as error:
            self.refusal = nearer(self.refusal, error)
            self.tried.append(Tried(shape, None, refused=str(error)))
            return math.inf
        name = shaped.cut.schedule.name if shaped.cut is not None else ""
        self.tried.append(Tried(shape, shaped.step_s, name, shaped.found.recompute))
        if shaped.step_s < self.least(shape):
            self.best, self.rough = shaped, quick
        return shaped.step_s

    def least(self, shape: Shape) -> float:
        """What a shape has to be faster than."""
        if self.best is None:
            return math.inf
        first = self.best.cut is None and (shape.stages > 1 or shape.microbatches > 1)
        return self.best.step_s * (1 - (MARGIN if first else SIMPLER))

    def solved(self, shape: Shape, quick: bool, levels: Sequence[str], beaten_s: float) -> Shaped:
        """The best solution, cut and schedule of a shape. quick, levels, beaten_s: as in `search`.

        Raises:  Beaten, InfeasibleError, PlanError.
        """
        settings = self.settings.shaped(shape)
        inner = settings.inside_stage()
        if shape.stages == shape.microbatches == 1:
            found = self.found(inner, shape, levels, beaten_s, quick)
            step = step_of(found.built, found.solution.options, found.solution.objective_s)
            return Shaped(shape, found, inner, None, step.total_s)
        schedules = [
            build(name, shape.stages, virtual, shape.microbatches)
            for name, virtual in self.schedules(shape.stages, int(settings.pins.given.get("loss_chunks", 1)))
        ]
        # in the memory of all stages together: as if each rank held what the fullest does; where that fails, the least
        held = [min(held_at_once(schedule, self.rows, of_all) for schedule in schedules) for of_all in (max, min)]
        inner = replace(inner, largest=largest_share(self.rows, shape.microbatches))
        try:
            return self.fitting(replace(inner, held=held[0]), settings, shape, quick, levels, beaten_s)
        except InfeasibleError:
            if quick or held[1] == held[0]:
                raise
            return self.fitting(replace(inner, held=held[1]), settings, shape, quick, levels, beaten_s)

    def fitting(
        self, inner: Settings, settings: Settings, shape: Shape, quick: bool, levels: Sequence[str], beaten_s: float
    ) -> Shaped:
        """The first of the levels of recomputation whose solution, which fits all stages together, fits a cut, too."""
        while True:
            found = self.found(inner, shape, levels, beaten_s, quick)
            try:
                best = self.scheduled(found, settings, shape)
                return Shaped(shape, found, inner, best, best.step_s)
            except InfeasibleError:
                levels = levels[list(levels).index(found.recompute) + 1 :]
                if not levels:
                    raise

    def found(self, inner: Settings, shape: Shape, levels: Sequence[str], beaten_s: float, quick: bool) -> Found:
        """The solution inside a stage. A pinned ZeRO level is kept: where no parameter would be gathered, all devices
        that no pin takes are data parallel.
        """
        stage, pins = inside_stage(self.topology, shape.stages), inner.pins

        def solution(settings: Settings) -> Found:
            return search(
                self.analysis, stage, self.profile, settings, self.sinks, levels=levels, beaten_s=beaten_s, quick=quick
            )

        found = solution(inner)
        asked = self.settings.pins.zero
        if not asked or "dp" in pins.degrees or self.keeps(found, asked):
            return found
        degrees = {**pins.degrees, "dp": stage.size // math.prod(pins.degrees.values())}
        found = solution(replace(inner, pins=replace(pins, degrees=degrees)))
        if not self.keeps(found, asked):
            raise PlanError(
                f"pin zero={asked}: with {shape.stages} stages on {self.topology} most parameters cannot be sharded "
                "over data axes; pin dp=2 or more, or leave out the pin"
            )
        return found

    def keeps(self, found: Found, zero: int) -> bool:
        """Are most parameters gathered?"""
        decisions = decide(found.built, found.solution.options, self.sinks)
        return zero_level(decisions, self.analysis, zero) == zero

    def scheduled(self, found: Found, settings: Settings, shape: Shape) -> Cut:
        inside = stage_inside(self.analysis, found, settings, self.topology, self.sinks)
        best: Cut | None = None
        refusal: AutoparError | None = None
        for name, virtual in self.schedules(shape.stages, found.loss_chunks):
            try:
                tried = cut(inside, name, virtual)
            except (InfeasibleError, PlanError) as error:
                refusal = refusal or error
                continue
            if best is None or tried.step_s < best.step_s * (1 - SIMPLER):
                best = tried
        if best is None:
            assert refusal is not None
            raise refusal
        return best


def nearer(known: AutoparError | None, error: AutoparError) -> AutoparError:
    """The error to show: the first, or that of the shape that lacks the fewest bytes."""
    missing = getattr(known, "missing_bytes", 0.0), getattr(error, "missing_bytes", 0.0)
    return error if known is None or 0 < missing[1] < missing[0] else known
