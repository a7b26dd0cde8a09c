"""Micro-batches as one more mesh axis: the outermost, of m "ranks" that run one after the other on the same device.

What enters: an `Analysis`, the decisions for the real axes, the number of micro-batches. What leaves: decisions for a
mesh whose first axis is the micro-batches, so that `Shard` writes the program of one micro-batch as it writes that of
one rank, offsets and uneven sizes included. Refused, with a `PlanError` that names the op and the user's line: a value
that needs the whole batch (batch statistics, a product of two means).

The layouts keep their meaning: S is cut by the batch, P is summed over the micro-batches, R (what depends on parameters
alone) has a gradient that is summed over them. No collective runs over this axis: slices are cut, sums and joins are
made by the executor when the micro-batches are done. What depends on inputs alone may be computed whole in every
micro-batch: so the count that a mean loss divides by is that of the whole batch, known before the first forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.layout import I, Layout, Parts, Placement, chunk
from autopar.mesh import Axis, LogicalMesh, Mesh
from autopar.program import Program, record, set_record
from autopar.rules.analyse import Analysis, Op, value_of
from autopar.rules.decisions import Decisions
from autopar.rules.strategy import axis_options, named, placements
from autopar.runtime.moves import max_over, move
from autopar.runtime.transfer import parse_placement
from autopar.user_function import op_text

AXIS = "microbatch"
aten = torch.ops.aten


def with_microbatches(mesh: LogicalMesh, count: int) -> LogicalMesh:
    """The mesh with the micro-batches as first axis (its "ranks" are a slowest level of the topology)."""
    topology = Mesh((count, *mesh.topology.shape), mesh.topology.device)
    level = len(mesh.topology.levels)
    return LogicalMesh(topology, (Axis(AXIS, count, None, ((level, count),), stride=mesh.size), *mesh.axes))


@dataclass(frozen=True, eq=False)
class Divided:
    """Decisions on the extended mesh. sinks: how each sink lies on the micro-batch axis."""

    decisions: Decisions
    sinks: Mapping[int, Placement]


def divide(
    analysis: Analysis, decisions: Decisions, mesh: LogicalMesh, batch: frozenset[int], microbatches: int
) -> Divided:
    """Choose for every op how it lies on the micro-batch axis.

    Args:    mesh: the real axes. batch: classes of parts that are the batch (`Roles.batch`).
    Raises:  PlanError: a value needs the whole batch, or a shard of a micro-batch would be empty.
    """
    try:
        return _Divider(analysis, decisions, mesh, batch, microbatches).divide()
    except PlanError:
        if microbatches > 1:
            raise
    return _Divider(analysis, decisions, mesh, frozenset(), microbatches).divide()  # one sees the whole batch


class _Whole(Exception):
    """These ops must be computed for the whole batch."""

    def __init__(self, ops: set[str]) -> None:
        self.ops = ops


class _Divider:
    def __init__(
        self, analysis: Analysis, decisions: Decisions, mesh: LogicalMesh, batch: frozenset[int], microbatches: int
    ) -> None:
        self.analysis, self.decisions, self.batch, self.count = analysis, decisions, batch, microbatches
        self.axes = len(mesh.axes)
        self.sizes = mesh.sizes
        self.producer = {v: op.name for op in analysis.ops.values() for v in op.outs}
        self.of_inputs = _of_inputs(analysis)
        self.state: dict[str, Placement] = {}
        self.options: dict[str, str] = {}

    def divide(self) -> Divided:
        whole: set[str] = set()
        while True:
            try:
                self.pass_over(whole)
                break
            except _Whole as more:
                whole |= more.ops
        strategies = {}
        for name, op in self.analysis.ops.items():
            inner = ("I",) * self.axes if name in whole else self.decisions.strategies[name].options
            strategy = named(op.rule, op.factors, (self.options[name], *inner), op.in_grads, op.out_grads)
            assert strategy is not None, f"{name} has no {(self.options[name], *inner)}"
            strategies[name] = strategy
        sources = {n: (I, *layout) for n, layout in self.decisions.sources.items()}
        reads = {
            v: (self.state[v], *layout)
            for v, layout in self.decisions.reads.items()
            if self.producer.get(v) not in whole
        }
        sinks, outputs = self.sinks(strategies)
        return Divided(Decisions(strategies, sources, reads, outputs), sinks)

    def pass_over(self, whole: set[str]) -> None:
        self.state = {s.node: I for s in self.analysis.program.sources}
        for name, op in self.analysis.ops.items():
            if name in whole:
                self.want_whole(op, {v for v in op.ins if self.state[v] != I})
                option = "I"
            else:
                option = self.option(op)
            _, outs = placements(op.rule, op.by_name, option)
            self.options[name] = option
            for value, placement, grad in zip(op.outs, outs, op.out_grads, strict=True):
                self.state[value] = I if placement.kind == "R" and not grad else placement
        for i, sink in enumerate(self.analysis.program.sinks):
            result = _results(self.analysis.program)[i]
            if sink.kind == "state" and isinstance(result, Node) and self.state[value_of(result)].kind not in "IR":
                raise self.refusal(result, f"buffer {sink.path} is updated from the whole batch")

    def option(self, op: Op) -> str:
        """The best option that needs no collective over micro-batches."""
        states = [self.state[v] for v in op.ins]
        cut = [f.name for f in op.factors if self.is_batch(op, f.name)]
        for name in cut:
            self.check_sizes(op, op.by_name[name].size)
        cut = [n for n in cut if not self.talks(op, n) and op.by_name[n].letter not in op.rule.whole]
        uncut = [o for o in axis_options(op.rule, op.factors, self.count) if o not in op.by_name]
        uncut.sort(key=lambda o: (o == "I", o != "R"))  # R, then partial sums, then I
        best: tuple[int, int, str] | None = None
        wholes: set[str] = set()
        for rank, option in enumerate([*cut, *uncut]):
            ins, _ = placements(op.rule, op.by_name, option)
            missing = {
                v
                for v, have, need, grad in zip(op.ins, states, ins, op.in_grads, strict=True)
                if not _reaches(have, need, grad)
            }
            if any(not self.can_be_whole(v) for v in missing):
                continue
            if best is None or (len(missing), rank) < best[:2]:
                best, wholes = (len(missing), rank, option), missing
        if best is None:
            raise self.refusal(op.node, "it")
        self.want_whole(op, wholes)
        return best[2]

    def is_batch(self, op: Op, factor: str) -> bool:
        return self.analysis.factor_class(op, op.by_name[factor]) in self.batch

    def talks(self, op: Op, option: str) -> bool:
        """Would the shards have to talk in the middle of this op?"""
        special = op.rule.distributed.get(op.by_name[option].letter)
        return special is not None and bool(special.collectives)

    def can_be_whole(self, value: str) -> bool:
        return value in self.of_inputs and value in self.producer

    def want_whole(self, op: Op, values: set[str]) -> None:
        needed = {self.producer[v] for v in values}
        if needed:
            raise _Whole(needed)

    def check_sizes(self, op: Op, size: int) -> None:
        options = zip(self.sizes, self.decisions.strategies[op.name].options, strict=True)
        cuts = [n for n, o in options if o in op.by_name and self.is_batch(op, o)]
        ranks = math.prod(cuts)
        last = chunk(size, self.count, self.count - 1)[1]
        if chunk(last, ranks, ranks - 1)[1] == 0:
            share = f", divided over {ranks} data-parallel ranks," if ranks > 1 else ""
            raise PlanError(
                f"microbatches={self.count}: a batch of {size} in {self.count} micro-batches of "
                f"{-(-size // self.count)}{share} leaves the last one empty; pin microbatches to "
                f"{_fitting(size, self.count, ranks)}, or make the batch a multiple of {self.count * ranks}"
            )

    def sinks(self, strategies: Mapping[str, object]) -> tuple[dict[int, Placement], dict[int, Layout]]:
        whole: Layout = (I,) * self.axes
        on_axis, layouts = {}, {}
        for i, result in enumerate(_results(self.analysis.program)):
            if isinstance(result, Node):
                on_axis[i] = self.state[value_of(result)]
                layouts[i] = (on_axis[i], *self.decisions.outputs.get(i, whole))
        return on_axis, layouts

    def refusal(self, node: Node, what: str) -> PlanError:
        known = record(node)
        return PlanError(
            f"{known.op} ({known.where or op_text(node)}): {what} needs the whole batch, which a micro-batch of a "
            f"pipeline cannot see; pin microbatches to 1, or plan without pp"
        )


def _reaches(have: Placement, need: Placement, grad: bool) -> bool:
    """Does a value get there without talking to other micro-batches?"""
    if have == need or (not grad and {have.kind, need.kind} == {"I", "R"}):
        return True
    return have.kind in "IR" and need.kind in "RSP"


def _of_inputs(analysis: Analysis) -> set[str]:
    """Values that depend on no parameter, so that the whole batch's can be computed at once."""
    found = {s.node for s in analysis.program.sources if s.kind != "parameter" and not analysis.grads[s.node]}
    for op in analysis.ops.values():
        if all(v in found for v in op.ins):
            found.update(op.outs)
    return found


def _results(program: Program) -> list[object]:
    return list(pytree.tree_leaves(program.output.args[0]))


def _fitting(size: int, count: int, ranks: int) -> int:
    """The largest number of micro-batches below `count` that leaves no shard empty."""
    for n in range(count - 1, 1, -1):
        if chunk(chunk(size, n, n - 1)[1], ranks, ranks - 1)[1]:
            return n
    return 1


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Carry out the moves of one micro-batch: slices are cut, what is the same for all is passed on.

    Input:   %t = move(%labels, microbatch, I, S0) ; %v = move(%w, microbatch, I, R) ; %y = linear(%x, %v)
             %z = dropout(%y, %key, 0.1, first=64)
    Output:  %t = narrow(%labels, 0, 4, 2) ; %y = linear(%x, %w)
             %z = dropout(%y, key(salt, 64), 0.1, first=0)      (only cuts and keys differ between micro-batches)
    Refuses: a move that has to talk to other micro-batches; `divide` chooses none.
    """

    count: int
    index: int

    def run(self, program: Program) -> Program:
        graph = Graph()
        values: dict[Node, Node] = {}
        for node in program.graph.nodes:
            assert not (node.target is max_over and node.args[1] == AXIS), f"{node.name}: a maximum over micro-batches"
            if node.target is move and node.args[1] == AXIS:
                source = values[node.args[0]]
                values[node] = self.moved(graph, node, source)
                if values[node] is not source:
                    values[node].meta = dict(node.meta)
                elif record(source).layout is None:
                    set_record(source, layout=record(node).layout)
            else:
                values[node] = graph.node_copy(node, values.__getitem__)
                self.place_key(graph, values[node])
        graph.lint()
        return replace(program, graph=graph)

    def place_key(self, graph: Graph, node: Node) -> None:
        """Say in the key where a random op's numbers begin."""
        first = node.kwargs.get("first")
        key = next((n for n in node.all_input_nodes if n.target is torch.ops.autopar.key.default), None)
        if key is None or first is None:
            return
        with graph.inserting_before(node):
            placed = graph.call_function(torch.ops.autopar.key.default, (key.args[0], first))
        placed.meta = dict(key.meta)
        node.replace_input_with(key, placed)
        node.update_kwarg("first", 0)

    def moved(self, graph: Graph, node: Node, source: Node) -> Node:
        before, after = (parse_placement(str(p))[0] for p in node.args[2:4])
        if (before, after) in (("I", "R"), ("R", "I")):
            return source
        if after == "P":
            return source if self.index == 0 else graph.call_function(aten.zeros_like.default, (source,))
        assert (before, after) in (("I", "S"), ("R", "S")), f"{node.name}: {before} -> {after} talks to others"
        part, parts = parse_placement(str(node.args[3]))[1], Parts(node.args[4])  # type: ignore[arg-type]
        first, length = chunk(parts.flat[part], self.count, self.index)
        dim = parts.dim_of(part)
        if len(parts.dims[dim]) == 1:
            return graph.call_function(aten.narrow.default, (source, dim, first, length))
        opened = graph.call_function(aten.reshape.default, (source, list(parts.flat)))
        sizes = [length if j == part else n for j, n in enumerate(parts.flat)]
        cut = graph.call_function(aten.narrow.default, (opened, part, first, length))
        opened.meta = {k: v for k, v in node.meta.items() if k != "val"}
        cut.meta = {**opened.meta, "val": node.meta["val"].new_empty(parts.with_flat(sizes).flat)}
        return graph.call_function(aten.reshape.default, (cut, list(node.meta["val"].shape)))


__all__ = ["AXIS", "Divided", "Microbatch", "divide", "with_microbatches"]
