"""`autopar export`: the parallel program of a rank as a readable Python file.

Enters: a model, a mesh and planning arguments, as `plan` takes them. Leaves: the text of the file: the forward alone,
or both lowered graphs, with kernels; of a plan with pipeline stages or micro-batches all stages of the rank, and what
runs their schedule. Refused: see `export_text`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.api import _plan_of, _prepare
from autopar.assemble import levels_by_block, reduced_in
from autopar.codegen.python_pipeline import pipeline_text
from autopar.codegen.python_text import Traced, python_text
from autopar.errors import MeshError, UnsupportedOpError
from autopar.mesh import LogicalMesh, with_pipeline
from autopar.passes.cast import Cast
from autopar.passes.shard import Shard
from autopar.pipeline import Prepared, carry_out
from autopar.plan import Plan
from autopar.program import Program
from autopar.request import Request, make_request
from autopar.rules.decisions import Decisions
from autopar.runtime.pipeline_program import StageProgram
from autopar.runtime.process_mesh import Line, ProcessMesh
from autopar.schedule.build import build
from autopar.solver.search import Found
from autopar.staged import Staging, cut_stages, is_staged
from autopar.traced import trace


def export_text(
    model: nn.Module,
    mesh: Any,
    *,
    rank: int = 0,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | None = None,
    pin: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    precision: Any = None,
    optimizer: str | int = "adamw",
    backward: bool = False,
    kernels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> str:
    """The file of one rank; see `plan` for the other arguments.

    Args:    rank: whose program; ranks differ in what they cut and in the groups that they are in. backward: both
             lowered graphs instead of the forward alone, which autograd differentiates. kernels: "auto": with the
             backward, for GPUs, groups of ops are printed as Triton kernels; "on": for any device; "off".
    Raises:  what `plan` raises; MeshError: no such rank; UnsupportedOpError: an op that lives in this process only;
             what cannot be lowered here.
    """
    tell = progress or (lambda stage: None)
    request = make_request(mesh, pin, memory, precision, optimizer, "auto", None, "auto", False, False, None, kernels)
    if not 0 <= rank < request.topology.size:
        raise MeshError(f"rank {rank} is not in a mesh of {request.topology.size} devices")
    prepared = _prepare(model, example_args, example_kwargs, request, tell)
    chosen = _plan_of(prepared, request, plan, tell)
    found, decisions = carry_out(prepared, chosen, request.profile, request.settings)
    state = prepared.program.state
    stored = {s.path: state[s.path].dtype for s in prepared.program.sources if s.kind == "parameter"}
    reduce = reduced_in(request.precision, stored)
    cast = None if reduce is None else Cast(stored, reduce)
    device = "cpu" if request.topology.device == "cpu" else "cuda"
    lowering = _Lowering(
        levels_by_block(prepared.program, chosen),
        device,
        kernels == "on" or (kernels == "auto" and device != "cpu"),
        chosen.loss_chunks,
    )
    if backward:
        tell("lower")
    if is_staged(chosen):
        return _pipeline_text(
            prepared, chosen, request, found, decisions, rank, cast, device, lowering if backward else None
        )
    coordinate = found.mesh.coordinate(rank)
    program: Program = Shard(prepared.analysis, decisions, found.mesh, request.profile, coordinate).run(
        prepared.program
    )
    program = program if cast is None else cast.run(program)
    traced = lowering.run(program, found.mesh, coordinate) if backward else None
    return python_text(program, found.mesh, rank, device, traced)


@dataclass(frozen=True)
class _Lowering:
    """How graphs are lowered: see `trace`."""

    recompute: Mapping[str, str]
    device: str
    fused: bool
    loss_chunks: int

    def run(self, program: Program, mesh: LogicalMesh, coordinate: tuple[int, ...], split: bool = False) -> Traced:
        return trace(
            program,
            mesh,
            coordinate,
            recompute=self.recompute,
            device=self.device,
            fused=self.fused,
            loss_chunks=self.loss_chunks,
            split=split,
        )


def _pipeline_text(
    prepared: Prepared,
    chosen: Plan,
    request: Request,
    found: Found,
    decisions: Decisions,
    rank: int,
    cast: Cast | None,
    device: str,
    lowering: _Lowering | None,
) -> str:
    stages = chosen.degrees["pp"]
    logical = with_pipeline(found.mesh, request.topology, stages) if stages > 1 else found.mesh
    at = logical.coordinate(rank)
    line, inside = None, at
    if stages > 1:
        line, inside = Line(at[-1], logical.group(len(at) - 1, at), None, None), at[:-1]  # type: ignore[arg-type]  # not run here
    mesh = ProcessMesh(found.mesh, found.mesh.rank(inside), torch.device("cpu"), line=line)
    staging = Staging(chosen, found.mesh, request.profile, mesh, "eager", cast=cast)
    part = cut_stages(staging, prepared, decisions, found.built.roles.batch)
    if cast is not None:
        part = replace(part, whole=cast.run(part.whole))  # what is stored
    if lowering is not None and not any(s.trainable for stage in part.stages for s in stage.program.sources):
        raise UnsupportedOpError(f"{part.whole.name} has no parameter that takes a gradient: it has no backward graph")
    schedule = build(chosen.schedule, stages, chosen.virtual_stages, chosen.microbatches)

    def traced(stage: StageProgram) -> Traced | None:
        assert lowering is not None
        if not any(s.trainable for s in stage.program.sources):
            return None
        return lowering.run(stage.program, found.mesh, inside, split=schedule.splits)

    return pipeline_text(
        part, schedule, chosen.virtual_stages, logical, rank, device, None if lowering is None else traced
    )
