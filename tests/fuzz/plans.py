"""Draw random valid plans: any strategy for each op, any storage for each parameter, any common read, any axes.

What enters: an analysed program and a mesh. What leaves: a `FuzzPlan`, plain data that a failure file can hold, and the
`Decisions` it stands for. A valid plan is one that the planner could choose; most are far from the best one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.layout import I, Layout, Placement, R, S
from autopar.mesh import LogicalMesh, Mesh, factor_axes
from autopar.passes.shard import Decisions
from autopar.rules.analyse import Analysis, Op
from autopar.rules.strategy import Strategy, axis_options, fits, named
from autopar.solver.sinks import left_layout, sink_values
from autopar.solver.storage import storage_layouts

MESHES: dict[int, tuple[tuple[str, tuple[tuple[int, ...], ...] | None], ...]] = {
    2: (("2", None),),
    3: (("3", None),),
    4: (("4", None), ("4", ((2, 2),)), ("2x2", None)),
    6: (("6", ((2, 3),)), ("6", ((3, 2),)), ("6", None)),
    8: (("8", ((2, 2, 2),)), ("2x4", None), ("2x2x2", None), ("2x4", ((2, 2), (2,)))),
    12: (("12", ((2, 3, 2),)), ("3x4", ((2, 2), (3,))), ("2x3x2", None)),
}
"""By number of ranks: topologies and how their levels divide into axes."""


@dataclass(frozen=True, slots=True)
class FuzzPlan:
    mesh: str
    free: tuple[tuple[int, ...], ...] | None
    options: Mapping[str, tuple[str, ...]]
    """By node name; ops that are not named are whole ("I")."""
    sources: Mapping[str, Layout] = field(default_factory=dict)
    reads: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[int, Layout] = field(default_factory=dict)

    @property
    def logical(self) -> LogicalMesh:
        return logical_mesh(self.mesh, self.free)

    def decisions(self, analysis: Analysis) -> Decisions | None:
        """None where an op does not offer its options (another model than the plan was drawn for)."""
        whole = ("I",) * len(self.logical.axes)
        strategies = {}
        for name, op in analysis.ops.items():
            found = strategy_of(op, self.options.get(name, whole))
            if found is None:
                return None
            strategies[name] = found
        return Decisions(strategies, self.sources, self.reads, self.outputs)


@functools.cache
def logical_mesh(shape: str, free: tuple[tuple[int, ...], ...] | None) -> LogicalMesh:
    return factor_axes(Mesh(shape), {}, free=free)


def strategy_of(op: Op, options: tuple[str, ...]) -> Strategy | None:
    return named(op.rule, op.factors, options, op.in_grads, op.out_grads)


def is_split(op: Op, options: tuple[str, ...]) -> bool:
    """Does an axis cut a factor of the op?"""
    return any(o in op.by_name for o in options)


def draw_plan(rng: random.Random, analysis: Analysis, worlds: tuple[int, ...], wanted: frozenset[str]) -> FuzzPlan:
    """One plan. wanted: ops that are split wherever the mesh allows it."""
    mesh, free = rng.choice(MESHES[rng.choice(worlds)])
    logical = logical_mesh(mesh, free)
    plan = _Plan(rng, analysis, logical, eager=rng.choice((0.35, 0.75, 0.95)), near=rng.choice((0.0, 0.5, 1.0)))
    sources = {}
    for source in analysis.program.sources:
        if source.kind == "parameter":
            layouts = storage_layouts(analysis.parts[source.node], logical)
            sources[source.node] = rng.choice(layouts) if rng.random() < 0.7 else layouts[0]
    plan.lies.update(sources)
    options = {name: plan.options_of(op, name in wanted) for name, op in analysis.ops.items()}
    return FuzzPlan(mesh, free, options, sources, plan.reads(), plan.outputs())


@dataclass
class _Plan:
    """The draw while it goes through the ops in order."""

    rng: random.Random
    analysis: Analysis
    mesh: LogicalMesh
    eager: float
    """How often an axis cuts an op that it can cut."""
    near: float
    """How often an op takes what its operands lie as."""
    lies: dict[str, Layout] = field(default_factory=dict)
    read_as: dict[str, list[Layout]] = field(default_factory=dict)

    def options_of(self, op: Op, wanted: bool) -> tuple[str, ...]:
        drawn = [self.draw(op) for _ in range(8 if self.rng.random() < self.near else 1)]
        for _ in range(12):
            if not wanted or any(is_split(op, o) for o in drawn):
                break
            drawn.append(self.draw(op, always=True))
        split = [o for o in drawn if is_split(op, o)]
        drawn = split if wanted and split else drawn
        strategies = [(o, s) for o in drawn if (s := strategy_of(op, o)) is not None]
        options, strategy = (
            min(strategies, key=lambda s: self.moves(op, s[1])) if len(strategies) > 1 else strategies[0]
        )
        self.lies.update(zip(op.outs, strategy.outs, strict=True))
        for value, layout in zip(op.ins, strategy.ins, strict=True):
            self.read_as.setdefault(value, []).append(layout)
        return options

    def draw(self, op: Op, always: bool = False) -> tuple[str, ...]:
        ranks = self.mesh.sizes
        for _ in range(20):
            options = []
            for axis in self.mesh.axes:
                offered = axis_options(op.rule, op.factors, axis.size)
                cuts = [o for o in offered if o in op.by_name]
                others = [o for o in offered if o not in op.by_name]
                cut = cuts and (always or self.rng.random() < self.eager)
                options.append(self.rng.choice(cuts if cut else others))
            if fits(options, op.by_name, ranks):
                return tuple(options)
        return ("I",) * len(ranks)

    def moves(self, op: Op, strategy: Strategy) -> int:
        whole = (I,) * len(self.mesh.axes)
        pairs = zip(op.ins, strategy.ins, strict=True)
        return sum(p != q for v, layout in pairs for p, q in zip(self.lies.get(v, whole), layout, strict=True))

    def reads(self) -> dict[str, Layout]:
        """Common reads: of some values, a layout that a consumer wants or one drawn freely."""
        found = {}
        for value, wanted in self.read_as.items():
            if self.rng.random() < 0.15:
                free = tuple(self.placement(value, axis) for axis in range(len(self.mesh.axes)))
                even = self.rng.random() < 0.5 and self.even(value, free)
                found[value] = free if even else self.rng.choice(wanted)
        return found

    def placement(self, value: str, axis: int) -> Placement:
        size = self.mesh.axes[axis].size
        cuts = [S(j) for j, n in enumerate(self.analysis.parts[value].flat) if n % size == 0 and n]
        return self.rng.choice([I, *cuts, *([R] if self.analysis.grads[value] else [])])

    def even(self, value: str, layout: Layout) -> bool:
        flat = list(self.analysis.parts[value].flat)
        for placement, axis in zip(layout, self.mesh.axes, strict=True):
            if placement.kind == "S":
                if flat[placement.part] % axis.size:
                    return False
                flat[placement.part] //= axis.size
        return True

    def outputs(self) -> dict[int, Layout]:
        return {
            i: left_layout(self.lies[v], self.analysis.parts[v])
            for i, v in sink_values(self.analysis)
            if v in self.lies and self.analysis.program.sinks[i].kind == "user" and self.rng.random() < 0.4
        }
