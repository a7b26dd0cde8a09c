"""Asynchronous pipelines at run time: calls overlap, no rank waits for a call to be over everywhere.

Enters: as `Pipeline`, with an asynchronous schedule. Leaves: the same, but gradients and loss come some calls late.
Refused, with a `PlanError`: a loss computed outside the model.

The loop is the user's own: a call feeds one mini-batch (m micro-batches), `loss.backward()` hands over gradients,
`opt.step()` makes the next version of the weights. Count calls from 0 and name weights by the calls before: call c
finds version c. On stage s of p:

    forward of micro-batch j of call c     version c, as the call finds it; kept until the last backward of that call
    its backward                           runs in call c + (j + p - 1 - s) // m, with version c, the forward's
    its gradient is handed over            async-1f1b: by the `backward()` of the call that runs its backward
                                           2bw: by that of call c + 1, on every stage
    so it is applied to version            async-1f1b: c + (j + p - 1 - s) // m; 2bw: c + 1

The difference is its staleness (`schedule.asynchronous.staleness`); the last stage of async-1f1b has none where m >= p.
A gradient is that of one version on all stages, of which the early stages hear later than the late ones. The first
calls hand over what there is: a part of a mini-batch, or nothing (`.grad` stays None). What is in flight when training
ends is dropped.

The loss of a call is that of the newest mini-batch whose backwards are over on all stages: of call c - d, where d is
the largest staleness, and of call 0 in the first d calls. With it come the other outputs that every rank gets; what
lies on its stage is this call's. In eval mode, and without gradients, a call runs with the newest weights and gives
its own loss.

Gradients are scaled by the gradient that the loss gets in the call that hands them over: `(loss / k).backward()` with a
constant k, and GradScaler, do what they do elsewhere.
Source: Narayanan et al. 2019 (PipeDream), section 3.3; Narayanan et al. 2021 (PipeDream-2BW), section 3.1.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from autopar.errors import PlanError
from autopar.runtime.pipeline import Call, Pipeline
from autopar.runtime.pipeline_program import PipelineProgram
from autopar.runtime.pipeline_results import join, owned
from autopar.runtime.pipeline_rounds import Event
from autopar.runtime.pipeline_step import Step
from autopar.runtime.process_mesh import Line
from autopar.runtime.transfer import AxisGroup
from autopar.schedule.asynchronous import staleness
from autopar.schedule.table import Row, Schedule


@dataclass(eq=False)
class Version:
    """The values that one call found, with the gradients that gathered in them, and the seed of its backwards."""

    leaves: dict[str, torch.Tensor]
    seeded: float


class Flight(Step):
    """What is on its way between calls: micro-batches, messages, versions. The newest call's are numbered from 0, those
    before it -1, -2, ..."""

    versions: list[Version]

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.program, pipeline.line, pipeline.schedule.placement, {}, keep=True)
        self.versions = []
        self.sent_before = 0

    def settle(self) -> None:
        """Wait for what was sent before this call; its own sends may take until the end of the next one."""
        for work, _ in self.sending[: self.sent_before]:
            self.wait(work, "its own sends of an earlier call")
        del self.sending[: self.sent_before]
        self.sent_before = len(self.sending)

    def begin(self, version: Version) -> None:
        """Another call: all that is in flight gets a number that is lower by a call's micro-batches."""
        count = len(self.program.stages)
        self.held = {(stage, k - count): held for (stage, k), held in self.held.items()}
        self.inbox = {replace(m, microbatch=m.microbatch - count): v for m, v in self.inbox.items()}
        self.pending = {replace(m, microbatch=m.microbatch - count): v for m, v in self.pending.items()}
        self.versions.append(version)
        self.leaves = version.leaves
        self.device = next((v.device for v in version.leaves.values()), self.device)

    def version(self, k: int) -> Version:
        return self.versions[k // len(self.program.stages) - 1]

    def leaves_of(self, k: int) -> Mapping[str, torch.Tensor]:
        return self.version(k).leaves


class AsynchronousPipeline(Pipeline):
    """Runs a `PipelineProgram` under an asynchronous schedule."""

    def __init__(
        self, program: PipelineProgram, schedule: Schedule, groups: Mapping[str, AxisGroup], line: Line | None
    ) -> None:
        if program.loss is None:
            raise PlanError(
                f"schedule {schedule.name}: the loss is computed outside the model, but an asynchronous pipeline runs "
                "its backwards inside the call; return the loss from the model (autopar.with_loss), with outputs='auto'"
            )
        super().__init__(program, schedule, groups, line)
        self.flight = Flight(self)
        self.calls = 0
        self.lag = -(int(schedule.rows[self.rank].codes[:, 2].min()) // schedule.microbatches)
        """In how many later calls this rank still runs backwards of a call."""
        self.together = schedule.name == "2bw"
        """Are the gradients of a call handed over together, a call later?"""
        self.delay = max(staleness(schedule, 0, j) for j in range(schedule.microbatches))
        self.losses: list[tuple[dict[int, torch.Tensor], list[Any]]] = []
        """Outputs of the last calls that every rank gets, and the sends that bring them."""
        self._known: dict[int, tuple[Event, ...]] = {}
        weakref.finalize(self, _wait, self.losses, self.flight.sending)  # other ranks must find this one alive

    def call(self, held: Mapping[str, torch.Tensor], paths: Sequence[str], training: bool) -> Call:
        return (AsynchronousCall if training else Call)(self, held, paths, training)

    def next_events(self) -> tuple[Event, ...]:
        """Those of the call that begins: backwards of calls that never were are left out."""
        m = self.schedule.microbatches
        before = min(self.calls, self.schedule.depth)
        if before not in self._known:
            rows = tuple(Row(row.codes[row.codes[:, 2] >= -before * m]) for row in self.schedule.rows)
            self._known[before] = self.events(replace(self.schedule, rows=rows))
        return self._known[before]


class AsynchronousCall(Call):
    """One call in training."""

    pipeline: AsynchronousPipeline
    step: Flight

    def make_leaves(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies, where a later call runs backwards of this one: the optimizer writes into the parameters."""
        leaves = super().make_leaves(held)
        if not self.pipeline.lag:
            return leaves
        return {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in leaves.items()}

    def make_step(self) -> Step:
        self.pipeline.flight.begin(Version(self.leaves, self.pipeline.last_gradient))
        return self.pipeline.flight

    def forward(self) -> dict[int, torch.Tensor]:
        pipeline, program, step = self.pipeline, self.pipeline.program, self.step
        self.seeded = step.versions[-1].seeded
        loss = cast(int, program.loss)
        dtype, count = program.results[loss].dtype, pipeline.schedule.microbatches

        def seed(sink: int, k: int) -> torch.Tensor | None:
            if sink != loss or not self.differentiated(sink, k % count):
                return None
            return torch.tensor(step.version(k).seeded, dtype=dtype, device=step.device)

        with torch.enable_grad():
            step.run(pipeline.next_events(), seed)
        self.finish()
        keep = max(pipeline.lag, int(pipeline.together))
        del step.versions[: max(0, len(step.versions) - keep)]
        pipeline.calls += 1
        results = {sink: self.joined(sink) for sink, r in program.results.items() if r.shared or r.buffer}
        results |= self.delayed({sink for sink in program.results if sink not in results})
        step.results.clear()
        return dict(sorted(results.items()))

    def collect(self) -> None:
        """What is handed over by this call, as if all of it had begun with this call's seed."""
        versions = self.step.versions
        for version in versions[:-1] if self.pipeline.together else versions:
            for path in self.paths:
                leaf = version.leaves[path]
                gradient, leaf.grad = leaf.grad, None
                if gradient is None:
                    continue
                if version.seeded != self.seeded:
                    gradient = gradient * (self.seeded / version.seeded)
                before = self.grads.get(path)
                self.grads[path] = gradient if before is None else before + gradient

    def finish(self) -> None:
        if self.pipeline.together and len(self.step.versions) < 2:
            return  # the first call hands nothing over
        super().finish()

    def delayed(self, sinks: set[int]) -> dict[int, torch.Tensor]:
        """Send this call's values of outputs that every rank gets; give those that come due."""
        pipeline = self.pipeline
        schedule, line = pipeline.schedule, pipeline.line
        values: dict[int, torch.Tensor] = {}
        works = []
        for sink in sorted(sinks):
            result, parts = pipeline.program.results[sink], self.step.results.get(sink, {})
            if line is None or len(line.ranks) == 1:
                values[sink] = join(result, parts)
                continue
            values[sink] = packed = owned(result, parts, self.step)
            source = line.ranks[schedule.placement[result.stage]]
            if packed.numel():
                works.append(dist.broadcast(packed, source, group=line.group, async_op=True))
        pipeline.losses.append((values, works))
        due, works = pipeline.losses[0]
        for work in works:
            self.step.wait(work, "the outputs of an earlier call")
        works.clear()
        if pipeline.calls > pipeline.delay:
            del pipeline.losses[0]
        return {sink: value.to(pipeline.program.results[sink].dtype, copy=True) for sink, value in due.items()}


def _wait(losses: list[tuple[dict[int, torch.Tensor], list[Any]]], sending: list[tuple[Any, torch.Tensor]]) -> None:
    for work in [w for _, works in losses for w in works] + [w for w, _ in sending]:
        with contextlib.suppress(RuntimeError):  # a rank that is gone waits for nothing
            work.wait()


def pipeline_of(
    program: PipelineProgram, schedule: Schedule, groups: Mapping[str, AxisGroup], line: Line | None
) -> Pipeline:
    """What runs a program under a schedule of either kind. Raises: PlanError: as `AsynchronousPipeline`."""
    kind = AsynchronousPipeline if schedule.asynchronous else Pipeline
    return kind(program, schedule, groups, line)
