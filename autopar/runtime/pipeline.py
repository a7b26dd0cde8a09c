"""A pipeline as a function of this rank's values: the whole schedule runs inside the call.

Enters: the values of all sources (None for parameters of other ranks), under grad mode or not. Leaves: a value for each
sink, on every rank. Refused: a backward through an output that the call did not differentiate.

With a loss, a call in training runs all forwards and backwards of the schedule and keeps the gradients; `backward()` of
the loss scales them by the gradient it gets and hands them over, so a parameter without `.grad` gets them uncopied. The
schedule is seeded with the last such gradient, so that loss scaling works below float32. Without one (the loss is
computed outside), a call runs all forwards and keeps every micro-batch; the backwards run in `backward()`. In eval mode
with a loss, and without gradients, only forwards run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.errors import PlanError
from autopar.layout import chunk
from autopar.runtime.pipeline_program import PipelineProgram, Result
from autopar.runtime.pipeline_results import joined
from autopar.runtime.pipeline_rounds import Event, events
from autopar.runtime.pipeline_step import Step
from autopar.runtime.process_mesh import Line
from autopar.runtime.transfer import AxisGroup, gradient_of, transfer
from autopar.schedule.table import Schedule


class Pipeline:
    """Runs a `PipelineProgram` under a schedule; called like any local program."""

    def __init__(
        self, program: PipelineProgram, schedule: Schedule, groups: Mapping[str, AxisGroup], line: Line | None
    ) -> None:
        """groups: of the axes inside a stage. line: of this rank; None where there is one stage."""
        self.program, self.schedule, self.groups, self.line = program, schedule, groups, line
        self.last_gradient = 1.0
        """The last one that the loss got; the next schedule begins with it."""
        self.most_in_flight = 0
        """Micro-batches of one stage whose backward had not run, at most, in the last call."""

    @property
    def rank(self) -> int:
        return self.line.index if self.line is not None else 0

    @cached_property
    def training_events(self) -> tuple[Event, ...]:
        return self.events(self.schedule)

    @cached_property
    def forward_events(self) -> tuple[Event, ...]:
        return self.events(self.schedule.forward_only())

    @cached_property
    def backward_events(self) -> tuple[Event, ...]:
        """The backwards alone, in the schedule's order."""
        found = []
        for event in self.events(self.schedule.forwards_first()):
            messages = tuple(m for m in event.messages if m.kind == "B")
            if messages or (event.action is not None and event.action.work != "F"):
                found.append(Event(event.action, messages))
        return tuple(found)

    def events(self, schedule: Schedule) -> tuple[Event, ...]:
        return events(schedule, self.edges, self.rank)

    def edges(self, microbatch: int) -> list[tuple[int, int, bool]]:
        found: dict[tuple[int, int], bool] = {}
        stages = self.program.stages[microbatch % len(self.program.stages)]
        for stage in (stages[s] for s in self.schedule.path(microbatch)):
            for source, value in stage.receives:
                found[source, stage.index] = found.get((source, stage.index), False) or value.grad
        return [(a, b, grad) for (a, b), grad in sorted(found.items())]

    # calls

    def __call__(self, *values: torch.Tensor | None) -> tuple[Any, ...]:
        held = {s.path: v for s, v in zip(self.program.sources, values, strict=True) if v is not None}
        held = {k: self.reduced(k, v) for k, v in held.items()}
        outside = self.program.loss is None
        training = torch.is_grad_enabled() and (outside or not self.program.forward_only)
        paths = [k for k, v in held.items() if training and v.requires_grad]
        anchor = torch.zeros((), requires_grad=True)  # a rank without parameters gives a differentiable loss, too
        call = self.call(held, paths, training)
        if not training:
            return self.wrapped(call.forward())
        outputs = _Run.apply(call, anchor, *(held[k] for k in paths))  # type: ignore[no-untyped-call]  # torch's
        return self.wrapped(dict(zip(sorted(self.program.results), outputs, strict=True)))

    def call(self, held: Mapping[str, torch.Tensor], paths: Sequence[str], training: bool) -> Call:
        return Call(self, held, paths, training)

    def reduced(self, path: str, value: torch.Tensor) -> torch.Tensor:
        """The value as the stages read it; the gradient of all micro-batches together is reduced once."""
        moves = self.program.reductions.get(path, ())
        if not moves or not value.requires_grad:
            return value
        reduced: torch.Tensor = _Reduce.apply(value, self.groups, moves)  # type: ignore[no-untyped-call]  # torch's
        return reduced

    def wrapped(self, results: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
        results = {i: self.wrap(self.program.results[i], value) for i, value in results.items()}
        return tuple(results.get(i, self.program.constants.get(i)) for i in range(self.program.outputs))

    def wrap(self, result: Result, value: torch.Tensor) -> Any:
        if result.wrap is None:
            return value
        local = result.wrap(value)
        if self.line is None or not isinstance(local, DTensor):
            return local
        here = Partial() if result.shared else Replicate()
        return DTensor.from_local(
            value,
            self.line.device_mesh,
            (*local.placements, here),
            run_check=False,
            shape=local.shape,
            stride=local.stride(),
        )


class Call:
    """One call: the step that runs it, and what `backward` still has to do."""

    def __init__(
        self, pipeline: Pipeline, held: Mapping[str, torch.Tensor], paths: Sequence[str], training: bool
    ) -> None:
        self.pipeline, self.paths, self.training = pipeline, paths, training
        self.leaves = self.make_leaves(held)
        self.step = self.make_step()
        self.seeded = 1.0
        self.grads: dict[str, torch.Tensor | None] = {}
        """By path, once the backwards have run."""

    def make_leaves(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = set(self.paths)
        return {k: v.detach().requires_grad_(k in wanted) for k, v in held.items()}

    def make_step(self) -> Step:
        pipeline = self.pipeline
        return Step(pipeline.program, pipeline.line, pipeline.schedule.placement, self.leaves, keep=self.training)

    def forward(self) -> dict[int, torch.Tensor]:
        pipeline, program = self.pipeline, self.pipeline.program
        if not self.training or program.loss is None:
            with torch.set_grad_enabled(self.training):
                self.step.run(pipeline.forward_events)
        else:
            self.seeded = pipeline.last_gradient
            seed = torch.tensor(self.seeded, dtype=program.results[program.loss].dtype, device=self.step.device)
            with torch.enable_grad():
                self.step.run(
                    pipeline.training_events,
                    lambda sink, k: seed if sink == program.loss and self.differentiated(sink, k) else None,
                )
            self.finish()
        results = {sink: self.joined(sink) for sink in sorted(program.results)}
        self.step.results.clear()
        return results

    def differentiated(self, sink: int, microbatch: int) -> bool:
        """Does the gradient of this output begin in this micro-batch? What is the same in all has it in one."""
        return self.pipeline.program.results[sink].placement.kind in "PS" or microbatch == 0

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        program = self.pipeline.program
        given = dict(zip(sorted(program.results), grads, strict=True))
        if program.loss is None:
            with torch.enable_grad():
                self.step.run(self.pipeline.backward_events, lambda sink, k: self.share_of(sink, k, given[sink]))
            self.finish()
            return self.taken()
        others = [i for i, g in given.items() if g is not None and i != program.loss]
        if others:
            raise PlanError(
                f"backward through output {others[0]} of a pipeline: with outputs='auto' a call differentiates the "
                "loss alone; pass outputs='gather' to autopar.parallelize (all forwards, then all backwards)"
            )
        gradient = given[program.loss]
        taken = self.taken()
        if gradient is None:
            return [None] * len(taken)
        scale = float(gradient)
        usable = math.isfinite(scale) and scale != 0
        if scale != self.seeded:
            for found in taken:
                if found is not None:
                    found.mul_(scale / self.seeded)
        self.pipeline.last_gradient = scale if usable else 1.0
        return taken

    def share_of(self, sink: int, k: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """One micro-batch's part of an output's gradient."""
        result = self.pipeline.program.results[sink]
        if gradient is None or not self.differentiated(sink, k):
            return None
        if result.placement.kind != "S":
            return gradient
        part = result.placement.part
        sizes = list(result.flat)
        first, length = chunk(sizes[part], self.pipeline.schedule.microbatches, k)
        cut = gradient.reshape(sizes).narrow(part, first, length)
        stage = self.step.stage(self.pipeline.schedule.path(k)[result.stage], k)
        return cut.reshape(stage.shapes[stage.sinks.index(sink)])

    def taken(self) -> list[torch.Tensor | None]:
        """The gradients of `paths`, which this object then forgets: `.grad` may take them over."""
        taken, self.grads = self.grads, {}
        return [taken.get(path) for path in self.paths]

    def collect(self) -> None:
        """Take the gradients from where they gathered."""
        for path in self.paths:
            leaf = self.leaves[path]
            self.grads[path], leaf.grad = leaf.grad, None

    def finish(self) -> None:
        """Collect the gradients, sum those of parameters that stages of several ranks share, let the step go."""
        pipeline = self.pipeline
        pipeline.most_in_flight = self.step.most_in_flight
        self.collect()
        line = pipeline.line
        for path, owners in sorted(pipeline.program.owners.items()):
            leaf = self.leaves.get(path)
            if line is None or len(owners) < 2 or line.index not in owners or leaf is None or not leaf.requires_grad:
                continue
            gradient = self.grads.get(path)
            mine = torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
            parts = {owner: mine if owner == line.index else torch.empty_like(mine) for owner in owners}
            operations = [
                dist.P2POp(op, mine if op is dist.isend else parts[owner], line.ranks[owner])
                for owner in owners
                if owner != line.index
                for op in (dist.isend, dist.irecv)
            ]
            works = self.step.guard(functools.partial(dist.batch_isend_irecv, operations), f"{path}'s gradient")
            for work in works:
                self.step.wait(work, f"the gradient of {path} on the other ranks that hold it")
            total = parts[owners[0]]  # in one order on all owners: the copies of the parameter stay equal
            for owner in owners[1:]:
                total = total + parts[owner]
            self.grads[path] = total

    def joined(self, sink: int) -> torch.Tensor:
        """All micro-batches of an output as one tensor, on every rank."""
        pipeline, result = self.pipeline, self.pipeline.program.results[sink]
        return joined(result, self.step.results.get(sink, {}), pipeline.schedule, pipeline.line, self.step)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = call.forward()
        program = call.pipeline.program
        ctx.mark_non_differentiable(*(v for i, v in results.items() if not program.results[i].grad))
        return tuple(results[i] for i in sorted(results))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        call, ctx.call = ctx.call, None
        if call is None:
            raise PlanError("a pipeline's gradients are handed over once: call the module again before backward()")
        return (None, None, *call.backward(grads))


class _Reduce(torch.autograd.Function):
    """Moves of a parameter that cost nothing forward."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, groups: Mapping[str, AxisGroup], moves: Sequence[tuple[str, str, str]]
    ) -> torch.Tensor:
        ctx.groups, ctx.moves = groups, moves
        ctx.set_materialize_grads(False)  # an asynchronous pipeline may have none yet, on no rank of the group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        gradient = grads[0]
        if gradient is None:
            return None, None, None
        for axis, source, target in reversed(ctx.moves):
            gradient = transfer(gradient, ctx.groups[axis], gradient_of(target), gradient_of(source), ())
        return gradient, None, None
