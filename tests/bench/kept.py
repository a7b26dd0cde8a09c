"""What cases of the pipelines' product make alike, made once: capture and analysis of a model, connections, what lies
inside the stages, the programs of a rank's micro-batches, and their lowering. Parameters are new in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from autopar import api, assemble, staged
from autopar.pipeline import Prepared
from autopar.plan import Plan
from autopar.program import Program
from autopar.solver import shapes

named: list[str] = [""]
"""The model of the case that runs; the last counts."""
_captured: dict[tuple[str, bool], Prepared] = {}
_connected: dict[str, Any] = {}
_found: dict[Any, Any] = {}
_carried_out: dict[Any, Any] = {}
_programs: dict[Any, tuple[Program, Any]] = {}
_lowered: dict[Any, Any] = {}
_alike: list[Any] = [None]


def begin(model: str, *rest: Any) -> None:
    """A case begins: schedules of the same model, mesh, micro-batches and backend share programs and their lowering."""
    named.append(model)
    if _alike != [(model, *rest)]:
        _alike[:] = [(model, *rest)]
        for made in (_found, _carried_out, _programs, _lowered):
            made.clear()


def keep() -> None:
    """From now on."""
    api.prepare = assemble.prepare = _prepared(api.prepare)  # type: ignore[attr-defined]
    assemble.connect_pipeline = _once(_connected, assemble.connect_pipeline, lambda *meshes: repr(meshes))  # type: ignore[attr-defined]
    shapes.search = _once(_found, shapes.search, lambda analysis, *what, **how: repr((what[0], what[3], how)))  # type: ignore[attr-defined]
    assemble.carry_out = _once(_carried_out, assemble.carry_out, _inside)  # type: ignore[attr-defined]
    staged.Compiled = _once(_lowered, staged.Compiled, _text)  # type: ignore[misc,assignment,attr-defined]
    staged._Builder.local = _local(staged._Builder.local)  # type: ignore[method-assign]


def _once(made: dict[Any, Any], make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    def once(*args: Any, **options: Any) -> Any:
        at = key(*args, **options)
        if at not in made:
            made[at] = make(*args, **options)
        return made[at]

    return once


def _prepared(prepare: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """Once in each mode."""

    def once(model: nn.Module, *args: Any, **options: Any) -> Prepared:
        key = (named[-1], model.training)
        if key not in _captured:
            _captured[key] = prepare(model, *args, **options)
        analysis, own = _captured[key].analysis, dict(model.named_parameters())
        if not model.training:  # captured again from a model without memory
            return _captured[key]
        program = analysis.program
        state = {name: own.get(name, value) for name, value in program.state.items()}
        return replace(_captured[key], analysis=replace(analysis, program=replace(program, state=state)))

    return once


def _inside(prepared: Prepared, plan: Plan, *rest: Any) -> str:
    """What a plan says of the inside of stages."""
    strategies = {name: (entry["strategy"], entry["inputs"], entry["outputs"]) for name, entry in plan.ops.items()}
    return repr((prepared.program.training, plan.params, strategies, plan.recompute, plan.loss_chunks))


def _text(module: Any, program: Program, recompute: Any, dump: Any, *options: Any) -> str:
    """All that lowering goes by."""
    shapes = [tuple(n.meta["val"].shape) for n in program.placeholders]
    return f"{shapes} {program.sources} {recompute} {options} {program.graph}"


def _local(local: Callable[..., Program]) -> Callable[..., Program]:
    def once(builder: Any, microbatch: int) -> Program:
        decided = builder.decisions
        key = (
            microbatch, builder.count, builder.staging.mesh.coordinate, builder.analysis.program.training,
            repr(sorted(decided.strategies.items())), repr((decided.sources, decided.reads, decided.outputs)),
        )  # fmt: skip
        if key not in _programs:
            _programs[key] = (local(builder, microbatch), builder.reductions)
        program, builder.reductions = _programs[key]
        return program

    return once
