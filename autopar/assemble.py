"""From a plan to the module that runs it: this rank's shards, its lowered program, and the way to lower for other
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.dump import Dump
from autopar.errors import PlanError
from autopar.lifetime import bring_from_host, gather_once, offloaded
from autopar.mesh import with_pipeline
from autopar.passes.cast import Cast
from autopar.pipeline import Prepared, carry_out, lower, prepare
from autopar.plan import Plan
from autopar.precision import Precision, skeleton
from autopar.program import Program
from autopar.request import Request
from autopar.rules.decisions import Decisions
from autopar.runtime.check import agree, digest
from autopar.runtime.module import Lowered, ParallelModule, draws_numbers
from autopar.runtime.parameters import OLD_PARAMETERS, shard_parameter
from autopar.runtime.process_mesh import ProcessMesh, connect, connect_pipeline, with_host
from autopar.runtime.tree import Changes, changed, changes, drops, modes_after
from autopar.runtime.zero import Lifetime
from autopar.solver.decide import degrees
from autopar.solver.report import mesh_of
from autopar.solver.search import Found
from autopar.staged import Staging, is_staged, lower_stages, owners_of


def build_module(
    model: nn.Module, prepared: Prepared, request: Request, chosen: Plan, accumulate: int = 1
) -> ParallelModule:
    logical, program = mesh_of(chosen), prepared.program
    found, decisions = carry_out(prepared, chosen, request.profile, request.settings)
    stages = chosen.degrees["pp"]
    if stages > 1:
        mesh = connect_pipeline(with_pipeline(logical, request.topology, stages), logical)
    else:
        mesh = connect(logical)
    owners = owners_of(chosen, prepared) if is_staged(chosen) else {}
    if request.topology.size > 1:
        decided = repr(sorted((k, s.options) for k, s in decisions.strategies.items()))
        agree({"plan": digest(chosen.digest), "decisions": digest(decided)}, mesh.device)
    if chosen.offload != "none":
        mesh = with_host(mesh)
    state, persistent, shards = _shard_state(prepared, decisions.sources, mesh, owners, chosen.offload)
    OLD_PARAMETERS.add(p for p in model.parameters())
    prepared = prepared.without_values()
    lowering = _Lowering(skeleton(model, request.precision), prepared, request, chosen, mesh)
    lowering.first = lowering.lowered(prepared, found, decisions, request.dump)
    _, roles = degrees(prepared.analysis, decisions, logical, found.built.roles)
    batch_axes = tuple(a.name for a, role in zip(logical.axes, roles, strict=True) if role == "dp")
    random = draws_numbers(program) or (not program.training and drops(model))
    trainable = {s.path: s.trainable for s in program.sources if s.kind == "parameter"}
    module = ParallelModule(
        chosen, mesh, lowering, state, persistent, program.ties, shards, batch_axes, random, request.precision,
        accumulate, owners, model, trainable, lowering.modes,
    )  # fmt: skip
    lowering.changes = changes(module._parts)
    return module


def _shard_state(
    prepared: Prepared,
    layouts: Mapping[str, Any],
    mesh: ProcessMesh,
    owners: Mapping[str, tuple[int, ...]],
    offload: str,
) -> tuple[dict[str, torch.Tensor], dict[str, bool], dict[str, Any]]:
    state: dict[str, torch.Tensor] = {}
    persistent: dict[str, bool] = {}
    shards: dict[str, Any] = {}
    for source in prepared.program.sources:
        if source.kind == "parameter":
            parts = prepared.analysis.parts[source.node]
            layout = layouts[source.node]
            host = offloaded(source.trainable, offload)
            shard = shard_parameter(prepared.program.state[source.path], parts, layout, mesh, source.trainable, host)
            if mesh.line is None or mesh.line.index in owners[source.path]:
                state[source.path] = shard
            shards[source.path] = (parts, layout)
        elif source.kind == "buffer":
            value = prepared.program.state[source.path]
            if value.is_meta:
                if not source.persistent:
                    raise PlanError(
                        f"{source.path}: a buffer on meta, which no state dict would fill; make it on a real device "
                        "before autopar.parallelize"
                    )
                value = torch.empty_like(value, device=mesh.device)  # to be loaded, as parameters are
            held = value.detach().to(mesh.device, copy=True).contiguous()
            if mesh.device_mesh is not None:
                dist.broadcast(held, 0)
            state[source.path] = held
            persistent[source.path] = source.persistent
    return state, persistent, shards


def levels_by_block(program: Program, plan: Plan) -> dict[str, str]:
    """The level of recomputation of each block."""
    return {b: plan.recompute.get(c.name, "none") for c in program.classes for b in c.blocks}


def reduced_in(precision: Precision | None, stored: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """The dtype that gradients of parameters stored in these dtypes are reduced in; None: nothing is cast."""
    if precision is None or precision.reduce is None:
        return None
    if all(dtype == precision.computed(dtype) == precision.reduce for dtype in stored.values()):
        return None
    return precision.reduce


def refuse_rounding(program: Program, precision: Precision, stored: Mapping[str, torch.dtype]) -> None:
    """Raise for a parameter that forward writes and a policy reads in a narrower dtype."""
    for path in (sink.path for sink in program.sinks if sink.kind == "state" and sink.path in stored):
        read = precision.computed(stored[path])
        if read != stored[path]:
            raise PlanError(
                f"{path}: forward writes this parameter, which the precision policy reads in {read}: what is "
                f"stored in {stored[path]} would be rounded each step; write it outside forward, or plan without "
                "precision"
            )


class _Lowering:
    """Lower for a combination of inputs; the first one is ready, others are captured again and take the same plan."""

    def __init__(self, model: nn.Module, prepared: Prepared, request: Request, chosen: Plan, mesh: ProcessMesh) -> None:
        self.model, self.request, self.plan, self.mesh = model, request, chosen, mesh
        self.prepared: Prepared | None = prepared
        self.first: Lowered | None = None
        self.kinds = prepared.kinds
        self.changes: Changes = ()
        """Of the model when it was captured."""
        state = prepared.program.state
        self.stored = {s.path: state[s.path].dtype for s in prepared.program.sources if s.kind == "parameter"}

    def modes(self, training: bool) -> Mapping[str, bool] | None:
        return modes_after(self.model, training)

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool,
        changes: Changes = (),
        unfrozen: tuple[str, ...] = (),
    ) -> Lowered:
        first, self.first = self.first, None
        same = changes == self.changes and not unfrozen
        if first is not None and same and self._matches(args, kwargs, training):
            return first
        with changed(self.model, training, changes, unfrozen):
            prepared = prepare(
                self.model,
                args,
                kwargs,
                name=type(self.model).__name__,
                outputs=self.request.outputs,
                strict=self.request.strict,
                discover=self.request.discover,
            )
        found, decisions = carry_out(prepared, self.plan, self.request.profile, self.request.settings)
        return self.lowered(prepared, found, decisions)

    def lowered(self, prepared: Prepared, found: Found, decisions: Decisions, dump: Dump | None = None) -> Lowered:
        """The program of this rank under the request's backend and the plan's recomputation."""
        levels = levels_by_block(prepared.program, self.plan)
        zero = {name: entry["zero"] for name, entry in self.plan.params.items()}
        decisions, lifetimes = gather_once(prepared.analysis, decisions, zero)
        cast, lifetimes = self.cast(prepared, decisions, lifetimes)
        if is_staged(self.plan):
            staging = Staging(
                self.plan, found.mesh, self.request.profile, self.mesh, self.request.backend,
                self.request.outputs != "auto", self.request.kernels, cast,
            )  # fmt: skip
            batch = found.built.roles.batch
            staged = lower_stages(staging, prepared, decisions, batch, recompute=levels, dump=dump)
            return replace(staged, lifetimes=lifetimes)
        lowered = lower(
            prepared,
            decisions,
            found.mesh,
            self.request.profile,
            self.mesh.coordinate,
            self.mesh.device,
            backend=self.request.backend,
            recompute=levels,
            cast=cast,
            kernels=self.request.kernels,
            loss_chunks=self.plan.loss_chunks,
            dump=dump,
        )
        return replace(lowered, lifetimes=lifetimes)

    def cast(
        self, prepared: Prepared, decisions: Decisions, lifetimes: dict[str, Lifetime]
    ) -> tuple[Cast | None, dict[str, Lifetime]]:
        """Where parameters are cast, and brought from host memory: those with a lifetime when they are gathered, the
        others in the program.
        """
        precision, stored = self.request.precision, self.stored
        reduce = reduced_in(precision, stored)
        if precision is not None and reduce is not None:
            refuse_rounding(prepared.program, precision, stored)
            read = {path: precision.computed(stored[path]) for path in lifetimes}
            lifetimes = {path: replace(life, dtypes=(read[path], reduce)) for path, life in lifetimes.items()}
            stored = {**stored, **read}
        offload, staged = self.plan.offload, is_staged(self.plan)
        lifetimes, fetched = bring_from_host(prepared.analysis, decisions, lifetimes, offload, staged)
        if reduce is None and not fetched:
            return None, lifetimes
        return Cast(stored, reduce, self.mesh.device, fetched), lifetimes

    def _matches(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> bool:
        """Was the first program captured from inputs like these?"""
        assert self.prepared is not None
        program, self_prepared = self.prepared.program, self.prepared
        self.prepared = None
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        if spec != program.in_spec or training != program.training:
            return False
        values = [x for x, tensor in zip(leaves, program.in_tensors, strict=True) if not tensor]
        known = [x for x, tensor in zip(program.in_values, program.in_tensors, strict=True) if not tensor]
        if values != known or any(
            isinstance(x, torch.Tensor) != t for x, t in zip(leaves, program.in_tensors, strict=True)
        ):
            return False
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        nodes = [s.node for s in program.sources if s.kind == "input"]
        return all(
            tuple(x.shape) == self_prepared.analysis.parts[n].shape and x.dtype == self_prepared.analysis.dtypes[n]
            for x, n in zip(tensors, nodes, strict=True)
        )
