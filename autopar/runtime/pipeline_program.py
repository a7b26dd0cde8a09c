"""The stages of one micro-batch as data: what each computes, receives, sends and gives.

Enters: nothing; the stage pass makes these, the executor reads them. A stage's function takes the values of `sources`,
then those of `cuts`, then those of `receives`, and gives those of `sends`, then those of `sinks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from autopar.layout import Placement
from autopar.program import Program, Source


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses from one stage to another, as it lies on one rank. grad: its gradient travels back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


class CutValues(Protocol):
    """What is this micro-batch's alone among the inputs: slices, keys of random numbers. Run op by op before the stage,
    so that the stages of all micro-batches of one size are one program.

    paths: the sources that `run` takes; it gives a value for each of the stage's placeholders "cut".
    """

    @property
    def paths(self) -> tuple[str, ...]: ...

    @property
    def run(self) -> Callable[..., tuple[Any, ...]]: ...


@dataclass(frozen=True, eq=False)
class Cuts:
    """Such cuts as a graph."""

    paths: tuple[str, ...]
    graph: Graph

    @cached_property
    def run(self) -> GraphModule:
        return GraphModule(nn.Module(), self.graph)


@dataclass(frozen=True, eq=False)
class StageValues:
    """What one stage takes and gives in one micro-batch.

    Fields:  sources: parameters, buffers, constants and inputs it reads. receives: (stage, value) pairs. sends: values
             with the stages that read them. sinks: indices of the model's outputs that it gives; shapes: of them. cuts:
             what is cut for it before it runs.
    """

    index: int
    sources: tuple[Source, ...]
    receives: tuple[tuple[int, Value], ...]
    sends: tuple[tuple[Value, tuple[int, ...]], ...]
    sinks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    cuts: CutValues | None

    def values_to(self, stage: int) -> tuple[Value, ...]:
        return tuple(v for v, readers in self.sends if stage in readers)

    def values_from(self, stage: int) -> tuple[Value, ...]:
        return tuple(v for s, v in self.receives if s == stage)


@dataclass(frozen=True, eq=False)
class StageProgram(StageValues):
    """One stage of one micro-batch, and what it computes."""

    cuts: Cuts | None
    program: Program

    @property
    def function_key(self) -> tuple[int, str]:
        """Equal for those that one function computes."""
        shapes = [tuple(n.meta["val"].shape) for n in self.program.placeholders]  # the text does not tell them
        return self.index, f"{shapes} {self.program.graph}"


Stages = tuple[StageValues, ...] | Mapping[int, StageValues]
"""All stages of one micro-batch by number, those of other ranks included: both ends of a message read the same table.
Numbers are those of the schedule's table: a micro-batch of its second replica has the stages from `depth` on."""


def renumbered(stages: tuple[StageValues, ...], first: int) -> Stages:
    """The same stages counted from `first`: those of another replica."""
    return {
        first + stage.index: replace(
            stage,
            index=first + stage.index,
            receives=tuple((first + source, value) for source, value in stage.receives),
            sends=tuple((value, tuple(first + reader for reader in readers)) for value, readers in stage.sends),
        )
        for stage in stages
    }


@dataclass(frozen=True, eq=False)
class Result:
    """One output of the model.

    Fields:  stage: that gives it, counted in one replica. placement: how it lies on the micro-batches: P is summed, S
             is joined, I and R are the same in each. flat: sizes of the parts of one rank's value, all micro-batches
             joined. shape, dtype: of that value. grad: is it differentiable? shared: left where it lies, as a DTensor
             that is zero on the other pipeline ranks, so that nothing is sent unasked. wrap: makes a DTensor of it.
             buffer: a buffer's new value.
    """

    stage: int
    placement: Placement
    flat: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    shared: bool = False
    wrap: Callable[[torch.Tensor], Any] | None = None
    buffer: bool = False


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """All that one rank runs for one combination of inputs.

    Fields:  stages: by micro-batch. run: (stage, micro-batch) -> its function, for this rank's stages. results: by
             sink; constants: sinks that are no tensors; outputs: how many sinks there are. loss: the sink that a call
             differentiates, None where the loss is computed outside. reductions: by parameter, the moves that are made
             once for all micro-batches: (axis, from, to). owners: by parameter (or input that takes a gradient), the
             pipeline ranks whose stages read it. forward_only: in eval mode.
    """

    sources: tuple[Source, ...]
    stages: tuple[Stages, ...]
    run: Mapping[tuple[int, int], Callable[..., tuple[Any, ...]]]
    results: Mapping[int, Result]
    outputs: int
    loss: int | None
    reductions: Mapping[str, tuple[tuple[str, str, str], ...]]
    owners: Mapping[str, tuple[int, ...]]
    constants: Mapping[int, Any]
    forward_only: bool = False


@dataclass(frozen=True, eq=False)
class RankPart:
    """A rank's part of a pipeline as data. whole: its first micro-batch before the cut, stages: after it. program:
    without functions. here: by stage and micro-batch, what this rank runs."""

    whole: Program
    stages: tuple[StageProgram, ...]
    program: PipelineProgram
    here: Mapping[tuple[int, int], StageProgram]
