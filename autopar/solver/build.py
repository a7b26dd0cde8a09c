"""From a program and a mesh to the solver's problem, and from its solution to decisions.

Choices   one a *representative* op: its strategy (equal blocks share one); one a parameter: its storage; one a value with several readers:
          the layout in which they read it, so that a value used three times pays one all-reduce.
Edges     producer -> reader (or common read -> reader): the routes between their layouts, times the number of equal blocks.
Memory    parameters with gradients and optimizer states, and what autograd keeps, as read; one row a device.

What enters: an `Analysis`, a logical mesh, a profile, pins. What leaves: `Built`: the `Problem`, and `decide(options)` that
turns its solution into the `Decisions` of the shard pass.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.compute import element_bytes
from autopar.cost.hardware import Profile
from autopar.cost.price import OpPrice, StoragePrice, price_op, price_storage
from autopar.cost.route import Routes, routes
from autopar.cost.saved import saved_values
from autopar.errors import PlanError
from autopar.layout import I, Layout, Parts, S, largest_local_parts
from autopar.mesh import LogicalMesh
from autopar.pins import Pins
from autopar.program import record
from autopar.rules.analyse import Analysis, Op
from autopar.rules.strategy import Strategy, strategies
from autopar.solver.problem import Choice, Edge, Problem
from autopar.solver.roles import Roles, is_attention

OpKey = str
ValueKey = tuple[str, int]
"""(representative op or source, output index)."""


@dataclass(frozen=True, eq=False)
class Fixed:
    """Decisions by stable names: options of ops, placements (as text) of parameters and of common reads."""

    ops: Mapping[str, tuple[str, ...]]
    params: Mapping[str, tuple[str, ...]]
    reads: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Settings:
    """What the user asked for, beside the model and the mesh."""

    pins: Pins
    memory_bytes: float
    optimizer: str | int = "adamw"
    precision: str | None = None
    batch_dims: Mapping[str, int] | None = None
    recompute: str = "none"
    """What the repeated blocks recompute in the backward: "none", "selective" (everything but products), "full"."""
    fixed: Fixed | None = None
    """Decisions of a plan that is given; what it does not name is chosen around it."""


@dataclass(frozen=True, eq=False)
class Built:
    """The problem, and what its choices stand for."""

    problem: Problem
    analysis: Analysis
    mesh: LogicalMesh
    profile: Profile
    roles: Roles
    representative: Mapping[str, str]
    """Op or source name -> the one that decides for it."""
    op_choice: Mapping[str, int]
    op_strategies: Mapping[str, list[Strategy]]
    op_prices: Mapping[str, OpPrice]
    storage_choice: Mapping[str, int]
    storage_layouts: Mapping[str, list[Layout]]
    storage_prices: Mapping[str, StoragePrice]
    read_choice: Mapping[str, int]
    """Value name -> choice."""
    read_layouts: Mapping[int, list[Layout]]


def compute_dtype(dtype: torch.dtype, precision: str | None) -> torch.dtype:
    """The dtype a tensor has while computing under a precision."""
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    return lower if lower is not None and dtype == torch.float32 else dtype


def build(
    analysis: Analysis, mesh: LogicalMesh, profile: Profile, settings: Settings, sink_layouts: Mapping[int, str]
) -> Built:
    """Set up the choice problem. sink_layouts: for each sink "I" (gathered) or "left" (where it lies)."""
    return _Builder(analysis, mesh, profile, settings, sink_layouts).build()


class _Builder:
    def __init__(
        self, analysis: Analysis, mesh: LogicalMesh, profile: Profile, settings: Settings, sinks: Mapping[int, str]
    ) -> None:
        self.analysis, self.mesh, self.profile, self.settings, self.sinks = analysis, mesh, profile, settings, sinks
        self.roles = Roles(analysis, mesh, settings.pins, settings.batch_dims or {})
        self.invariant: Layout = (I,) * len(mesh.axes)
        self.widest = max(
            (analysis.dtypes[s.node].itemsize for s in analysis.program.sources if s.trainable), default=0
        )
        self.sources = analysis.program.by_node
        self.representative = representatives(analysis)
        self.counts: dict[str, int] = defaultdict(int)
        for name in self.representative.values():
            self.counts[name] += 1
        repeated = [c for c in analysis.program.classes if len(c.blocks) > 1]
        self.block_of = {
            n: block for c in repeated for block, nodes in zip(c.blocks, c.nodes, strict=True) for n in nodes
        }
        self.repeated = frozenset(self.block_of)
        self.saved = saved_values(analysis, self.roles.weights)
        self.names: list[str] = []
        self.costs: list[NDArray[np.float64]] = []
        self.memories: list[NDArray[np.float64]] = []
        self.layouts: list[dict[int, list[Layout]]] = []
        """For each choice: output index -> layout of each option."""
        self.edges: list[Edge] = []
        self.op_choice: dict[str, int] = {}
        self.op_strategies: dict[str, list[Strategy]] = {}
        self.op_prices: dict[str, OpPrice] = {}
        self.storage_choice: dict[str, int] = {}
        self.storage_layouts: dict[str, list[Layout]] = {}
        self.storage_prices: dict[str, StoragePrice] = {}
        self.read_choice: dict[str, int] = {}
        self.read_layouts: dict[int, list[Layout]] = {}

    def build(self) -> Built:
        for name, op in self.analysis.ops.items():
            if self.representative[name] == name:
                self.add_op(op)
        for source in self.analysis.program.sources:
            if source.kind == "parameter" and self.representative[source.node] == source.node:
                self.add_storage(source.node, source.path, source.trainable)
        self.add_values()
        self.add_sinks()
        choices = tuple(Choice(n, c, m) for n, c, m in zip(self.names, self.costs, self.memories, strict=True))
        problem = Problem(choices, tuple(self.edges), float(self.settings.memory_bytes), self.covers())
        return Built(
            problem, self.analysis, self.mesh, self.profile, self.roles, self.representative, self.op_choice, self.op_strategies, self.op_prices,
            self.storage_choice, self.storage_layouts, self.storage_prices, self.read_choice, self.read_layouts,
        )  # fmt: skip

    def add_choice(
        self, name: str, cost_s: NDArray[np.float64], memory: NDArray[np.float64], layouts: dict[int, list[Layout]]
    ) -> int:
        self.names.append(name)
        self.costs.append(cost_s)
        self.memories.append(memory)
        self.layouts.append(layouts)
        return len(self.names) - 1

    # ops

    def add_op(self, op: Op) -> None:
        found = strategies(
            op.rule, op.factors, self.mesh.sizes, in_grads=op.in_grads, out_grads=op.out_grads,
            allowed=lambda axis, option, factor: self.roles.allowed(op, axis, option, factor),
        )  # fmt: skip
        found = [s for s in found if self.exact(op, s)] or found
        found = self.keep_fixed(op, self.keep_required(op, found))
        price = price_op(
            op.rule,
            op.factors,
            found,
            [self.operand(v) for v in op.ins],
            [self.operand(v) for v in op.outs],
            op.in_grads,
            self.mesh,
            self.profile,
            is_attention(op),
        )
        count = self.counts[op.name]
        by_output = {i: [s.outs[i] for s in found] for i in range(len(op.outs))}
        seconds = price.compute_s + price.communication_s + (price.forward_s if self.recomputed(op) else 0.0)
        self.op_choice[op.name] = self.add_choice(record(op.node).op, seconds * count, np.zeros(len(found)), by_output)
        self.op_strategies[op.name], self.op_prices[op.name] = found, price

    def exact(self, op: Op, strategy: Strategy) -> bool:
        """No sums of parts in a narrower dtype than the parameters' own: a float64 model with float32 norms keeps float64's digits.

        A sum to a scalar (a loss) is the exception: without it no batch could be cut.
        """
        narrow_in = [self.narrow(v) and g for v, g in zip(op.ins, op.in_grads, strict=True)]
        narrow_out = [self.narrow(v) and g for v, g in zip(op.outs, op.out_grads, strict=True)]
        if any(n and any(p.kind in "RP" for p in layout) for n, layout in zip(narrow_in, strategy.ins, strict=True)):
            return False
        for value, narrow, layout in zip(op.outs, narrow_out, strategy.outs, strict=True):
            if narrow and any(p.kind == "R" or (p.kind == "P" and self.analysis.parts[value].dims) for p in layout):
                return False
        return True

    def narrow(self, value: str) -> bool:
        return self.analysis.dtypes[value].itemsize < self.widest

    def keep_required(self, op: Op, found: list[Strategy]) -> list[Strategy]:
        for role in ("dp", "tp", "cp"):
            wanted = self.roles.required(op, role)
            on = [a for a, axis in enumerate(self.mesh.axes) if axis.role == role]
            best = max((sum(s.options[a] in wanted for a in on) for s in found), default=0) if wanted else 0
            if best:
                found = [s for s in found if sum(s.options[a] in wanted for a in on) == best]
        return found

    def keep_fixed(self, op: Op, found: list[Strategy]) -> list[Strategy]:
        """The plan's strategy for this op, where it names one that still exists."""
        fixed = self.settings.fixed
        name = record(op.node).op
        options = fixed.ops.get(name) if fixed is not None else None
        for option in options or ():
            letter = option.partition(".")[0]
            if letter not in op.rule.letters and not re.fullmatch(r"I|R|P\d+", option):
                known = ", ".join(("I", "R", *op.rule.letters))
                raise PlanError(f'ops["{name}"].strategy: {option!r} is no option of {op.node.target}; it has {known}')
        return [s for s in found if s.options == options] or found

    def recomputed(self, op: Op) -> bool:
        """Does the backward run this op's forward again?"""
        level = self.settings.recompute
        return op.name in self.repeated and (level == "full" or (level == "selective" and not op.rule.flop))

    def kept_count(self, producer: ValueKey, readers: Sequence[str], count: int) -> int:
        """How many of `count` equal blocks' values live at once: those that are recomputed live one block at a time."""
        op = self.analysis.ops.get(producer[0])
        inside = (
            op is not None
            and op.name in self.repeated
            and all(self.block_of.get(r) == self.block_of.get(op.name) for r in readers)
        )
        return 1 if inside and op is not None and self.recomputed(op) else count

    def operand(self, value: str) -> tuple[Parts, torch.dtype]:
        return self.analysis.parts[value], compute_dtype(self.analysis.dtypes[value], self.settings.precision)

    # parameters

    def add_storage(self, node: str, path: str, trainable: bool) -> None:
        layouts = storage_layouts(self.analysis.parts[node], self.mesh)
        layouts = [x for x in layouts if self.storage_allowed(node, path, x)]
        if not layouts:
            raise PlanError(f"no way to store parameter {path} keeps the pins {dict(self.settings.pins.given)}")
        price = price_storage(
            self.analysis.parts[node],
            self.analysis.dtypes[node],
            trainable,
            layouts,
            self.mesh,
            self.profile,
            self.settings.optimizer,
            self.settings.precision,
        )
        count = self.counts[node]
        self.storage_choice[node] = self.add_choice(
            path, price.update_s * count, price.memory_bytes * count, {0: layouts}
        )
        self.storage_layouts[node], self.storage_prices[node] = layouts, price

    def storage_allowed(self, node: str, path: str, layout: Layout) -> bool:
        """ZeRO 3 cuts every parameter on the data axes where it can be cut; pinned layouts hold."""
        pinned = self.settings.pins.layout_of(path)
        parts = self.analysis.parts[node]
        if self.settings.fixed is not None and path in self.settings.fixed.params:
            return tuple(map(parts.name, layout)) == self.settings.fixed.params[path]
        for axis, placement in zip(self.mesh.axes, layout, strict=True):
            for key in (axis.name, axis.role):
                if key in pinned and parts.name(placement) != pinned[key].replace("R", "I"):
                    return False
        if self.settings.pins.zero == 3 and not pinned:
            best = max(self.cut_over_data(x) for x in storage_layouts(parts, self.mesh))
            return self.cut_over_data(layout) == best
        return True

    def cut_over_data(self, layout: Layout) -> int:
        """Ranks over which the data axes (pinned dp, or free axes) cut a stored parameter."""
        out = 1
        for axis, placement in zip(self.mesh.axes, layout, strict=True):
            if axis.role in ("dp", "cp", None) and placement.kind == "S":
                out *= axis.size
        return out

    # values: who reads them

    def add_values(self) -> None:
        groups: dict[tuple[ValueKey, tuple[tuple[str, int], ...]], list[str]] = defaultdict(list)
        for value, readers in self.analysis.users.items():
            seen = tuple(sorted({(self.representative[op], position) for op, position in readers}))
            groups[self.producer(value), seen].append(value)
        for (producer, readers), values in groups.items():
            self.add_group(producer, readers, values)

    def producer(self, value: str) -> ValueKey:
        name, _, index = value.partition(".")
        return self.representative[name], int(index or 0)

    def add_group(self, producer: ValueKey, readers: tuple[tuple[str, int], ...], values: list[str]) -> None:
        """One value (of each of some equal blocks) and all that read it."""
        value, count = values[0], len(values)
        ends = [
            (self.op_choice[op], [s.ins[position] for s in self.op_strategies[op]], op, position)
            for op, position in readers
        ]
        saved = value in self.saved
        kept = self.kept_count(producer, [op for op, _ in readers], count)
        source = self.source_choice(producer)
        if source is None:  # an input or a buffer: invariant, cut for nothing
            for choice, layouts, _, _ in ends:
                if saved:
                    self.memories[choice] = self.memories[choice] + self.saved_bytes(value, layouts) * kept
            return
        start, start_layouts = source
        used = self.used_parts([*start_layouts, *(x for _, layouts, _, _ in ends for x in layouts)])
        routing = self.routes(value, used, 2 if self.moved_again(value, readers) else 1)
        if len(ends) > 1:
            domain = sorted({x for _, layouts, _, _ in ends for x in layouts} | set(start_layouts))
            domain = self.fixed_read(value, domain) or domain
            cost = np.zeros(len(domain))
            memory = self.saved_bytes(value, domain) * kept if saved else np.zeros(len(domain))
            read = self.add_choice(f"read of {value}", cost, memory, {0: domain})
            self.read_layouts[read] = domain
            for name in values:
                self.read_choice[name] = read
            self.add_edge(start, start_layouts, read, domain, routing, count, producer)
            start, start_layouts = read, domain
        elif saved:
            choice, layouts, _, _ = ends[0]
            self.memories[choice] = self.memories[choice] + self.saved_bytes(value, layouts) * kept
        for choice, layouts, _, _ in ends:
            self.add_edge(start, start_layouts, choice, layouts, routing, count, producer if len(ends) == 1 else None)

    def fixed_read(self, value: str, domain: list[Layout]) -> list[Layout]:
        """The plan's common read of this value, where it still exists."""
        wanted = (
            self.settings.fixed.reads.get(stable_name(self.analysis, value))
            if self.settings.fixed is not None
            else None
        )
        parts = self.analysis.parts[value]
        return [x for x in domain if wanted is not None and tuple(map(parts.name, x)) == wanted]

    def source_choice(self, producer: ValueKey) -> tuple[int, list[Layout]] | None:
        name, index = producer
        if name in self.op_choice:
            choice = self.op_choice[name]
            return choice, self.layouts[choice][index]
        if name in self.storage_choice:
            return self.storage_choice[name], self.storage_layouts[name]
        return None

    def saved_bytes(self, value: str, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        parts, dtype = self.operand(value)
        sizes = {x: largest_local_parts(parts, x, self.mesh.sizes).numel * element_bytes(dtype) for x in set(layouts)}
        return np.array([sizes[x] for x in layouts], dtype=np.float64)

    def used_parts(self, layouts: Sequence[Layout]) -> tuple[int, ...]:
        return tuple(sorted({p.part for layout in layouts for p in layout if p.kind == "S"}))

    def moved_again(self, value: str, readers: Sequence[tuple[str, int]]) -> bool:
        """Is the transition made again in the backward? Gathered parameters are; so is all that a block recomputes."""
        return value in self.roles.weights or (
            self.settings.recompute == "full" and all(op in self.repeated for op, _ in readers)
        )

    def routes(self, value: str, used: tuple[int, ...], forwards: int = 1) -> Routes:
        parts, dtype = self.operand(value)
        return routes(parts, element_bytes(dtype), self.analysis.grads[value], used, self.mesh, self.profile, forwards)

    def add_edge(
        self,
        source: int,
        source_layouts: list[Layout],
        target: int,
        target_layouts: list[Layout],
        routing: Routes,
        count: int,
        producer: ValueKey | None,
    ) -> None:
        rows, row_of = _distinct(source_layouts)
        columns, column_of = _distinct(target_layouts)
        cost = routing.cost_s[np.ix_([routing.index[x] for x in rows], [routing.index[x] for x in columns])] * count
        if producer is not None and producer[0] in self.storage_choice:
            cost = cost + self.forbidden_gathers(rows, columns)
        self.edges.append(Edge(source, target, row_of, column_of, cost))

    def forbidden_gathers(self, rows: Sequence[Layout], columns: Sequence[Layout]) -> NDArray[np.float64]:
        """ZeRO 0 stores parameters as they are used: no gathers on the data axes."""
        out = np.zeros((len(rows), len(columns)))
        if self.settings.pins.zero == 0:
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    if any(p.kind == "S" and q.kind != "S" for p, q in zip(row, column, strict=True)):
                        out[i, j] = np.inf
        return out

    # sinks and covers

    def add_sinks(self) -> None:
        """Outputs that must be invariant pay the way there; others must not be left partial."""
        for i, value in sink_values(self.analysis):
            source = self.source_choice(self.producer(value))
            if source is None:
                continue
            choice, layouts = source
            routing = self.routes(value, self.used_parts(layouts))
            left = self.sinks.get(i, "I") == "left"
            targets = [left_layout(x, self.analysis.parts[value]) if left else self.invariant for x in layouts]
            self.costs[choice] = self.costs[choice] + np.array(
                [routing.between(x, y) for x, y in zip(layouts, targets, strict=True)]
            )

    def covers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Each pinned axis must cut at least one op; sp asks for an op cut along the sequence on a tp axis."""
        out = []
        for a, axis in enumerate(self.mesh.axes):
            if axis.role is None:
                continue
            row = [
                (self.op_choice[name], i)
                for name, found in self.op_strategies.items()
                for i, s in enumerate(found)
                if s.options[a] in self.analysis.ops[name].by_name
            ]
            if not row:
                raise PlanError(
                    f"pin {axis.role}={self.settings.pins.degrees[axis.role]} cannot be kept: no op of the model can be cut in {axis.size} on axis '{axis.name}'"
                )
            if not any(
                len(found) and all(s.options[a] in self.analysis.ops[n].by_name for s in found)
                for n, found in self.op_strategies.items()
            ):
                out.append(tuple(row))
        if self.settings.pins.sp:
            on = [a for a, axis in enumerate(self.mesh.axes) if axis.role == "tp"]
            row = [
                (self.op_choice[name], i)
                for name, found in self.op_strategies.items()
                for i, s in enumerate(found)
                if any(self.cuts_sequence(name, s.options[a]) for a in on)
            ]
            if not row:
                raise PlanError("pin sp=True cannot be kept: no op can be cut along the sequence on the tp axis")
            out.append(tuple(row))
        return tuple(out)

    def cuts_sequence(self, name: str, option: str) -> bool:
        op = self.analysis.ops[name]
        return option in op.by_name and any(op.out_grads) and self.roles.kind(op, op.by_name[option]) == "cp"


def stable_name(analysis: Analysis, value: str) -> str:
    """Name of a value that does not depend on fx's numbering: `<op>` or `<op>:<output>`; a parameter's own name."""
    name, _, index = value.partition(".")
    if name in analysis.ops:
        return record(analysis.ops[name].node).op + (f":{index}" if index else "")
    return analysis.program.by_node[name].path


def left_layout(layout: Layout, parts: Parts) -> Layout:
    """How an output lies when it is left where it is, as a DTensor: shards of undivided dims stay, all else becomes invariant.

    Shards inside a divided dim are gathered, since users expect the rows of a shard to be neighbours.
    """
    whole = {p for p in layout if p.kind == "S" and len(parts.dims[parts.dim_of(p.part)]) == 1}
    return tuple(p if p in whole else I for p in layout)


def sink_values(analysis: Analysis) -> list[tuple[int, str]]:
    """(sink index, value name) of the graph's tensor outputs."""
    from torch.fx import Node
    from torch.utils import _pytree as pytree

    from autopar.rules.analyse import value_of

    leaves = pytree.tree_leaves(analysis.program.output.args[0])
    return [(i, value_of(leaf)) for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]


def storage_layouts(parts: Parts, mesh: LogicalMesh) -> list[Layout]:
    """Ways to store a parameter: cut in at most one part a dim, in shards that a DTensor can express.

    Even cuts of any part are strided shards; an uneven cut needs a dim of one part.
    """
    found: list[Layout] = [()]
    for axis in mesh.axes:
        longer = []
        for layout in found:
            longer.append((*layout, I))
            for part, size in enumerate(parts.flat):
                dim = parts.dim_of(part)
                others = [p.part for p in layout if p.kind == "S" and parts.dim_of(p.part) == dim]
                if any(p != part for p in others):
                    continue
                ranks = axis.size * int(
                    np.prod([a.size for a, p in zip(mesh.axes, layout, strict=False) if p == S(part)])
                )
                single = len([n for n in parts.dims[dim] if n > 1]) == 1
                even = size > 1 and size % ranks == 0
                uneven = size > 1 and single and not others and -(-size // ranks) * ranks <= 2 * size
                if (even and (not others or single)) or uneven:
                    longer.append((*layout, S(part)))
        found = longer
    return found


def representatives(analysis: Analysis) -> dict[str, str]:
    """Op or source -> the first of its equals: the same position in another block of the class, with equal factors."""
    out: dict[str, str] = {}
    block_of: dict[str, tuple[int, int]] = {}
    for c, cls in enumerate(analysis.program.classes):
        for b, names in enumerate(cls.nodes):
            for position, name in enumerate(names):
                first = cls.nodes[0][position]
                if name in analysis.ops and first in analysis.ops and _alike(analysis, name, first):
                    out[name] = first
                block_of[name] = (c, b)
    for name in analysis.ops:
        out.setdefault(name, name)
    by_use: dict[object, str] = {}
    for source in analysis.program.sources:
        users = analysis.users.get(source.node, [])
        key: object = source.node
        if source.kind == "parameter" and users and len({block_of.get(op) for op, _ in users}) == 1:
            key = (
                source.trainable,
                analysis.parts[source.node],
                analysis.dtypes[source.node],
                tuple(sorted((out[op], p) for op, p in users)),
            )
        out[source.node] = by_use.setdefault(key, source.node)
    return out


def _alike(analysis: Analysis, a: str, b: str) -> bool:
    x, y = analysis.ops[a], analysis.ops[b]
    return (
        x.factors == y.factors
        and x.in_grads == y.in_grads
        and [analysis.parts[v] for v in (*x.ins, *x.outs)] == [analysis.parts[v] for v in (*y.ins, *y.outs)]
    )


def _distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], NDArray[np.int64]]:
    index: dict[Layout, int] = {}
    of = np.array([index.setdefault(x, len(index)) for x in layouts], dtype=np.int64)
    return list(index), of
