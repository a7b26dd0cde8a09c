"""Join pointwise and row-wise chains of a lowered graph into kernels.

What is a group, and what is legal, is decided in `codegen.cluster`; the kernel is printed by `codegen.triton_text`.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.codegen.build import build
from autopar.codegen.cluster import Group, clusters, is_barrier, warn_of_fault
from autopar.codegen.code import Code
from autopar.codegen.demand import Unfusable, known
from autopar.codegen.group import FusedGroup
from autopar.codegen.index import NotLinear
from autopar.codegen.tiles import TooWide, moved_bytes, tile_of
from autopar.codegen.triton_text import Printed, print_kernel
from autopar.codegen.views import SPLITS, base_of, given, packet, view_of, viewed
from autopar.program import record, set_record

aten = torch.ops.aten


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
        cast_in_buckets(module.graph)
        split_norm_backwards(module.graph)
        printed = dict(filter(None, map(_printed, clusters(module.graph))))
        if not printed:
            return module
        graph = _Rewrite(module, printed, self.mode).made()
        found = GraphModule(module, graph)
        found.meta.update(module.meta)
        return found


def cast_in_buckets(graph: Graph) -> None:
    """What goes into a bucket is cast there, so one kernel casts and packs: views(cast(x)) is cast(views(x))."""
    for bucket in graph.find_nodes(op="call_function", target=aten.cat.default):
        for flat in bucket.all_input_nodes:
            chain = _cast_below(flat)
            if chain is None:
                continue
            cast, views = chain
            source = given(cast)[0]
            if known(base_of(source)):
                continue  # a kernel makes it, and casts it without rounding in between
            for view in reversed(views):
                if view.target in RESHAPES and not source.meta["val"].is_contiguous():
                    break  # it would copy
                with graph.inserting_before(flat):
                    source = _on(graph, view, source)
            else:
                with graph.inserting_before(flat):
                    made = graph.call_function(aten._to_copy.default, (source,), dict(cast.kwargs), name=cast.name)
                made.meta = {**cast.meta, "val": flat.meta["val"]}
                flat.replace_all_uses_with(made)
                for node in (*views, cast):
                    graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op != "call_function" or view_of(n) is None)


RESHAPES = frozenset({aten.reshape.default, aten.view.default})
TURNS = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})


def _cast_below(flat: Node) -> tuple[Node, list[Node]] | None:
    """The cast that a part of a bucket is a view of, and the views, the last one first; nothing else reads them."""
    views: list[Node] = []
    node = flat
    while node.target in RESHAPES or node.target in TURNS:
        views.append(node)
        node = given(node)[0]
    if not views or views[0].target not in RESHAPES or node.target is not aten._to_copy.default:
        return None
    return (node, views) if all(len(n.users) == 1 for n in (node, *views)) else None


def _on(graph: Graph, view: Node, source: Node) -> Node:
    """The same view of another value."""
    target: Any = view.target
    made = graph.call_function(target, (source, *view.args[1:]))
    with source.meta["val"].fake_mode:
        made.meta = {**source.meta, "val": target(source.meta["val"], *view.args[1:])}
    return made


def split_norm_backwards(graph: Graph) -> None:
    """The backward of a layer norm as two ops where its rows are so long that no kernel gives both the input's gradient
    and the sums over all rows."""
    op = aten.native_layer_norm_backward.default
    for whole in graph.find_nodes(op="call_function", target=op):
        *others, mask = given(whole)
        items = [u for u in whole.users if u.target is operator.getitem]
        wanted = [[u for u in items if (given(u)[1] == 0) is first] for first in (True, False)]
        read = [u for u in items if u.users and isinstance(u.meta.get("val"), torch.Tensor)]
        if not all(set(users) & set(read) for users in wanted) or _fits(whole, read):
            continue
        for first, users in zip((True, False), wanted, strict=True):
            shown = [m and (i == 0) is first for i, m in enumerate(mask)]
            with graph.inserting_before(whole):
                part = graph.call_function(op, (*others, shown))
            values = tuple(v if s else None for v, s in zip(whole.meta["val"], shown, strict=True))
            part.meta = {**whole.meta, "val": values}
            for user in users:
                user.replace_input_with(whole, part)
        graph.erase_node(whole)


def _fits(op: Node, items: Sequence[Node]) -> bool:
    """Can an op and all its results be one kernel?"""
    try:
        tile_of(build((op, *items), items).kernel)
    except (Unfusable, NotLinear):
        return True  # nor would a part of it be one
    except TooWide:
        return False
    return True


def _printed(group: Group) -> tuple[Group, Printed] | None:
    try:
        return group, print_kernel(group.built.kernel)
    except Exception as error:  # see `cluster`
        warn_of_fault(group.members, error)
        return None


class _Rewrite:
    """The graph made anew, a node for each group."""

    def __init__(self, module: GraphModule, printed: Mapping[Group, Printed], mode: str) -> None:
        self.module, self.printed, self.mode = module, printed, mode
        self.group_of = {n: g for g in printed for n in g.members}
        self.number = {g: i for i, g in enumerate(printed)}
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
        self.module.add_submodule(name, FusedGroup(aten, code_of(group, inputs, self.printed[group]), self.mode))
        made = self.graph.call_module(name, tuple(self.copies[n] for n in inputs))
        made.meta["val"] = tuple(n.meta["val"] for n in group.outputs)
        made.meta["partitioner_tag"] = group.members[-1].meta.get("partitioner_tag")
        set_record(made, record(group.members[0]), op=name)
        for i, node in enumerate(group.outputs):
            item = self.graph.call_function(operator.getitem, (made, i), name=node.name)
            item.meta = dict(node.meta)
            self.copies[node] = item


def one_group(module: GraphModule, mode: str) -> FusedGroup:
    """A whole graph of pointwise ops and reductions as one kernel; its outputs are the graph's.

    Raises: Unfusable, NotLinear, TooWide: it cannot be one; the message says why.
    """
    members = [
        n for n in module.graph.nodes if n.op == "call_function" and view_of(n) is None and packet(n) not in SPLITS
    ]
    results = given(next(iter(reversed(module.graph.nodes))))[0]
    outputs = list(dict.fromkeys(map(base_of, results if isinstance(results, (tuple, list)) else (results,))))
    built = build(members, outputs)
    group = Group(tuple(members), tuple(outputs), built, moved_bytes(built.kernel))
    reads, aten = aten_graph(module, group)
    return FusedGroup(aten, code_of(group, reads), mode)


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


def code_of(group: Group, inputs: Sequence[Node], printed: Printed | None = None) -> Code:
    """A group's kernel, and which of its inputs are which arguments."""
    place = {n: i for i, n in enumerate(inputs)}
    built = group.built
    return Code(
        built.kernel,
        printed or print_kernel(built.kernel),
        tuple(place[n] for n in built.reads),
        tuple(place[n] for n in built.keys),
        tuple(built.writes.index(n) for n in group.outputs),
    )
