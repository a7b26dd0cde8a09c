"""From a program and a mesh to the solver's problem, and from its solution to decisions.

Choices   one a *representative* op: its strategy (equal blocks share one); one a parameter: its storage; one a value
          with several readers: the layout in which they read it, so that three readers pay one all-reduce.
Edges     producer -> reader (or common read -> reader): the routes between their layouts, once for each equal block.
Memory    parameters with gradients and optimizer states, and what autograd keeps, as read; one row a device.

What enters: an `Analysis`, a logical mesh, a profile, settings. What leaves: `Built`: the `Problem` and what its
choices stand for; `decide.decide` turns a solution into the `Decisions` of the shard pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.compute import element_bytes, memory_bound_s
from autopar.cost.fitted import Software, software_of
from autopar.cost.hardware import Profile
from autopar.cost.price import OpPrice, Pieces, StoragePrice, price_op, price_storage
from autopar.cost.route import Routes, routes
from autopar.cost.saved import saved_values
from autopar.cost.traffic import op_name, traffic
from autopar.layout import I, Layout
from autopar.mesh import LogicalMesh
from autopar.program import record
from autopar.rules.analyse import Analysis, Op
from autopar.rules.strategy import Strategy
from autopar.solver.equal import representatives
from autopar.solver.gathers import Gathers, Sizes, StoredEdge
from autopar.solver.heads import heads_of
from autopar.solver.options import Options
from autopar.solver.problem import Choice, Edge, Floats, Problem
from autopar.solver.roles import Roles, is_attention
from autopar.solver.settings import Settings
from autopar.solver.sinks import left_layout, sink_values, stable_name
from autopar.solver.storage import allowed_storage

LOSS_BYTES = 4
"""[derived] bytes of a logit at the peak of the loss, beside the logit: an fp32 copy that its gradient overwrites."""

ValueKey = tuple[str, int]
"""(representative op or source, output index)."""


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
    software: Software
    stored_edges: tuple[StoredEdge, ...]
    loss_bytes: Mapping[str, Floats]
    """What a loss needs while it runs, of each option."""
    recomputed: frozenset[str]
    """Ops that the backward runs again."""
    launched: frozenset[str]
    """Ops that begin a kernel."""


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
        self.options = Options(analysis, mesh, settings, self.roles)
        self.invariant: Layout = (I,) * len(mesh.axes)
        self.representative = representatives(analysis)
        self.counts: dict[str, int] = defaultdict(int)
        for name in self.representative.values():
            self.counts[name] += 1
        repeated = [c for c in analysis.program.classes if len(c.blocks) > 1]
        self.block_of = {
            n: block for c in repeated for block, nodes in zip(c.blocks, c.nodes, strict=True) for n in nodes
        }
        self.again = frozenset(name for name, op in analysis.ops.items() if self.recomputed(op))
        self.software = settings.software or software_of(profile)
        self.sizes = Sizes(analysis, mesh, settings)
        self.gathers = Gathers(self.sizes, self.roles, self.software, self.counts)
        self.moves = traffic(analysis, self.software.fused or not self.software.counted)
        self.saved = dict(saved_values(analysis, self.roles.weights, self.again, self.block_of))
        self.heads = heads_of(analysis) if settings.loss_chunks > 1 else {}
        for head in self.heads.values():
            for value in head.values:  # made again in the backward, a part at a time
                self.saved.pop(value, None)
        self.names: list[str] = []
        self.costs: list[Floats] = []
        self.memories: list[Floats] = []
        self.layouts: list[dict[int, list[Layout]]] = []
        """For each choice: output index -> layout of each option."""
        self.edges: list[Edge] = []
        self.stored_edges: list[StoredEdge] = []
        self.op_choice: dict[str, int] = {}
        self.op_strategies: dict[str, list[Strategy]] = {}
        self.op_prices: dict[str, OpPrice] = {}
        self.storage_choice: dict[str, int] = {}
        self.storage_layouts: dict[str, list[Layout]] = {}
        self.storage_prices: dict[str, StoragePrice] = {}
        self.loss_bytes: dict[str, Floats] = {}
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
        problem = Problem(
            choices,
            tuple(self.edges),
            float(self.settings.memory_bytes),
            (*self.options.covers(self.op_choice, self.op_strategies), *self.stored_covers()),
        )
        return Built(
            problem=problem,
            analysis=self.analysis,
            mesh=self.mesh,
            profile=self.profile,
            roles=self.roles,
            representative=self.representative,
            op_choice=self.op_choice,
            op_strategies=self.op_strategies,
            op_prices=self.op_prices,
            storage_choice=self.storage_choice,
            storage_layouts=self.storage_layouts,
            storage_prices=self.storage_prices,
            read_choice=self.read_choice,
            read_layouts=self.read_layouts,
            software=self.software,
            stored_edges=tuple(self.stored_edges),
            loss_bytes=self.loss_bytes,
            recomputed=self.again | {h.product for h in self.heads.values()},
            launched=frozenset(name for name, moves in self.moves.items() if moves.launches),
        )

    def add_choice(self, name: str, cost_s: Floats, memory: Floats, layouts: dict[int, list[Layout]]) -> int:
        self.names.append(name)
        self.costs.append(cost_s)
        self.memories.append(memory)
        self.layouts.append(layouts)
        return len(self.names) - 1

    # ops

    def add_op(self, op: Op) -> None:
        found = self.options.of(op)
        price = price_op(
            op,
            found,
            [self.sizes.operand(v) for v in op.ins],
            [self.sizes.operand(v) for v in op.outs],
            self.moves[op.name],
            self.mesh,
            self.profile,
            self.software,
            is_attention(op),
            self.pieces(op),
        )
        count = self.counts[op.name]
        by_output = {i: [s.outs[i] for s in found] for i in range(len(op.outs))}
        seconds = price.compute_s + price.communication_s + (price.forward_s if self.recomputed(op) else 0.0)
        memory = np.zeros(len(found))
        if op_name(op) == "cross_entropy_loss" and any(op.in_grads):  # no other activation has been freed by then
            elements = self.sizes.local_bytes(op.ins[0], [s.ins[0] for s in found]) / element_bytes(
                self.sizes.operand(op.ins[0])[1]
            )
            chunks = self.settings.loss_chunks if op.name in self.heads else 1
            stored = element_bytes(self.sizes.operand(op.ins[0])[1]) if chunks > 1 else 0
            memory = self.loss_bytes[op.name] = (LOSS_BYTES + stored) * elements / chunks * self.settings.largest
        elif op.name in self.heads:
            seconds = seconds + price.forward_s + self.added_s(op, found)
            memory = self.summed_bytes(op, found)
        self.op_choice[op.name] = self.add_choice(record(op.node).op, seconds * count, memory, by_output)
        self.op_strategies[op.name], self.op_prices[op.name] = found, price

    def pieces(self, op: Op) -> Pieces | None:
        """Into which micro-batches divide an op; None where there are none, or it has no rows of the batch."""
        rows = next((f for f in op.factors if self.roles.kind(op, f) == "dp"), None)
        count = min(self.settings.pieces, rows.size) if rows is not None else 1
        return Pieces(count, rows) if rows is not None and count > 1 else None

    def added_s(self, op: Op, found: Sequence[Strategy]) -> Floats:
        """Seconds in which the chunks' gradients of a head's weight are added up in at least float32."""
        width = element_bytes(self.sizes.operand(op.ins[1])[1])
        elements = self.sizes.local_bytes(op.ins[1], [s.ins[1] for s in found]) / width
        moved = self.settings.loss_chunks * elements * (width + 2 * max(width, 4))
        return np.asarray(memory_bound_s(moved, self.profile))

    def summed_bytes(self, op: Op, found: Sequence[Strategy]) -> Floats:
        """Of the float32 sum in which chunks of rows add up the gradient of a head's narrower weight."""
        dtype = self.sizes.operand(op.ins[1])[1]
        if element_bytes(dtype) >= 4:
            return np.zeros(len(found))
        return self.sizes.local_bytes(op.ins[1], [s.ins[1] for s in found]) * (4 / element_bytes(dtype))

    def recomputed(self, op: Op) -> bool:
        """Does the backward run this op's forward again?"""
        level = self.settings.recompute
        return op.name in self.block_of and (level == "full" or (level == "selective" and not op.rule.flop))

    # parameters

    def add_storage(self, node: str, path: str, trainable: bool) -> None:
        layouts = allowed_storage(path, self.analysis.parts[node], self.mesh, self.settings)
        price = price_storage(
            self.analysis.parts[node],
            self.analysis.dtypes[node],
            trainable,
            layouts,
            self.mesh,
            self.profile,
            self.settings.optimizer,
            self.settings.precision,
            self.settings.pins.given.get("offload", "none"),
            self.gathers.once,
            self.settings.pins.staged,
            self.software,
        )
        count = self.counts[node]
        self.storage_choice[node] = self.add_choice(
            path, price.update_s * count, price.memory_bytes * count, {0: layouts}
        )
        self.storage_layouts[node], self.storage_prices[node] = layouts, price

    def stored_covers(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """A pinned tensor axis divides some parameter's memory where any can be: slices of whole ones are no tp."""
        for a, axis in enumerate(self.mesh.axes):
            row = tuple(
                (self.storage_choice[node], i)
                for node, layouts in self.storage_layouts.items()
                for i, layout in enumerate(layouts)
                if layout[a].kind == "S"
            )
            if axis.role == "tp" and row and self.settings.fixed is None:
                yield row

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
        kept = 1 if self.saved.get(value) else count  # what is made again lives one block at a time
        source = self.source_choice(producer)
        if source is None:  # an input or a buffer: invariant, cut for nothing
            for choice, layouts, _, _ in ends:
                if saved:
                    self.memories[choice] = self.memories[choice] + self.kept_bytes(value, layouts) * kept
            return
        start, start_layouts = source
        used = self.used_parts([*start_layouts, *(x for _, layouts, _, _ in ends for x in layouts)])
        forwards = 2 if self.moved_again(value, readers) else 1
        routing = self.routes(value, used, forwards)
        if len(ends) > 1:
            domain = sorted({x for _, layouts, _, _ in ends for x in layouts} | set(start_layouts))
            domain = self.fixed_read(value, domain) or domain
            cost = np.zeros(len(domain))
            memory = self.kept_bytes(value, domain) * kept if saved else np.zeros(len(domain))
            read = self.add_choice(f"read of {value}", cost, memory, {0: domain})
            self.read_layouts[read] = domain
            for name in values:
                self.read_choice[name] = read
            self.add_edge(start, start_layouts, read, domain, routing, count, producer, forwards)
            start, start_layouts = read, domain
        elif saved:
            choice, layouts, _, _ = ends[0]
            self.memories[choice] = self.memories[choice] + self.kept_bytes(value, layouts) * kept
        for choice, layouts, _, _ in ends:
            self.add_edge(start, start_layouts, choice, layouts, routing, count, producer, forwards)

    def kept_bytes(self, value: str, layouts: Sequence[Layout]) -> Floats:
        """Of a value kept for the backward, of as many micro-batches as are held at once."""
        return self.sizes.local_bytes(value, layouts) * self.settings.held

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

    def used_parts(self, layouts: Sequence[Layout]) -> tuple[int, ...]:
        return tuple(sorted({p.part for layout in layouts for p in layout if p.kind == "S"}))

    def moved_again(self, value: str, readers: Sequence[tuple[str, int]]) -> bool:
        """Is the transition made again in the backward? Parameters are, unless they are gathered once a step; so is
        all that a block recomputes.
        """
        if value in self.roles.weights:
            return not self.gathers.once
        return self.settings.recompute == "full" and all(op in self.block_of for op, _ in readers)

    def routes(self, value: str, used: tuple[int, ...], forwards: int = 1) -> Routes:
        parts, dtype = self.sizes.operand(value)
        width, wire = element_bytes(dtype), self.gathers.wire(value)
        return routes(parts, width, self.analysis.grads[value], used, self.mesh, self.profile, forwards, wire)

    def add_edge(
        self,
        source: int,
        source_layouts: list[Layout],
        target: int,
        target_layouts: list[Layout],
        routing: Routes,
        count: int,
        producer: ValueKey,
        forwards: int,
    ) -> None:
        rows, row_of = _distinct(source_layouts)
        columns, column_of = _distinct(target_layouts)
        cost = routing.cost_s[np.ix_([routing.index[x] for x in rows], [routing.index[x] for x in columns])] * count
        memory = None
        if producer[0] in self.storage_choice:
            cost = cost + self.gathers.forbidden(rows, columns)
            memory = self.gathers.held_bytes(producer[0], rows, columns, count)
            edge = StoredEdge(producer[0], len(self.edges), routing, rows, columns, count, forwards)
            self.stored_edges.append(edge)
        self.edges.append(Edge(source, target, row_of, column_of, cost, memory))

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


def _distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], NDArray[np.int64]]:
    index: dict[Layout, int] = {}
    of = np.array([index.setdefault(x, len(index)) for x in layouts], dtype=np.int64)
    return list(index), of
