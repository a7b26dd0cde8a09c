"""Cut a model into the stages of a pipeline: priced blocks over stages, and a plan's stages read back.

What enters: a plan for the devices of one stage, priced. What leaves: the plan of the pipeline. Refused, with a
`PlanError`: more stages than cuts, a pinned cut that is none; with an `InfeasibleError`: no cut fits the memory.

Blocks stay in the order of the program, so a cut is a division of their sequence. The best one has the least largest
stage, and of those the least sum of squares, with every stage inside the memory: exact by dynamic programming,

    best(s, j) = min over i < j of max(best(s - 1, i), seconds(i..j)), where bytes(i..j) of stage s fit.

A rank without a parameter would give its optimizer nothing to step, which torch refuses: cut anew where that helps.

A model of fewer blocks than stages is cut between ops.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import LogicalMesh, Mesh, with_pipeline
from autopar.passes.microbatch import divide
from autopar.plan import Plan
from autopar.program import Program, record
from autopar.rules.analyse import Analysis
from autopar.rules.call import is_getitem
from autopar.schedule.asynchronous import versions_kept
from autopar.schedule.build import KINDS, build
from autopar.schedule.check import check
from autopar.schedule.table import Schedule
from autopar.solver.decide import decide
from autopar.solver.pipeline_figures import predicted, weight_bytes
from autopar.solver.report import axis_entry
from autopar.solver.search import Found
from autopar.solver.sends import stage_sends
from autopar.solver.settings import Settings

MICROBATCHES_A_STAGE = 4
"""Unless pinned, a call has so many micro-batches for each pipeline rank, where the batch allows."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cut never divides: a block, or one op. Seconds of a whole batch, bytes of one device of a stage."""

    name: Any
    ops: tuple[str, ...]
    time_s: float
    state_bytes: float
    activation_bytes: float
    weight_bytes: float = 0.0
    """Of one more version of the weights, in asynchronous pipelines."""
    host_bytes: float = 0.0
    """Of offloaded states, in host memory."""

    @property
    def has_parameters(self) -> bool:
        return self.state_bytes + self.host_bytes > 0


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
        sizes = _pinned(pinned, cells, schedule.depth)
    else:
        share = [min(1.0, n / microbatches) for n in held]
        sizes = balance(cells, schedule.depth, limit, share, copies)
        if _bare(cells, sizes, schedule) is not None:
            sizes = balance(cells, schedule.depth, limit, share, copies, owners=True)
    if (bare := _bare(cells, sizes, schedule)) is not None:
        raise PlanError(
            f"pp={ranks}: stage {bare} of the cut {sizes} holds no parameter, so an optimizer on its devices would "
            "have nothing to step; pin fewer stages or other ones"
        )
    mesh = with_pipeline(found.mesh, topology, ranks)
    stages, at = [], 0
    seconds = []
    states, activations, versions, host = [], [], [], []
    stage_of: dict[str, int] = {}
    for s, size in enumerate(sizes):
        inside = cells[at : at + size]
        seconds.append(sum(c.time_s for c in inside))
        states.append(sum(c.state_bytes for c in inside))
        activations.append(sum(c.activation_bytes for c in inside) * min(1.0, held[s] / microbatches))
        versions.append(sum(c.weight_bytes for c in inside) * copies[s])
        host.append(sum(c.host_bytes for c in inside))
        devices = [r for r in range(mesh.size) if mesh.coordinate(r)[-1] in schedule.ranks_of(s)]
        stages.append({"blocks": [c.name for c in inside], "devices": devices})
        stage_of |= {op: s for cell in inside for op in cell.ops}
        at += size
    by_node = {n: stage_of[record(op.node).op] for n, op in analysis.ops.items() if record(op.node).op in stage_of}
    sends = stage_sends(
        analysis, divided.decisions, (microbatches, *found.mesh.sizes), by_node, mesh.axes[-1], found.built.profile
    )
    figures = predicted(plan, seconds, schedule, sends) | {
        "peak_memory_bytes": [sum(bytes_) for bytes_ in zip(states, activations, versions, strict=True)],
        "memory": {"parameters_gradients_optimizer": states, "activations": activations}
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
    seen: set[str] = set()
    cells = []
    saved = _activation_bytes(found)
    for name, (_, nodes) in zip(names, groups, strict=True):
        time_s = state = activation = copied = host = 0.0
        for node in nodes:
            first = built.representative[node.name]
            price, index = built.op_prices[first], options[built.op_choice[first]]
            time_s += float(price.compute_s[index]) + float(price.communication_s[index])
            activation += saved.get(node.name, 0.0)
            for value in analysis.ops[node.name].ins:
                if value in built.representative and value not in seen and value not in analysis.ops:
                    seen.add(value)
                    stored = built.representative[value]
                    if stored in built.storage_choice:
                        at = options[built.storage_choice[stored]]
                        copied += (weights or {}).get(value, 0.0)
                        state += float(built.storage_prices[stored].memory_bytes[at])
                        host += float(built.storage_prices[stored].host_bytes[at])
                        time_s += float(built.storage_prices[stored].update_s[at])
        cells.append(Cell(name, tuple(record(n).op for n in nodes), time_s, state, activation, copied, host))
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


def balance(
    cells: Sequence[Cell],
    stages: int,
    memory_bytes: float,
    share: Sequence[float],
    copies: Sequence[int] | None = None,
    owners: bool = False,
) -> list[int]:
    """How many cells each stage takes; exact.

    Args:    share: of the activations of a whole batch that a stage holds at once. copies: of its weights that it
             keeps beside the newest ones; None: none. owners: as few stages without a parameter as can be, before time.
    Raises:  InfeasibleError: no division fits the memory.
    """
    n, copies = len(cells), copies or [0] * stages
    time_s = list(itertools.accumulate((c.time_s for c in cells), initial=0.0))
    sums = [
        list(itertools.accumulate((getattr(c, what) for c in cells), initial=0.0))
        for what in ("state_bytes", "activation_bytes", "weight_bytes")
    ]
    owned = list(itertools.accumulate((c.has_parameters for c in cells), initial=0))
    best: list[dict[int, tuple[int, float, float, int]]] = [{0: (0, 0.0, 0.0, -1)}]
    for s in range(stages):
        row: dict[int, tuple[int, float, float, int]] = {}
        for j in range(s + 1, n - (stages - s - 1) + 1):
            for i, (bare, worst, squares, _) in best[s].items():
                state, activation, weight = (of[j] - of[i] for of in sums)
                if i >= j or state + activation * share[s] + weight * copies[s] > memory_bytes:
                    continue
                mine = time_s[j] - time_s[i]
                candidate = (bare + (owners and owned[i] == owned[j]), max(worst, mine), squares + mine * mine, i)
                if j not in row or candidate < row[j]:
                    row[j] = candidate
        best.append(row)
    if n not in best[-1]:
        least = min_peak(cells, stages, share, copies)
        raise InfeasibleError(
            f"no cut of {n} blocks into {stages} stages fits: the best one takes {least / 2**30:.2f} GiB on its "
            f"fullest stage, {(least - memory_bytes) / 2**30:.2f} GiB more than there are; "
            "pin more pipeline stages, zero=3 or recompute"
        )
    cuts, j = [], n
    for s in range(stages, 0, -1):
        i = best[s][j][-1]
        cuts.append(j - i)
        j = i
    return cuts[::-1]


def _bare(cells: Sequence[Cell], sizes: Sequence[int], schedule: Schedule) -> int | None:
    """The first stage of a rank whose stages have no parameter, which torch's optimizers refuse."""
    ends = list(itertools.accumulate(sizes, initial=0))
    owns = [any(c.has_parameters for c in cells[a:b]) for a, b in itertools.pairwise(ends)]
    for rank in range(schedule.ranks):
        mine = [s for s in range(len(owns)) if rank in schedule.ranks_of(s)]
        if not any(owns[s] for s in mine):
            return mine[0]
    return None


def min_peak(cells: Sequence[Cell], stages: int, share: Sequence[float], copies: Sequence[int] | None = None) -> float:
    """Bytes of the fullest stage of the division that keeps it smallest; arguments as `balance`."""
    n, copies = len(cells), copies or [0] * stages
    best: list[dict[int, float]] = [{0: 0.0}]
    for s in range(stages):
        row: dict[int, float] = {}
        for i, peak in best[s].items():
            states = held = 0.0
            for j in range(i, n):
                states += cells[j].state_bytes + cells[j].weight_bytes * copies[s]
                held += cells[j].activation_bytes * share[s]
                row[j + 1] = min(row.get(j + 1, math.inf), max(peak, states + held))
        best.append(row)
    return best[-1][n]


def _pinned(pinned: Any, cells: Sequence[Cell], stages: int) -> list[int]:
    """Sizes of pinned stages: a count for each, or the names of its blocks."""
    if not isinstance(pinned, (list, tuple)) or len(pinned) != stages:
        got = len(pinned) if isinstance(pinned, (list, tuple)) else pinned
        raise PlanError(f"pin stages: the schedule has {stages} stages, the pin {got}")
    sizes = [p if isinstance(p, int) else len(p) for p in pinned]
    if sum(sizes) != len(cells) or min(sizes) < 1:
        raise PlanError(
            f"pin stages={pinned}: takes {sum(sizes)} blocks of {len(cells)}, at least one a stage; the blocks are "
            f"{', '.join(str(c.name) for c in cells)}"
        )
    at = 0
    for p, size in zip(pinned, sizes, strict=True):
        inside = [c.name for c in cells[at : at + size]]
        if not isinstance(p, int) and list(p) != inside:
            raise PlanError(
                f"pin stages: {list(p)} are not the blocks {inside} that stand there in the program's order"
            )
        at += size
    return sizes


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
