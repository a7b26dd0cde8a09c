"""Join pointwise and row-wise chains of a lowered graph into kernels.

What is a group, and what is legal, is decided in `codegen.cluster`; the kernel is printed by `codegen.triton_text`.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from autopar.codegen.cluster import Group, clusters, is_barrier
from autopar.codegen.group import Code, FusedGroup
from autopar.codegen.triton_text import print_kernel
from autopar.codegen.views import base_of, view_of, viewed
from autopar.program import record, set_record


@dataclass(frozen=True, slots=True)
class Fuse:
    """Replace groups of ops by modules that run them as one kernel.

    Input:   %a = add(%x, %y) ; %n = native_layer_norm(%a, ...) ; %h = getitem(%n, 0) ; %m = mm(view(%h), %w)
    Output:  %f = fused_0(%x, %y, ...) ; %a, %h = getitem(%f, 0), getitem(%f, 1) ; %m = mm(view(%h), %w)
    Refuses: ops without a formula, and what would pass a wait or change the order of collectives: these stay.
    """

    mode: str = "aten"
    """How the groups run: "kernel" on a GPU, "interpreter" or "aten" without."""

    def run(self, module: GraphModule) -> GraphModule:
        groups = clusters(module.graph)
        if not groups:
            return module
        graph = _Rewrite(module, groups, self.mode).made()
        found = GraphModule(module, graph)
        found.meta.update(module.meta)
        return found


class _Rewrite:
    """The graph made anew, a node for each group."""

    def __init__(self, module: GraphModule, groups: Sequence[Group], mode: str) -> None:
        self.module, self.mode = module, mode
        self.group_of = {n: g for g in groups for n in g.members}
        self.number = {g: i for i, g in enumerate(groups)}
        self.graph, self.copies = Graph(), dict[Node, Node]()

    def made(self) -> Graph:
        for unit in self._ordered():
            if isinstance(unit, Group):
                self._emit_group(unit)
            elif unit not in self.copies:
                self._emit(unit)
        self.graph.lint()
        return self.graph

    def _ordered(self) -> list[Node | Group]:
        """Nodes and groups so that each comes after what it reads, else as they stood. Views are made when read."""
        order = {n: i for i, n in enumerate(self.module.graph.nodes)}
        nodes = [n for n in order if view_of(n) is None]
        unit: dict[Node, Node | Group] = {n: self.group_of.get(n, n) for n in nodes}
        place = {u: max(order[n] for n in (u.members if isinstance(u, Group) else (u,))) for u in set(unit.values())}
        after: dict[Node | Group, set[Node | Group]] = {u: set() for u in place}
        waiting = dict.fromkeys(place, 0)
        barriers = [n for n in nodes if is_barrier(n)]
        # placeholders first and the output last, whatever is read
        edges = [(base_of(i), n) for n in nodes for i in n.all_input_nodes]
        edges += list(itertools.pairwise(barriers))
        for source, reader in edges:
            a, b = unit[source], unit[reader]
            if a is not b and b not in after[a]:
                after[a].add(b)
                waiting[b] += 1
        ready = [(place[u], i, u) for i, u in enumerate(place) if not waiting[u]]
        heapq.heapify(ready)
        found: list[Node | Group] = []
        while ready:
            _, _, at = heapq.heappop(ready)
            found.append(at)
            for reader in after[at]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (place[reader], len(found) + len(place), reader))
        assert len(found) == len(place), "a group and a node wait for each other"
        return found

    def _emit(self, node: Node) -> Node:
        """Copy a node, and before it the views that it reads."""
        for source in node.all_input_nodes:
            if source not in self.copies:
                self._emit(source)
        self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        return self.copies[node]

    def _emit_group(self, group: Group) -> None:
        inputs, aten = aten_graph(self.module, group)
        for node in inputs:
            if node not in self.copies:
                self._emit(node)
        name = f"fused_{self.number[group]}"
        self.module.add_submodule(name, FusedGroup(aten, code_of(group, inputs), self.mode))
        made = self.graph.call_module(name, tuple(self.copies[n] for n in inputs))
        made.meta["val"] = tuple(n.meta["val"] for n in group.outputs)
        made.meta["partitioner_tag"] = group.members[-1].meta.get("partitioner_tag")
        set_record(made, record(group.members[0]), op=name)
        for i, node in enumerate(group.outputs):
            item = self.graph.call_function(operator.getitem, (made, i), name=node.name)
            item.meta = dict(node.meta)
            self.copies[node] = item


def aten_graph(module: GraphModule, group: Group) -> tuple[list[Node], GraphModule]:
    """The group as a graph of its own ops, and the nodes outside that are its inputs, in order."""
    graph, copies = Graph(), dict[Node, Node]()
    inputs: list[Node] = []
    inside = set(group.members)

    def gather(node: Node) -> None:
        if node in copies:
            return
        if base_of(node) not in inside:
            inputs.append(node)
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

    def emit(node: Node) -> None:
        for source in node.all_input_nodes:
            if source not in copies:  # a view of a member
                emit(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)

    for member in group.members:
        stack = list(member.all_input_nodes)
        while stack:
            node = stack.pop()
            if base_of(node) in inside and view_of(node) is not None:
                stack.append(viewed(node))
            gather(node)
    for member in group.members:
        emit(member)
    graph.output(tuple(copies[n] for n in group.outputs))
    return inputs, GraphModule(module, graph)


def code_of(group: Group, inputs: Sequence[Node]) -> Code:
    """The printed kernel of a group, and which of its inputs are which arguments."""
    place = {n: i for i, n in enumerate(inputs)}
    built = group.built
    return Code(
        built.kernel,
        print_kernel(built.kernel),
        tuple(place[n] for n in built.reads),
        tuple(place[n] for n in built.keys),
        tuple(built.writes.index(n) for n in group.outputs),
    )
