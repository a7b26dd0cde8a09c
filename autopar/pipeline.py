"""The stages in order: from a module and a batch to a plan, and from a plan to the program of one rank.

    capture -> normalize -> analyse (rules) -> price and solve -> [plan] -> shard -> run

`prepare` ends after the analysis, `choose` after the plan, `lower` with the local program. Each stage is a line here.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.cost.hardware import Profile
from autopar.dump import Dump
from autopar.layout import I, Layout, Parts
from autopar.mesh import LogicalMesh, Mesh, factor_axes
from autopar.outputs import loss_of, output_kinds
from autopar.passes.cast import Cast
from autopar.passes.check import check_layouts
from autopar.passes.normalize import Normalize
from autopar.passes.shard import Shard
from autopar.plan import Plan
from autopar.program import Program
from autopar.rules import rule_of
from autopar.rules.analyse import Analysis, analyse
from autopar.rules.decisions import Decisions
from autopar.rules.discover import Discover
from autopar.runtime.module import Lowered
from autopar.solver.decide import decide
from autopar.solver.problem_text import problem_text
from autopar.solver.report import fixed_of, make_plan, mesh_of
from autopar.solver.runner_up import runners_up
from autopar.solver.search import Found, on_axes
from autopar.solver.settings import Settings, Shape
from autopar.solver.shapes import ShapeSearch
from autopar.solver.sinks import sink_values
from autopar.solver.stages import pipeline_plan

UNLIMITED_BYTES = 2**60

Progress = Callable[[str], None]
"""Told the name of each stage as it begins."""


def _silent(stage: str) -> None:
    return None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Planning makes some million objects and little garbage: Python's collector would take a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model ready for planning."""

    analysis: Analysis
    kinds: Mapping[int, str]
    """For each sink "plain" or "shard"."""
    capture_s: float

    @property
    def program(self) -> Program:
        return self.analysis.program

    @property
    def sinks(self) -> dict[int, str]:
        """For the planner: which sinks must be invariant, which are left where they lie."""
        return {i: "left" if kind == "shard" else "I" for i, kind in self.kinds.items()}

    def without_values(self) -> Prepared:
        """Without the memory of parameters and buffers, which nobody needs any more once the shards are made."""
        program = self.program
        held = {s.path for s in program.sources if s.kind in ("parameter", "buffer")}
        state = {path: value.detach().to("meta") if path in held else value for path, value in program.state.items()}
        return replace(self, analysis=replace(self.analysis, program=replace(program, state=state)))


@collector_paused()
def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    outputs: str,
    strict: bool = False,
    discover: bool = False,
    dump: Dump | None = None,
    progress: Progress = _silent,
) -> Prepared:
    """Capture and analyse."""
    started = time.perf_counter()
    progress("capture")
    program = capture(model, args, kwargs, name=name)
    _write(dump, "capture", program)
    progress("normalize")
    program = Normalize().run(program)
    _write(dump, "normalize", program)
    progress("analyse")
    rules = Discover() if discover else None
    analysis = analyse(program, rules=rules or rule_of, strict=strict)
    if rules is not None:
        analysis = replace(analysis, notes=tuple(rules.notes))
    return Prepared(analysis, output_kinds(program, analysis.grads, outputs), time.perf_counter() - started)


@collector_paused()
def choose(
    prepared: Prepared,
    topology: Mesh,
    profile: Profile,
    settings: Settings,
    *,
    recompute: tuple[str, ...],
    outputs: str = "auto",
    dump: Dump | None = None,
    progress: Progress = _silent,
) -> Plan:
    """Price and solve; the best plan. recompute: the levels that may be chosen. outputs: as asked for; a model whose
    outputs are all wanted gets no pipeline unasked.
    """
    progress("solve")
    started = time.perf_counter()
    analysis, pins = prepared.analysis, settings.pins
    levels = (pins.recompute,) if pins.recompute is not None else recompute
    lossy = outputs == "auto" and loss_of(prepared.program, analysis.grads) is not None
    unasked = lossy and prepared.program.training
    shaped = ShapeSearch(analysis, topology, profile, settings, prepared.sinks, levels, unasked, progress).chosen()
    found = shaped.found
    if dump is not None:
        dump.write("solve", None, extra=problem_text(found.built, found.solution))
    plan = make_plan(
        analysis, found, shaped.settings, prepared.sinks, prepared.capture_s, time.perf_counter() - started
    )
    solver = {**plan.solver, "runners_up": runners_up(found.built, found.solution.options, shaped.shape.stages)}
    if len(shaped.tried) > 1:
        solver["tried"] = [t.to_dict() for t in shaped.tried]
    plan = replace(plan, pins=dict(pins.given), notes=(*plan.notes, *shaped.notes), solver=solver)
    return plan if shaped.cut is None else pipeline_plan(plan, shaped.cut, pins.given)


def carry_out(prepared: Prepared, plan: Plan, profile: Profile, settings: Settings) -> tuple[Found, Decisions]:
    """A plan's decisions for this capture; ops that the plan does not name are chosen around the others.

    Whether they fit the memory was asked when the plan was made: another batch is not refused by a prediction.
    """
    shape = Shape(plan.degrees["pp"], plan.microbatches)
    mesh, inner = mesh_of(plan), settings.shaped(shape).inside_stage()
    kept = replace(inner, fixed=fixed_of(plan, prepared.analysis), memory_bytes=UNLIMITED_BYTES)
    kept = replace(kept, loss_chunks=plan.loss_chunks)
    found = on_axes(prepared.analysis, mesh, profile, kept, prepared.sinks)
    return found, decide(found.built, found.solution.options, prepared.sinks)


def lower(
    prepared: Prepared,
    decisions: Decisions,
    mesh: LogicalMesh,
    profile: Profile,
    coordinate: tuple[int, ...],
    device: torch.device,
    *,
    backend: str = "eager",
    recompute: Mapping[str, str] | None = None,
    cast: Cast | None = None,
    kernels: str = "auto",
    loss_chunks: int = 1,
    dump: Dump | None = None,
) -> Lowered:
    """The program of one rank, ready to run. recompute: level by block, for backends that lower. cast: the pass that
    reads stored parameters in another dtype. kernels: whether generated ones are used.
    loss_chunks: parts of the rows in which logits are made."""
    program = Shard(prepared.analysis, decisions, mesh, profile, coordinate).run(prepared.program)
    if dump is not None:
        dump.axes = tuple(a.name for a in mesh.axes)
        dump.write("shard", program)
    check_layouts(program, prepared.analysis, mesh, coordinate)
    if cast is not None:
        program = cast.run(program)
        _write(dump, "cast", program)
    graph = on_device(program.graph, device)
    program, eager = replace(program, graph=graph), GraphModule(nn.Module(), graph)
    if backend == "eager":
        return Lowered(program, eager, sinks_of(prepared, decisions, mesh))
    run = Compiled(eager, program, recompute or {}, dump, kernels, backend, loss_chunks=loss_chunks)
    return Lowered(program, run, sinks_of(prepared, decisions, mesh))


def sinks_of(prepared: Prepared, decisions: Decisions, mesh: LogicalMesh) -> dict[int, tuple[Parts, Layout, str]]:
    """Parts, layout and kind of each sink."""

    whole = (I,) * len(mesh.axes)
    return {
        i: (prepared.analysis.parts[v], decisions.outputs.get(i, whole), prepared.kinds[i])
        for i, v in sink_values(prepared.analysis)
    }


def on_device(graph: Graph, device: torch.device) -> Graph:
    """Constants made in forward are made on the device that the program runs on, wherever the model was captured."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = torch.utils._pytree.tree_map_only(torch.device, lambda _: device, node.args)
            node.kwargs = torch.utils._pytree.tree_map_only(torch.device, lambda _: device, node.kwargs)
    return graph


def _write(dump: Dump | None, stage: str, program: Program) -> None:
    if dump is not None:
        dump.write(stage, program)


def dump_plan(prepared: Prepared, chosen: Plan, profile: Profile, settings: Settings, dump: Dump) -> None:
    """Write what a plan becomes: the local program of rank 0."""
    found, decisions = carry_out(prepared, chosen, profile, settings)
    dump.axes = tuple(a.name for a in found.mesh.axes)
    at = found.mesh.coordinate(0)
    dump.write("shard", Shard(prepared.analysis, decisions, found.mesh, profile, at).run(prepared.program))


__all__ = ["Prepared", "carry_out", "choose", "factor_axes", "lower", "prepare"]
