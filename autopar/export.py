"""`autopar export`: the parallel program of a rank as a readable Python file.

Enters: a model, a mesh and planning arguments, as `plan` takes them. Leaves: the text of the file: the forward alone,
or both lowered graphs, with kernels. Refused (`PlanError`): a plan with pipeline stages or micro-batches, whose program
is a schedule and not one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.api import _plan_of, _prepare
from autopar.assemble import levels_by_block, reduced_in
from autopar.codegen.python_text import python_text
from autopar.errors import MeshError, PlanError
from autopar.passes.cast import Cast
from autopar.passes.shard import Shard
from autopar.pipeline import carry_out
from autopar.plan import Plan
from autopar.program import Program
from autopar.request import make_request
from autopar.staged import is_staged
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
    Raises:  what `plan` raises; PlanError: stages or micro-batches; MeshError: no such rank; UnsupportedOpError: an op
             that lives in this process only; what cannot be lowered here.
    """
    tell = progress or (lambda stage: None)
    request = make_request(mesh, pin, memory, precision, optimizer, "auto", None, "auto", False, False, None, kernels)
    if not 0 <= rank < request.topology.size:
        raise MeshError(f"rank {rank} is not in a mesh of {request.topology.size} devices")
    prepared = _prepare(model, example_args, example_kwargs, request, tell)
    chosen = _plan_of(prepared, request, plan, tell)
    if is_staged(chosen):
        raise PlanError(
            f"export of a plan with pp={chosen.degrees['pp']} and {chosen.microbatches} micro-batches: its program is "
            "a schedule, not one function; pin pp=1 and microbatches=1"
        )
    found, decisions = carry_out(prepared, chosen, request.profile, request.settings)
    coordinate = found.mesh.coordinate(rank)
    program: Program = Shard(prepared.analysis, decisions, found.mesh, request.profile, coordinate).run(
        prepared.program
    )
    stored = {s.path: prepared.program.state[s.path].dtype for s in program.sources if s.kind == "parameter"}
    reduce = reduced_in(request.precision, stored)
    program = program if reduce is None else Cast(stored, reduce).run(program)
    device = "cpu" if request.topology.device == "cpu" else "cuda"
    traced = None
    if backward:
        tell("lower")
        levels = levels_by_block(prepared.program, chosen)
        fused = kernels == "on" or (kernels == "auto" and device != "cpu")
        traced = trace(
            program,
            found.mesh,
            coordinate,
            recompute=levels,
            device=device,
            fused=fused,
            loss_chunks=chosen.loss_chunks,
        )
    return python_text(program, found.mesh, rank, device, traced)
