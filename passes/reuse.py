"""Take no new memory where old memory is free: copies of values that nobody changes, sums into an operand that dies."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from autopar.passes.aliases import is_view
from autopar.passes.merge_collectives import ALL_REDUCE, WAIT

aten = torch.ops.aten

IN_PLACE = {
    ALL_REDUCE: torch.ops._c10d_functional.all_reduce_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
}
"""Op -> the one that writes into its first operand."""
COMMUTES = frozenset({aten.add.Tensor, aten.mul.Tensor})
MAY_SHARE = frozenset({WAIT, aten.reshape.default, aten.contiguous.default, aten.to.dtype})
"""Ops whose result may be the memory of their input, beside the views by their schema."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Drop copies, and write results into operands that nothing reads afterwards.

    Input:   %c = clone(%w) ; %y = mm(%x, %c) ; %z = add(%y, %b) ; %t = cat(%g0, %g1) ; %r = all_reduce(%t)
    Output:  %y = mm(%x, %w) ; %z = add_(%y, %b) ; %t = cat(%g0, %g1) ; %r = all_reduce_(%t)
    Refuses: to write into what the graph is handed in, what it hands out, views, values of another shape or dtype, and
    memory that a later node reads. Copies that are handed out, or change the strides, stay.
    """

    def run(self, module: GraphModule) -> GraphModule:
        graph = module.graph
        for node in [n for n in graph.nodes if n.target is aten.clone.default]:
            source = node.args[0]
            if not any(u.op == "output" for u in _all_readers(node)) and _like(source, node):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        order = {n: i for i, n in enumerate(graph.nodes)}
        owner: dict[Node, Node | None] = {}
        last: dict[Node, int] = {}
        for node in graph.nodes:
            owner[node] = _owner(node, owner)
            for read in _read(node):
                if (root := owner[read]) is not None:
                    last[root] = order[node]
        for node in list(graph.nodes):
            if node.target in IN_PLACE and not node.kwargs:
                self._write(node, owner, last, order)
        graph.lint()
        module.recompile()
        return module

    def _write(self, node: Node, owner: dict[Node, Node | None], last: dict[Node, int], order: dict[Node, int]) -> None:
        places = (0, 1) if node.target in COMMUTES else (0,)
        for place in places:
            into = node.args[place]
            free = isinstance(into, Node) and owner[into] is into and last[into] == order[node] and _like(into, node)
            others = [owner.get(a) for i, a in enumerate(node.args) if i != place and isinstance(a, Node)]
            if free and into not in others:
                rest = [a for i, a in enumerate(node.args[:2]) if i != place]
                node.args = (into, *rest, *node.args[2:])
                node.target = IN_PLACE[node.target]  # type: ignore[index]
                last[into] = max(last[into], last.get(node, order[node]))  # the result lives in it
                return


def _read(node: Node) -> list[Node]:
    """What a node reads; a wait reads what its collective sends until then (an all-reduce sends a copy)."""
    sender = node.args[0] if node.target is WAIT else None
    sent = sender.all_input_nodes if isinstance(sender, Node) and sender.target is not ALL_REDUCE else []
    return [*node.all_input_nodes, *sent]


def _owner(node: Node, owner: dict[Node, Node | None]) -> Node | None:
    """The node whose memory this value lies in; None where that is not known, or not ours to write to."""
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if node.target is operator.getitem and source is not None and is_view(source):
        return owner.get(source)  # a part of a split
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None  # handed in, or an item of a tuple
    if is_view(node) or node.target in MAY_SHARE:
        return owner.get(source) if source is not None else None
    aliased = any(r.alias_info is not None for r in node.target._schema.returns)
    known = node.target.namespace in ("aten", "_c10d_functional")
    return node if known and not aliased and isinstance(node.meta.get("val"), torch.Tensor) else None


def _like(a: object, b: Node) -> bool:
    """The same shape, strides, dtype and device?"""
    if not isinstance(a, Node):
        return False
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


def _all_readers(node: Node) -> list[Node]:
    """What reads this value or a view of it."""
    found, stack = [], [node]
    while stack:
        for user in stack.pop().users:
            found.append(user)
            if is_view(user) or user.target in MAY_SHARE or user.target is operator.getitem:
                stack.append(user)
    return found
