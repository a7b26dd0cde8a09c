"""From decisions and a plan to a pipeline: the program of every micro-batch, cut into stages, ready to run.

    shard (micro-batches as the outermost axis) -> microbatch -> stage -> [this rank's stages] -> run

Enters: an analysis with decisions for the axes inside a stage, a plan with stages and a schedule. Leaves: a `Lowered`
whose function runs the schedule. Micro-batches whose programs are equal share them. Refused: what `divide` and `Stage`
refuse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from autopar.compiled import Compiled
from autopar.cost.hardware import Profile
from autopar.dump import Dump
from autopar.layout import I, Layout, Parts, S, local_parts
from autopar.mesh import LogicalMesh
from autopar.outputs import loss_of
from autopar.passes.cast import Cast
from autopar.passes.check import check_layouts
from autopar.passes.microbatch import Divided, Microbatch, divide, with_microbatches
from autopar.passes.shard import Shard
from autopar.passes.stage import Stage, between, once_for_all
from autopar.pipeline import Prepared, on_device
from autopar.plan import Plan
from autopar.program import Program
from autopar.rules.analyse import value_of
from autopar.rules.decisions import Decisions
from autopar.runtime.module import Lowered
from autopar.runtime.parameters import as_dtensor
from autopar.runtime.pipeline_asynchronous import pipeline_of
from autopar.runtime.pipeline_program import PipelineProgram, RankPart, Result, StageProgram, Stages, renumbered
from autopar.runtime.process_mesh import ProcessMesh
from autopar.schedule.build import build
from autopar.solver.stages import stage_of_ops


def is_staged(plan: Plan) -> bool:
    """Does this plan run in micro-batches or stages?"""
    return plan.degrees["pp"] > 1 or plan.microbatches > 1 or len(plan.stages) > 1


@dataclass(frozen=True, eq=False)
class Staging:
    """What does not depend on the inputs: the plan, this rank's place, the backend."""

    plan: Plan
    inner: LogicalMesh
    profile: Profile
    mesh: ProcessMesh
    backend: str = "eager"
    gather: bool = False
    """outputs="gather" or "shard": every output is differentiable."""
    kernels: str = "auto"
    cast: Cast | None = None
    """Reads stored parameters in another dtype; gradients of micro-batches are added up in the stored one."""


def lower_stages(
    staging: Staging,
    prepared: Prepared,
    decisions: Decisions,
    batch: frozenset[int],
    *,
    recompute: Mapping[str, str] | None = None,
    dump: Dump | None = None,
) -> Lowered:
    """The pipeline of this rank. batch: classes of parts that are the batch. recompute: level by block."""
    return _Builder(staging, prepared, decisions, batch, recompute or {}, dump).build()


def cut_stages(staging: Staging, prepared: Prepared, decisions: Decisions, batch: frozenset[int]) -> RankPart:
    """The same pipeline for a rank that does not run it: nothing is made ready."""
    return _Builder(staging, prepared, decisions, batch, {}, None).cut_all()


def owners_of(plan: Plan, prepared: Prepared) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter: those whose stages read it; the first one where none does."""
    schedule = build(plan.schedule, plan.degrees["pp"], plan.virtual_stages, plan.microbatches)
    stage_of = stage_of_ops(plan, prepared.program)
    cut = Stage(stage_of, len(plan.stages)).run(prepared.program)
    found: dict[str, set[int]] = {s.path: set() for s in prepared.program.sources if s.kind == "parameter"}
    for stage in cut:
        for source in stage.sources:
            if source.kind == "parameter":
                found[source.path].update(schedule.ranks_of(stage.index))
    return {path: tuple(sorted(ranks)) or (0,) for path, ranks in found.items()}


class _Builder:
    def __init__(
        self,
        staging: Staging,
        prepared: Prepared,
        decisions: Decisions,
        batch: frozenset[int],
        recompute: Mapping[str, str],
        dump: Dump | None,
    ) -> None:
        self.staging, self.prepared, self.recompute, self.dump = staging, prepared, recompute, dump
        self.analysis, self.plan = prepared.analysis, staging.plan
        self.count = self.plan.microbatches
        self.schedule = build(self.plan.schedule, self.plan.degrees["pp"], self.plan.virtual_stages, self.count)
        self.mesh = with_microbatches(staging.inner, self.count)
        self.divided = divide(self.analysis, decisions, staging.inner, batch, self.count)
        self.wraps: dict[int, tuple[Parts, Layout]] = {}
        self.decisions = replace(self.divided.decisions, outputs=dict(self.divided.decisions.outputs))
        self.place_outputs(self.divided)
        self.stage_of = stage_of_ops(self.plan, prepared.program)
        self.reductions: dict[str, Any] | None = None
        self.functions: dict[tuple[int, str], Callable[..., Any]] = {}

    def build(self) -> Lowered:
        found = self.cut_all()
        program = replace(found.program, run={at: self.function(stage) for at, stage in found.here.items()})
        if self.dump is not None:
            for stage in found.stages:
                self.dump.write("stage", stage.program)
        sinks = {i: (*self.wraps[i], "plain") for i in program.results}
        mesh = self.staging.mesh
        return Lowered(found.whole, pipeline_of(program, self.schedule, mesh.groups, mesh.line), sinks)

    def cut_all(self) -> RankPart:
        first = self.local(0)
        known: dict[int, tuple[StageProgram, ...]] = {0: self.cut(first)}
        known[self.count - 1] = self.cut(self.local(self.count - 1))
        known |= self.middle(1, self.count - 2)
        cut = [known[k] if k in known else self.cut(self.local(k)) for k in range(self.count)]
        stages: tuple[Stages, ...] = tuple(cut)
        if self.schedule.replicas > 1:
            moved = {id(s): {path: renumbered(s, path) for path in self.firsts} for s in cut}
            stages = tuple(moved[id(s)][self.schedule.path(k)[0]] for k, s in enumerate(cut))
        program = PipelineProgram(
            sources=first.sources,
            stages=stages,
            run={},
            results=self.results(cut[0]),
            outputs=len(first.sinks),
            constants=self.constants(first),
            loss=None if self.staging.gather else loss_of(self.prepared.program, self.analysis.grads),
            reductions=self.reductions or {},
            owners=self.owners(cut[0]),
            forward_only=not first.training,
        )
        here = {
            (s, k): cut[k][i]
            for k in range(self.count)
            for i, s in enumerate(self.schedule.path(k))
            if self.schedule.placement[s] == self.rank
        }
        return RankPart(first, cut[0], program, here)

    def middle(self, first: int, last: int) -> dict[int, tuple[StageProgram, ...]]:
        """The micro-batches from one to another, all of one size: most are read off the two, where that can be done."""
        if last - first < 2:
            return {}
        ends = [self.cut(self.local(k)) for k in (first, last)]
        found = {first: ends[0], last: ends[1]}
        for k in range(first + 1, last):
            share = Fraction(k - first, last - first)
            inside = [between(a, b, share) for a, b in zip(*ends, strict=True)]
            known = tuple(stage for stage in inside if stage is not None)
            if len(known) < len(inside):
                break
            found[k] = known
        return found

    @property
    def rank(self) -> int:
        line = self.staging.mesh.line
        return line.index if line is not None else 0

    def local(self, microbatch: int) -> Program:
        """The whole program of this rank's shards, for one micro-batch."""
        at = (microbatch, *self.staging.mesh.coordinate)
        program = Shard(self.analysis, self.decisions, self.mesh, self.staging.profile, at).run(self.prepared.program)
        check_layouts(program, self.analysis, self.mesh, at, partial=1)
        program, reductions = once_for_all(Microbatch(self.count, microbatch).run(program))
        assert self.reductions in (None, reductions), "micro-batches reduce different parameters"
        self.reductions = reductions
        return replace(program, graph=on_device(program.graph, self.staging.mesh.device))

    @property
    def firsts(self) -> range:
        """The first stage of each replica."""
        return range(0, self.schedule.stages, self.schedule.depth)

    def cut(self, program: Program) -> tuple[StageProgram, ...]:
        stages = Stage(self.stage_of, len(self.plan.stages)).run(program)
        cast = self.staging.cast
        return stages if cast is None else tuple(replace(s, program=cast.run(s.program)) for s in stages)

    def function(self, stage: StageProgram) -> Callable[..., Any]:
        key = stage.function_key
        if key not in self.functions:
            module = GraphModule(nn.Module(), stage.program.graph)
            staging, program = self.staging, stage.program
            self.functions[key] = (
                module
                if staging.backend == "eager"
                else Compiled(
                    module, program, self.recompute, self.dump, staging.kernels, staging.backend, self.schedule.splits,
                    self.plan.loss_chunks,
                )
            )  # fmt: skip
        return self.functions[key]

    # outputs

    def place_outputs(self, divided: Divided) -> None:
        """Where a micro-batch's part of an output lies on the real axes, and what the joined one is called.

        Joined rows of one rank are in the order (micro-batch, shard). Where all are of one size that is a strided
        shard; otherwise the output is gathered over the axes that cut the batch.
        """
        inner = self.staging.inner
        for i, value in self.sinks():
            parts, (on_axis, *layout) = self.analysis.parts[value], self.decisions.outputs[i]
            if on_axis.kind == "S" and any(p == on_axis for p in layout):
                ranks = math.prod(n for n, p in zip(inner.sizes, layout, strict=True) if p == on_axis)
                size = parts.flat[on_axis.part]
                if size % (self.count * ranks) == 0:
                    self.wraps[i] = _divided_part(parts, tuple(layout), on_axis.part, self.count)
                    continue
                layout = [I if p == on_axis else p for p in layout]
                self.decisions.outputs[i] = (on_axis, *layout)  # type: ignore[index]
            self.wraps[i] = (parts, tuple(layout))

    def sinks(self) -> list[tuple[int, str]]:
        leaves = pytree.tree_leaves(self.prepared.program.output.args[0])
        return [(i, value_of(leaf)) for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]

    def constants(self, program: Program) -> dict[int, Any]:
        leaves = list(pytree.tree_leaves(self.prepared.program.output.args[0]))
        return {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Node)}

    def results(self, stages: tuple[StageProgram, ...]) -> dict[int, Result]:
        stage_of = {sink: stage.index for stage in stages for sink in stage.sinks}
        loss = None if self.staging.gather else loss_of(self.prepared.program, self.analysis.grads)
        found = {}
        for i, value in self.sinks():
            parts, layout = self.analysis.parts[value], self.decisions.outputs[i][1:]
            local = local_parts(parts, layout, self.staging.inner.sizes, self.staging.mesh.coordinate)
            left = self.prepared.kinds[i] == "shard" and self.staging.mesh.device_mesh is not None
            grad = self.analysis.grads[value] and self.prepared.program.sinks[i].kind == "user"
            dtype = self.analysis.dtypes[value]
            found[i] = Result(
                stage=stage_of[i],
                placement=self.divided.sinks[i],
                flat=local.flat,
                shape=local.shape,
                dtype=dtype,
                grad=grad,
                shared=left and loss is not None and dtype != torch.bool,
                wrap=self.wrap(i) if left else None,
                buffer=self.prepared.program.sinks[i].kind == "state",
            )
        return found

    def wrap(self, sink: int) -> Callable[[torch.Tensor], Any]:
        parts, layout = self.wraps[sink]
        return lambda value: as_dtensor(value, parts, layout, self.staging.mesh)

    def owners(self, stages: tuple[StageProgram, ...]) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for stage, source in ((at, s) for at in stages for s in at.sources):
            if source.kind == "parameter":
                found.setdefault(source.path, set()).update(self.schedule.ranks_of(stage.index))
        everywhere = tuple(range(self.schedule.ranks))
        inputs = {
            s.path: everywhere
            for s in self.prepared.program.sources
            if s.kind == "input" and self.analysis.grads[s.node]
        }
        return {path: tuple(sorted(ranks)) for path, ranks in found.items()} | inputs


def _divided_part(parts: Parts, layout: Layout, part: int, count: int) -> tuple[Parts, Layout]:
    """The same dims with `part` seen as (count, rest), of which the layout cuts the rest."""
    dims, at = [], 0
    for dim in parts.dims:
        sizes = [(count, n // count) if at + j == part else (n,) for j, n in enumerate(dim)]
        dims.append(tuple(itertools.chain(*sizes)))
        at += len(dim)
    moved = tuple(S(p.part + (p.part >= part)) if p.kind == "S" else p for p in layout)
    return Parts(tuple(dims)), moved
