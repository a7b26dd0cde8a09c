"""Cut a model into the stages of a pipeline, and a plan's stages read back.

What enters: a problem solved for the devices of one stage. What leaves: the cut with the least step of a schedule, and
the plan of the pipeline. Refused, with a `PlanError`: more stages than cuts, a pinned cut that is none; with an
`InfeasibleError`: no cut fits the memory.

Blocks stay in the order of the program, so a cut is a division of their sequence (`cut`). A model of fewer
blocks than stages is cut between ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.hardware import load_profile
from autopar.errors import PlanError
from autopar.mesh import LogicalMesh, Mesh, with_pipeline
from autopar.passes.microbatch import Divided, divide
from autopar.plan import Plan
from autopar.program import Program, record
from autopar.rules.analyse import Analysis
from autopar.rules.decisions import Decisions
from autopar.schedule.asynchronous import versions_kept
from autopar.schedule.build import KINDS, build
from autopar.schedule.check import check
from autopar.schedule.table import Schedule
from autopar.solver.cells import cells_of
from autopar.solver.cut import Cell, balance_ranks, bare_stage, pinned_sizes, stage_states
from autopar.solver.decide import decide
from autopar.solver.pipeline_figures import predicted, weight_bytes
from autopar.solver.report import axis_entry, predicted_of
from autopar.solver.search import Found
from autopar.solver.sends import stage_sends
from autopar.solver.settings import Settings
from autopar.solver.step import step_of, with_idle_cores


@dataclass(frozen=True, eq=False)
class Inside:
    """What all schedules of one shape have in common. settings: with the shape as pins."""

    analysis: Analysis
    found: Found
    settings: Settings
    topology: Mesh
    mesh: LogicalMesh
    """With the pipeline as last axis."""
    decisions: Decisions
    divided: Divided

    @property
    def ranks(self) -> int:
        return self.settings.pins.degrees.get("pp", 1)


@dataclass(frozen=True, eq=False)
class Cut:
    """A pipeline: the cells of each stage, the schedule, and what a plan predicts of them."""

    inside: Inside
    schedule: Schedule
    virtual: int
    stages: tuple[tuple[Cell, ...], ...]
    predicted: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        return float(self.predicted["step_time_s"])


def stage_inside(
    analysis: Analysis, found: Found, settings: Settings, topology: Mesh, sinks: Mapping[int, str]
) -> Inside:
    """Raises:  PlanError: a value needs the whole batch, or a micro-batch leaves ranks without rows."""
    decisions = decide(found.built, found.solution.options, sinks)
    divided = divide(analysis, decisions, found.mesh, found.built.roles.batch, settings.pieces)
    mesh = with_pipeline(found.mesh, topology, settings.pins.degrees.get("pp", 1))
    return Inside(analysis, found, settings, topology, mesh, decisions, divided)


def cut(inside: Inside, name: str, virtual: int) -> Cut:
    """The stages for a schedule with `virtual` stages a rank: as pinned, or the least largest stage within the memory.

    Raises:  PlanError: more stages than cuts, a rank without parameters; InfeasibleError: no cut fits the memory.
    """
    analysis, found, settings = inside.analysis, inside.found, inside.settings
    microbatches = settings.pieces
    schedule = build(name, inside.ranks, virtual, microbatches)
    held = held_by_stage(schedule, found.built.roles.rows)
    copies = [versions_kept(schedule, s) - 1 for s in range(schedule.depth)]
    weights = {}
    if schedule.asynchronous:
        weights = weight_bytes(analysis, inside.decisions, found.mesh.sizes, settings.pins.zero)
    cells = cells_of(analysis, found, schedule.depth, weights)
    pinned = settings.pins.given.get("stages")
    if pinned is not None:
        sizes = pinned_sizes(pinned, cells, schedule.depth)
    else:
        sizes = balance_ranks(cells, schedule, settings.memory_bytes, held, copies)
    if (bare := bare_stage(cells, sizes, schedule)) is not None:
        raise PlanError(
            f"pp={inside.ranks}: stage {bare} of the cut {sizes} holds no parameter, so an optimizer on its devices "
            "would have nothing to step; pin fewer stages or other ones"
        )
    firsts = list(itertools.accumulate(sizes, initial=0))
    stages = tuple(tuple(cells[a:b]) for a, b in itertools.pairwise(firsts))
    states = [stage_states(cells, at, size) for at, size in zip(firsts, sizes, strict=False)]
    stage_of = {op: s for s, stage in enumerate(stages) for cell in stage for op in cell.ops}
    by_node = {n: stage_of[record(op.node).op] for n, op in analysis.ops.items() if record(op.node).op in stage_of}
    sends = stage_sends(
        analysis,
        inside.divided.decisions,
        (microbatches, *found.mesh.sizes),
        by_node,
        inside.mesh.axes[-1],
        schedule,
        found.built.profile,
    )
    by_stage = {
        "parameters_gradients_optimizer": [state.device for state in states],
        "activations": [
            sum(c.activation_bytes for c in stage) * share for stage, share in zip(stages, held, strict=True)
        ],
        "gathered": [max(c.passing_bytes for c in stage) for stage in stages],
        "weight_versions": [state.copy * kept for state, kept in zip(states, copies, strict=True)],
    }
    peaks = [sum(parts) for parts in zip(*by_stage.values(), strict=True)]
    host = [state.host for state in states]
    kept = {"parameters_gradients_optimizer", "activations"} | ({"weight_versions"} if schedule.asynchronous else set())
    memory = {name: sizes for name, sizes in by_stage.items() if name in kept or any(sizes)}
    step = step_of(found.built, found.solution.options, found.solution.objective_s)
    figures = predicted(predicted_of(analysis, found, settings), step, stages, schedule, sends) | {
        "peak_memory_bytes": peaks,
        "memory": memory | ({"host": host} if any(host) else {}),
    }
    crowding = load_profile(inside.topology.device).crowding(inside.topology.levels[0])
    return Cut(inside, schedule, virtual, stages, with_idle_cores(figures, crowding) if crowding > 1 else figures)


def held_by_stage(schedule: Schedule, rows: int) -> list[float]:
    """Share of a batch whose activations each stage holds at once, in the fuller replica. rows: of the batch, which
    micro-batches may divide unevenly.
    """
    counts = check(schedule).in_flight_by_stage
    most = (max(counts[s :: schedule.depth]) for s in range(schedule.depth))
    return [min(1.0, n * largest_share(rows, schedule.microbatches)) for n in most]


def largest_share(rows: int, microbatches: int) -> float:
    """Of a batch, that the largest micro-batch is."""
    return -(-rows // microbatches) / rows


def held_at_once(schedule: Schedule, rows: int, of_all: Callable[[Iterable[float]], float] = max) -> float:
    """The same of a rank, as a share of its stages' activations: of the fullest, or what `of_all` makes of all."""
    shares = held_by_stage(schedule, rows)
    ranks = map(schedule.held, range(schedule.ranks))
    return of_all([sum(shares[s % schedule.depth] for s in mine) / len(mine) for mine in ranks])


def default_virtual(name: str, given: Mapping[str, Any]) -> int:
    """Stages a rank, as pinned or as the schedule is made for."""
    return int(given.get("virtual_stages", 0)) or KINDS[name].virtual or 2


def pipeline_plan(plan: Plan, cut: Cut, pins: Mapping[str, Any]) -> Plan:
    """The plan of a pipeline whose stages are planned as `plan` (made for the devices of one stage) says."""
    inside, schedule = cut.inside, cut.schedule
    mesh = inside.mesh
    axis = axis_entry(mesh.axes[-1], inside.found.built)
    stages = [
        {
            "blocks": [c.name for c in stage],
            "devices": [r for r in range(mesh.size) if mesh.coordinate(r)[-1] in schedule.ranks_of(s)],
        }
        for s, stage in enumerate(cut.stages)
    ]
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
        mesh={"shape": list(inside.topology.shape), "device": inside.topology.device},
        degrees={**plan.degrees, "pp": inside.ranks},
        axes=(*plan.axes, axis),
        microbatches=schedule.microbatches,
        schedule=schedule.name,
        virtual_stages=cut.virtual,
        stages=tuple(stages),
        ops=ops,
        predicted=cut.predicted,
        pins=dict(pins),
    )


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
