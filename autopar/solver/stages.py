"""Cut a model into the stages of a pipeline: priced blocks over stages, and a plan's stages read back.

What enters: a plan for the devices of one stage, priced. What leaves: the plan of the pipeline. Refused, with a
`PlanError`: more stages than cuts, a pinned cut that is none; with an `InfeasibleError`: no cut fits the memory.

Blocks stay in the order of the program, so a cut is a division of their sequence (`cut`). A model of fewer
blocks than stages is cut between ops.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import PlanError
from autopar.mesh import LogicalMesh, Mesh, with_pipeline
from autopar.passes.microbatch import divide
from autopar.plan import Plan
from autopar.program import Program, record
from autopar.rules.analyse import Analysis
from autopar.rules.call import is_getitem
from autopar.schedule.asynchronous import versions_kept
from autopar.schedule.build import KINDS, build
from autopar.schedule.check import check
from autopar.solver.cut import NONE, Cell, Shared, States, balance, bare_stage, pinned_sizes, stage_states
from autopar.solver.decide import decide
from autopar.solver.pipeline_figures import predicted, weight_bytes
from autopar.solver.report import axis_entry
from autopar.solver.search import Found
from autopar.solver.sends import stage_sends
from autopar.solver.settings import MICROBATCHES_A_STAGE, Settings


def pipeline_plan(
    plan: Plan, analysis: Analysis, found: Found, settings: Settings, topology: Mesh, sinks: Mapping[int, str]
) -> Plan:
    """The plan of a pipeline whose stages are planned as `plan` (made for the devices of one stage) says.

    Raises:  PlanError: more stages than cuts, a value that needs the whole batch with pinned micro-batches;
             InfeasibleError: no cut fits the memory.
    """
    given = settings.pins.given
    ranks, virtual = settings.pins.degrees.get("pp", 1), int(given.get("virtual_stages", 0)) or None
    name = given.get("schedule") or ("1f1b" if virtual in (None, 1) else "interleaved-1f1b")
    virtual = virtual or KINDS[name].virtual or 2
    pinned_count = int(given.get("microbatches", 0))
    microbatches = pinned_count or _microbatches(analysis, found, ranks)
    try:
        decisions = decide(found.built, found.solution.options, sinks)
        divided = divide(analysis, decisions, found.mesh, found.built.roles.batch, microbatches)
    except PlanError as error:
        if pinned_count or microbatches == 1:
            raise
        microbatches = 1  # nothing is divided, and ranks wait for each other: the only way for this model
        divided = divide(analysis, decisions, found.mesh, found.built.roles.batch, microbatches)
        plan = replace(plan, notes=(*plan.notes, f"one micro-batch: {error}"))
    schedule = build(name, ranks, virtual, microbatches)
    counts = check(schedule).in_flight_by_stage
    held = [max(counts[s :: schedule.depth]) for s in range(schedule.depth)]  # of the fuller replica
    copies = [versions_kept(schedule, s) - 1 for s in range(schedule.depth)]
    weights = weight_bytes(plan, analysis, decisions, found.mesh.sizes) if schedule.asynchronous else {}
    cells = cells_of(plan, analysis, found, schedule.depth, weights)
    pinned = given.get("stages")
    limit = settings.memory_bytes / (virtual * schedule.replicas)
    if pinned is not None:
        sizes = pinned_sizes(pinned, cells, schedule.depth)
    else:
        share = [min(1.0, n / microbatches) for n in held]
        sizes = balance(cells, schedule.depth, limit, share, copies)
        if bare_stage(cells, sizes, schedule) is not None:
            sizes = balance(cells, schedule.depth, limit, share, copies, owners=True)
    if (bare := bare_stage(cells, sizes, schedule)) is not None:
        raise PlanError(
            f"pp={ranks}: stage {bare} of the cut {sizes} holds no parameter, so an optimizer on its devices would "
            "have nothing to step; pin fewer stages or other ones"
        )
    mesh = with_pipeline(found.mesh, topology, ranks)
    stages, at = [], 0
    seconds = []
    states, activations = [], []
    stage_of: dict[str, int] = {}
    for s, size in enumerate(sizes):
        inside = cells[at : at + size]
        seconds.append(sum(c.time_s for c in inside))
        states.append(stage_states(cells, at, size))
        activations.append(sum(c.activation_bytes for c in inside) * min(1.0, held[s] / microbatches))
        devices = [r for r in range(mesh.size) if mesh.coordinate(r)[-1] in schedule.ranks_of(s)]
        stages.append({"blocks": [c.name for c in inside], "devices": devices})
        stage_of |= {op: s for cell in inside for op in cell.ops}
        at += size
    by_node = {n: stage_of[record(op.node).op] for n, op in analysis.ops.items() if record(op.node).op in stage_of}
    sends = stage_sends(
        analysis,
        divided.decisions,
        (microbatches, *found.mesh.sizes),
        by_node,
        mesh.axes[-1],
        schedule,
        found.built.profile,
    )
    device, host = [held.device for held in states], [held.host for held in states]
    versions = [held.copy * kept for held, kept in zip(states, copies, strict=True)]
    figures = predicted(plan, seconds, schedule, sends) | {
        "peak_memory_bytes": [sum(bytes_) for bytes_ in zip(device, activations, versions, strict=True)],
        "memory": {"parameters_gradients_optimizer": device, "activations": activations}
        | ({"weight_versions": versions} if schedule.asynchronous else {})
        | ({"host": host} if any(host) else {}),
    }
    axis = axis_entry(mesh.axes[-1], found.built)
    return _with_stages(plan, mesh, axis, stages, name, microbatches, virtual, figures, settings)


def _with_stages(
    plan: Plan,
    mesh: LogicalMesh,
    axis: Mapping[str, Any],
    stages: Sequence[Mapping[str, Any]],
    name: str,
    microbatches: int,
    virtual: int,
    figures: Mapping[str, Any],
    settings: Settings,
) -> Plan:
    ranks, topology = mesh.axes[-1].size, mesh.topology
    ops = {
        op: {
            **entry,
            "strategy": [*entry["strategy"], "I"],
            "inputs": [[*row, "I"] for row in entry["inputs"]],
            "outputs": [[*row, "I"] for row in entry["outputs"]],
            **({"read": {v: [*row, "I"] for v, row in entry["read"].items()}} if "read" in entry else {}),
        }
        for op, entry in plan.ops.items()
    }
    return replace(
        plan,
        mesh={"shape": list(topology.shape), "device": topology.device},
        degrees={**plan.degrees, "pp": ranks},
        axes=(*plan.axes, axis),
        microbatches=microbatches,
        schedule=name,
        virtual_stages=virtual,
        stages=tuple(stages),
        ops=ops,
        predicted=figures,
        pins=dict(settings.pins.given),
    )


def _microbatches(analysis: Analysis, found: Found, ranks: int) -> int:
    """The most that are asked for, divide the batch, and leave each data-parallel rank a sample."""
    size = batch_size(analysis, found)
    data = math.prod(
        axis.size for a, axis in enumerate(found.mesh.axes) if any(
            (f := op.by_name.get(found.built.op_strategies[found.built.representative[n]][
                found.solution.options[found.built.op_choice[found.built.representative[n]]]].options[a])) is not None
            and analysis.factor_class(op, f) in found.built.roles.batch
            for n, op in analysis.ops.items()))  # fmt: skip
    for count in range(min(MICROBATCHES_A_STAGE * ranks, size), 1, -1):
        if size % count == 0 and size // count % data == 0:
            return count
    return 1


def batch_size(analysis: Analysis, found: Found) -> int:
    """Rows of the global batch."""
    for (value, part), number in analysis.classes.items():
        if number in found.built.roles.batch:
            return analysis.parts[value].flat[part]
    return 1


def cells_of(
    plan: Plan, analysis: Analysis, found: Found, stages: int, weights: Mapping[str, float] | None = None
) -> list[Cell]:
    """Blocks in order; ops, when there are fewer blocks than stages. weights: bytes of a parameter's copy, by node."""
    built, options = found.built, found.solution.options
    order = [n for n in analysis.program.calls if not is_getitem(n) and n.name in analysis.ops]
    blocks = [record(n).block for n in order]
    by_block = len(set(blocks)) >= stages
    if by_block:
        groups = [(name, list(group)) for name, group in itertools.groupby(order, key=lambda n: record(n).block)]
        names: list[Any] = [name for name, _ in groups]
    else:
        groups = [(record(n).op, [n]) for n in order]
        names = [{"first_op": name, "last_op": name} for name, _ in groups]
    if len(groups) < stages:
        raise PlanError(
            f"pp x virtual_stages = {stages} stages, but the model has {len(groups)} ops to cut between "
            f"(in {len(set(blocks))} blocks); pin fewer stages"
        )
    readers: dict[str, int] = {}  # the last cell that read a parameter
    cells: list[Cell] = []
    saved = _activation_bytes(found)
    for name, (_, nodes) in zip(names, groups, strict=True):
        time_s = activation = 0.0
        states, shared = NONE, []
        for node in nodes:
            first = built.representative[node.name]
            price, index = built.op_prices[first], options[built.op_choice[first]]
            time_s += float(price.compute_s[index]) + float(price.communication_s[index])
            activation += saved.get(node.name, 0.0)
            for value in analysis.ops[node.name].ins:
                stored = built.representative.get(value, "") if value not in analysis.ops else ""
                before, readers[value] = readers.get(value), len(cells)
                if stored not in built.storage_choice or before == len(cells):
                    continue
                at, storage = options[built.storage_choice[stored]], built.storage_prices[stored]
                copy = (weights or {}).get(value, 0.0)
                held = States(float(storage.memory_bytes[at]), copy, float(storage.host_bytes[at]))
                if before is None:
                    states = states.plus(held)
                    time_s += float(storage.update_s[at])
                else:
                    shared.append(Shared(before, held))
        cells.append(Cell(name, tuple(record(n).op for n in nodes), time_s, activation, states, tuple(shared)))
    return cells


def _activation_bytes(found: Found) -> dict[str, float]:
    """What is kept for the backward of what an op reads and makes, by op: its rows of the memory constraint."""
    built, options = found.built, found.solution.options
    choices = built.problem.choices
    counts: dict[str, int] = {}
    for first in built.representative.values():
        counts[first] = counts.get(first, 0) + 1
    out = {}
    for name, first in built.representative.items():
        if first in built.op_choice:
            c = built.op_choice[first]
            memory = choices[c].memory_bytes
            out[name] = float(memory[options[c]]) / counts[first]
    values = Counter(built.read_choice.values())
    for value, c in built.read_choice.items():  # read by several ops in one layout: kept once
        name = value.partition(".")[0]
        if name in out:
            out[name] += float(choices[c].memory_bytes[options[c]]) / values[c]
    return out


def stage_of_ops(plan: Plan, program: Program) -> dict[str, int]:
    """The stage of every op, by stable name.

    Raises:  PlanError: a stage names a block or op that the program lacks.
    """
    names = list(dict.fromkeys(record(n).op for n in program.calls))
    place = {name: i for i, name in enumerate(names)}
    block_of: dict[str, int] = {}
    out: dict[str, int] = {}
    known = {record(n).block for n in program.calls}
    for index, stage in enumerate(plan.stages):
        for j, block in enumerate(stage["blocks"]):
            if isinstance(block, Mapping):
                for key in ("first_op", "last_op"):
                    if block[key] not in place:
                        raise PlanError(f"stages[{index}].blocks[{j}].{key}: the model has no op {block[key]!r}")
                for name in names[place[block["first_op"]] : place[block["last_op"]] + 1]:
                    out[name] = index
            elif block in known:
                block_of[block] = index
    for node in program.calls:
        if record(node).block in block_of:
            out.setdefault(record(node).op, block_of[record(node).block])
    last = 0  # a block that the plan does not know (another capture) stays with the ops before it
    for name in names:
        last = out.setdefault(name, last)
    return out
