"""What an exported pipeline imports beside `exported`: its stages as data, and the function that runs them.

Enters: what each stage of each micro-batch takes and gives, the functions of this rank's stages, the schedule by name.
Leaves: a function of this rank's parameters and inputs, which runs the schedule as `runtime.pipeline` does.
Refused: a call outside `use_groups(groups())`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import PlanError
from autopar.layout import Placement
from autopar.program import Source
from autopar.runtime.moves import groups_in_use
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.pipeline_asynchronous import AsynchronousPipeline, pipeline_of
from autopar.runtime.pipeline_program import PipelineProgram, Result, StageValues, Value
from autopar.runtime.process_mesh import Line
from autopar.runtime.transfer import AxisGroup
from autopar.schedule.build import build


@dataclass(frozen=True, eq=False)
class Cut:
    """What one micro-batch alone takes of its inputs. paths: the sources that `run` takes."""

    paths: tuple[str, ...]
    run: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Here:
    """One stage that this rank runs for one micro-batch."""

    function: Callable[..., tuple[Any, ...]]
    cut: Cut | None = None


def stage(
    index: int,
    reads: Sequence[str],
    receives: Sequence[tuple[int, Value]],
    sends: Sequence[tuple[Value, tuple[int, ...]]],
    gives: Mapping[int, tuple[int, ...]],
) -> StageValues:
    """reads: parameters, buffers, constants and inputs. receives: with the stage that makes each. sends: with the
    stages that read each. gives: outputs of the model, with their shapes here."""
    sources = tuple(Source("", "", path) for path in reads)
    return StageValues(index, sources, tuple(receives), tuple(sends), tuple(gives), tuple(gives.values()), None)


def output(
    stage: int,
    over_microbatches: str,
    flat: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: bool,
    buffer: bool = False,
) -> Result:
    """One output of the model. over_microbatches: "P": their values are added up, "S<part>": joined along that one of
    the parts whose sizes are `flat`, "I", "R": the same in each. buffer: it is a new value of a buffer."""
    kind, part = over_microbatches[0], over_microbatches[1:]
    return Result(stage, Placement(kind, int(part) if part else -1), flat, shape, dtype, grad, buffer=buffer)


@dataclass(eq=False)
class Pipelined:
    """The whole program of a rank.

    Fields:  schedule: name, ranks, stages a rank, micro-batches. axes: all; axis: the pipeline's, none on one rank.
             lines: the ranks that hold it, for each place on the other axes. rank: this one. sources: parameters,
             buffers and constants, then inputs. microbatches: the stages of each, by number. here: by stage and
             micro-batch. The others: see `PipelineProgram`.
    """

    schedule: tuple[str, int, int, int]
    axes: Sequence[str]
    axis: str
    lines: Sequence[Sequence[int]]
    rank: int
    sources: Sequence[str]
    inputs: Sequence[str]
    microbatches: Sequence[Mapping[int, StageValues]]
    here: Mapping[tuple[int, int], Here]
    results: Mapping[int, Result]
    outputs: int
    constants: Mapping[int, Any]
    loss: int | None
    reductions: Mapping[str, tuple[tuple[str, str, str], ...]]
    owners: Mapping[str, tuple[int, ...]]
    forward_only: bool
    run: Pipeline | None = field(default=None, init=False)
    groups: Mapping[str, AxisGroup] = field(default_factory=dict, init=False)
    """With which `run` was connected."""

    def __call__(self, parameters: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """This rank's part of each output. parameters: those that its stages read, by name, buffers and constants."""
        groups = groups_in_use()
        missing = [axis for axis in self.axes if axis not in groups]
        if missing:
            raise PlanError("an exported pipeline runs under `use_groups(groups())`: call `forward` inside it")
        if self.run is None or any(groups[a] is not self.groups[a] for a in self.axes):
            if isinstance(self.run, AsynchronousPipeline):
                raise PlanError("an asynchronous pipeline still runs earlier calls, which had other groups")
            self.run, self.groups = self.connected(groups), groups
        return self.run(*(parameters.get(path) for path in self.sources), *inputs)

    def connected(self, groups: Mapping[str, AxisGroup]) -> Pipeline:
        """The pipeline on these groups."""
        line = None
        if self.axis:
            group = groups[self.axis].group
            assert isinstance(group, dist.ProcessGroup)
            ranks = next(tuple(line) for line in self.lines if self.rank in line)
            line = Line(ranks.index(self.rank), ranks, group, None)  # type: ignore[arg-type]  # no DTensor is made
        stages = [{i: self.with_cut(s, k) for i, s in of.items()} for k, of in enumerate(self.microbatches)]
        program = PipelineProgram(
            sources=tuple(Source("", "", path) for path in (*self.sources, *self.inputs)),
            stages=tuple(stages),
            run={at: stage.function for at, stage in self.here.items()},
            results=self.results,
            outputs=self.outputs,
            loss=self.loss,
            reductions=self.reductions,
            owners=self.owners,
            constants=self.constants,
            forward_only=self.forward_only,
        )
        return pipeline_of(program, build(*self.schedule), groups, line)

    def with_cut(self, stage: StageValues, microbatch: int) -> StageValues:
        here = self.here.get((stage.index, microbatch))
        return stage if here is None or here.cut is None else replace(stage, cuts=here.cut)
