"""Leave out views that show what another value or view shows, and look through views of views."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten

RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
VIEWS = RESHAPES | {
    *(aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default, aten.transpose.int),
    *(aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.select.int, aten.slice.Tensor),
}
"""Ops that always share the memory of their input."""


@dataclass(frozen=True, slots=True)
class DropViews:
    """Read a value, or its first view of a kind, in place of later views of the same elements in the same order.

    Input:   %a = view(%x, [6, 4]) ; %b = view(%a, [2, 3, 4]) ; %c = t(%w) ; %d = t(%c) ; %e = t(%w) ; %f = t(%w)
    Output:  %b = view(%x, [2, 3, 4]) ; %c = t(%w), read in place of %e and %f too ; %w in place of %d
    Refuses: views that are handed out: each output stays a tensor of its own.
    """

    def run(self, module: GraphModule) -> GraphModule:
        graph = module.graph
        seen: dict[tuple[object, ...], Node] = {}
        of: dict[Node, tuple[Node, Tensor]] = {}
        for node in list(graph.nodes):
            source = node.args[0] if node.target in VIEWS else None
            value = source.meta.get("val") if isinstance(source, Node) else None
            if not isinstance(source, Node) or not isinstance(value, Tensor) or value.layout != torch.strided:
                continue
            if source not in of:
                whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                of[source] = source, whole
                seen[_key(source, whole)] = source
            base, shown = of[source]
            try:
                of[node] = base, node.target(shown, *node.args[1:], **node.kwargs)
            except (RuntimeError, ValueError):  # the value has other strides than were written down
                continue
            first = seen.setdefault(_key(*of[node]), node)
            if first is not node:
                node.replace_all_uses_with(first, delete_user_cb=lambda user: user.op != "output")
            if node.target in RESHAPES and node.users:
                _look_through(node, of)
        for node in reversed(list(graph.nodes)):
            if node.target in VIEWS and not node.users:
                graph.erase_node(node)
        graph.lint()
        module.recompile()
        return module


def _key(base: Node, shown: Tensor) -> tuple[object, ...]:
    return base, shown.shape, shown.stride(), shown.storage_offset()


def _look_through(node: Node, of: dict[Node, tuple[Node, Tensor]]) -> None:
    """Reshape the farthest value behind the views that can be reshaped so."""
    behind, at = [], node.args[0]
    while isinstance(at, Node) and at in of:
        behind.append(at)
        at = at.args[0] if at is not of[at][0] else None
    for source in reversed(behind[1:]):
        shown = of[source][1]
        try:
            same = shown.view(of[node][1].shape)
        except (RuntimeError, ValueError):  # not without a copy
            continue
        if (same.stride(), same.storage_offset()) == (of[node][1].stride(), of[node][1].storage_offset()):
            node.target, node.args = aten.view.default, (source, *node.args[1:])
            return
