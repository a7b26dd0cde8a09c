"""The plan as data from the solver's solution, and back: what a plan fixes in a new capture of the same model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.mesh import Axis, LogicalMesh, Mesh, factor_axes, inside_stage
from autopar.plan import Plan
from autopar.program import Program, record
from autopar.rules.analyse import Analysis
from autopar.solver.build import Built
from autopar.solver.decide import decide, degrees, model_flop, parameter_zero, zero_level
from autopar.solver.roles import is_attention
from autopar.solver.search import Found
from autopar.solver.settings import Fixed, Settings, compute_dtype
from autopar.solver.sinks import stable_name
from autopar.solver.step import passing_bytes, step_of
from autopar.user_function import op_text


def make_plan(
    analysis: Analysis, found: Found, settings: Settings, sinks: Mapping[int, str], capture_s: float, total_s: float
) -> Plan:
    """Everything that was decided, with what it is predicted to cost."""
    built, mesh, solution = found.built, found.mesh, found.solution
    decisions = decide(built, solution.options, sinks)
    effective, _ = degrees(analysis, decisions, mesh, built.roles)
    pinned = {r: n for r, n in settings.pins.degrees.items() if n > 1}
    for role, degree in pinned.items():
        if role in ("dp", "tp", "cp") and effective.to_dict()[role] < degree:
            raise PlanError(
                f"pin {role}={degree} cannot be kept: the model's ops can be cut {effective.to_dict()[role]} ways "
                "in that role"
            )
    users = analysis.users
    params: dict[str, Any] = {}
    for source in analysis.program.sources:
        if source.kind == "parameter":
            layout, parts = decisions.sources[source.node], analysis.parts[source.node]
            used = [decisions.strategies[op].ins[p] for op, p in users.get(source.node, [])]
            params[source.path] = {
                "layout": [[a.name, parts.name(p)] for a, p in zip(mesh.axes, layout, strict=True) if p.kind == "S"],
                "zero": parameter_zero(layout, used, settings.pins.zero),
                "shape": list(parts.shape),
            }
    ops = {
        record(op.node).op: _op_entry(built, name, decisions.strategies[name].options, solution.options)
        for name, op in analysis.ops.items()
    }
    for value, layout in decisions.reads.items():
        parts = analysis.parts[value]
        owner = value.partition(".")[0]
        if owner in analysis.ops:
            entry = ops[record(analysis.ops[owner].node).op]
            entry.setdefault("read", {})[stable_name(analysis, value)] = [parts.name(p) for p in layout]
    whole = sorted({op_text(op.node) for op in analysis.ops.values() if not op.has_rule and op.ins})
    notes = [f"kept whole, no rule: {', '.join(whole)}"] if whole else []
    notes += [*analysis.notes, *_undivided(built, decisions.strategies)]
    return Plan(
        model=describe(analysis.program, analysis),
        mesh={"shape": list(mesh.topology.shape), "device": mesh.topology.device},
        degrees=effective.to_dict(),
        axes=tuple(axis_entry(a, built) for a in mesh.axes),
        zero=zero_level(decisions, analysis, settings.pins.zero),
        offload=settings.pins.given.get("offload", "none"),
        recompute={c.name: found.recompute if len(c.blocks) > 1 else "none" for c in analysis.program.classes},
        microbatches=1,
        schedule="1f1b",
        virtual_stages=1,
        loss_chunks=found.loss_chunks,
        stages=({"blocks": list(analysis.program.blocks), "devices": list(range(mesh.size))},),
        params=params,
        ops=ops,
        predicted=predicted_of(analysis, found, settings),
        solver={
            "name": solution.solver, "objective": solution.objective_s, "bound": solution.bound_s, "gap": solution.gap,
            "capture_s": capture_s, "price_s": found.price_s, "solve_s": found.solve_s, "total_s": capture_s + total_s,
        },
        notes=tuple(notes),
        pins=dict(settings.pins.given),
    )  # fmt: skip


def axis_entry(axis: Axis, built: Built) -> dict[str, Any]:
    """An axis in the plan, with the slowest link that it crosses."""
    link = built.profile.link(axis.spans[-1][0]).name if axis.spans else "none"
    return {"name": axis.name, "size": axis.size, "link": link, "role": axis.role}


def _op_entry(built: Built, name: str, options: tuple[str, ...], solution: tuple[int, ...]) -> dict[str, Any]:
    first = built.representative[name]
    index = solution[built.op_choice[first]]
    strategy, price, op = built.op_strategies[first][index], built.op_prices[first], built.analysis.ops[name]
    parts = built.analysis.parts
    return {
        "strategy": list(options),
        "inputs": [[parts[v].name(p) for p in layout] for v, layout in zip(op.ins, strategy.ins, strict=True)],
        "outputs": [[parts[v].name(p) for p in layout] for v, layout in zip(op.outs, strategy.outs, strict=True)],
        "class": op_text(op.node).removeprefix("aten."),
        "flop": float(price.flop[index]),
        "bytes": float(price.moved_bytes[index]),
        "time_s": float(price.compute_s[index]),
        "communication_s": float(price.communication_s[index]),
    }


def _undivided(built: Built, strategies: Mapping[str, Any]) -> list[str]:
    """Ops with matrix products that a pinned axis does not cut."""
    notes = []
    for a, axis in enumerate(built.mesh.axes):
        if axis.role in ("tp", "dp"):
            left = [
                record(op.node).op for name, op in built.analysis.ops.items()
                if op.rule.flop and strategies[name].options[a] not in op.by_name and built.representative[name] == name
            ]  # fmt: skip
            if left:
                notes.append(f"not cut on axis {axis.name}: {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}")
    return notes


def predicted_of(analysis: Analysis, found: Found, settings: Settings) -> dict[str, Any]:
    built, options = found.built, found.solution.options
    counts: dict[str, int] = {}
    for first in built.representative.values():
        counts[first] = counts.get(first, 0) + 1
    parts = step_of(built, options, found.solution.objective_s)
    step, passing = parts.total_s, passing_bytes(built, options)
    states = sum(
        float(built.storage_prices[n].memory_bytes[options[c]]) * counts[n] for n, c in built.storage_choice.items()
    )
    host = sum(
        float(built.storage_prices[n].host_bytes[options[c]]) * counts[n] for n, c in built.storage_choice.items()
    )
    tokens = tokens_of(analysis)
    flop = flop_of(analysis, tokens)
    dtype = next(
        (
            compute_dtype(analysis.dtypes[s.node], settings.precision)
            for s in analysis.program.sources
            if s.kind == "parameter"
        ),
        None,
    )
    peak = found.built.profile.peak(dtype) if dtype is not None else 1.0
    devices = found.mesh.size
    return {
        "step_time_s": step,
        "tokens_per_s": tokens / step if step else 0.0,
        "tflops_per_device": flop / step / devices / 1e12 if step else 0.0,
        "mfu": flop / step / devices / peak if step else 0.0,
        "peak_memory_bytes": [found.solution.memory_bytes],
        "memory": {
            "parameters_gradients_optimizer": states,
            "activations": max(0.0, found.solution.memory_bytes - states - passing),
            "gathered_and_loss": passing,
            **({"host": host} if host else {}),
        },
        "breakdown_s": {
            "compute": parts.compute_s,
            "exposed_communication": parts.exposed_s + parts.data_s + parts.alone_s,
            "optimizer": parts.update_s + parts.fixed_s,
            "bubble": 0.0,
        },
    }


def tokens_of(analysis: Analysis) -> int:
    """Tokens of a batch: elements of the first integer input of two dims, else the batch size."""
    inputs = [s.node for s in analysis.program.sources if s.kind == "input"]
    shapes = [analysis.parts[node].shape for node in inputs]
    integers = [s for s, n in zip(shapes, inputs, strict=True) if not analysis.dtypes[n].is_floating_point]
    tokens = [math.prod(shape) for shape in integers if len(shape) == 2]
    return tokens[0] if tokens else next((shape[0] for shape in shapes if shape), 1)


def flop_of(analysis: Analysis, tokens: int) -> float:
    """Model flop of a step by the formula of the plan's `mfu`."""
    tables = {op.ins[0] for op in analysis.ops.values() if str(op.node.target).startswith("aten.embedding")}
    shared = {
        v
        for v in tables
        if any(not str(analysis.ops[o].node.target).startswith("aten.embedding") for o, _ in analysis.users[v])
    }
    count = sum(
        analysis.parts[s.node].numel
        for s in analysis.program.sources
        if s.kind == "parameter" and s.node not in tables - shared
    )
    attentions = [op for op in analysis.ops.values() if is_attention(op)]
    hidden = sequence = 0
    if attentions:
        query, key = analysis.parts[attentions[0].ins[0]].shape, analysis.parts[attentions[0].ins[1]].shape
        hidden, sequence = query[-1] * (query[-3] if len(query) > 2 else 1), key[-2]
    return model_flop(count, len(attentions), hidden, sequence, tokens)


def describe(program: Program, analysis: Analysis) -> dict[str, Any]:
    """The model's name, size and digest: what a plan made for another model fails on."""
    names = sorted((s.path, analysis.parts[s.node].shape) for s in program.sources if s.kind == "parameter")
    inputs = [analysis.parts[s.node].shape for s in program.sources if s.kind == "input"]
    shaped = [shape for shape in inputs if shape and shape[0] > 0]
    out: dict[str, Any] = {
        "name": program.name,
        "parameters": sum(math.prod(shape) for _, shape in names),
        "digest": hashlib.sha256(repr(names).encode()).hexdigest()[:16],
        "batch": shaped[0][0] if shaped else 1,
        "training": program.training,
    }
    if shaped and len(shaped[0]) > 1:
        out["seq"] = shaped[0][1]
    return out


def mesh_of(plan: Plan) -> LogicalMesh:
    """The logical mesh that a plan was made for; in a pipeline, that of the devices of one stage."""
    topology = inside_stage(Mesh(tuple(plan.mesh["shape"]), device=plan.mesh["device"]), plan.degrees["pp"])
    pinned: dict[str, list[int]] = {}
    for axis in plan.axes:
        if axis.get("role") and axis["role"] != "pp":
            pinned.setdefault(axis["role"], []).append(axis["size"])
    degrees_ = {role: math.prod(sizes) for role, sizes in pinned.items()}
    parts = {role: tuple(sizes) for role, sizes in pinned.items() if len(sizes) > 1}
    left = factor_axes(topology, degrees_, parts)
    free = [a["size"] for a in plan.axes if not a.get("role")]
    levels: list[tuple[int, ...]] = []
    for open_axis in (a for a in left.axes if a.role is None):
        taken: list[int] = []
        while math.prod(taken) < open_axis.size and free:
            taken.append(free.pop(0))
        levels.append(tuple(taken))
    return factor_axes(topology, degrees_, parts, free=levels)


def fixed_of(plan: Plan, analysis: Analysis) -> Fixed:
    """What a plan fixes in this capture. Raises: PlanError when it was made for another model."""
    mine = describe(analysis.program, analysis)
    if mine["digest"] != plan.model["digest"]:
        raise PlanError(
            f"the plan was made for {plan.model['name']} ({plan.model['parameters']:,} parameters), whose "
            f"parameter names or shapes differ from this model's ({mine['parameters']:,} parameters); plan this "
            "model again"
        )
    parameters = [s.path for s in analysis.program.sources if s.kind == "parameter"]
    for name in parameters:
        if name not in plan.params:
            raise PlanError(f'params: "{name}" is missing; plan this model again')
    for name in plan.params:
        if name not in parameters:
            raise PlanError(f'params["{name}"]: the model has no such parameter')
    names = [a["name"] for a in plan.axes if a.get("role") != "pp"]  # the last one: a row's entry for it says nothing
    params: dict[str, tuple[str, ...]] = {}
    for name, entry in plan.params.items():
        lies = {axis: text for axis, text in entry["layout"]}
        params[name] = tuple(lies.get(axis, "I") for axis in names)
    ops = {name: tuple(entry["strategy"][: len(names)]) for name, entry in plan.ops.items()}
    reads = {
        value: tuple(layout[: len(names)])
        for entry in plan.ops.values()
        for value, layout in entry.get("read", {}).items()
    }
    return Fixed(ops, params, reads)
