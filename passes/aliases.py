"""Values that show the memory of others, and gradients, which must not.

Enters: a graph, or a node of one. Leaves: the graph whose gradients each have memory of their own. Refused: nothing.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def is_view(node: Node) -> bool:
    """Does this op's result share the memory of its input? By its schema; `_unsafe_view` hides it there."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target is aten._unsafe_view.default or target.is_view


def shares(node: Node) -> bool:
    """The same, of parts of an op with several results, too."""
    return is_view(node) or (node.target is operator.getitem and is_view(node.args[0]))  # type: ignore[arg-type]


def own_gradients(backward: GraphModule) -> GraphModule:
    """No gradient shows the memory of another one, or of what the graph was given: `.grad` takes a gradient over, and
    adds the next one to it in place.

    Input:   %g = ... ; %h = slice(%g, 1, 0, 1) ; return %g, %h
    Output:  %g = ... ; %h = slice(%g, 1, 0, 1) ; %i = clone(%h) ; return %g, %i
    """
    base: dict[Node, Node] = {}
    for node in backward.graph.nodes:
        source = node.args[0] if shares(node) else None
        base[node] = base[source] if isinstance(source, Node) else node
    output = backward.graph.output_node()
    taken = {node for node in base if node.op == "placeholder"}
    gradients = list(output.args[0])
    for i, node in enumerate(gradients):
        if not isinstance(node, Node):
            continue
        if base[node] in taken:
            with backward.graph.inserting_before(output):
                gradients[i] = backward.graph.call_function(aten.clone.default, (node,))
            gradients[i].meta = dict(node.meta)
        taken.add(base[node])
    output.args = (tuple(gradients),)
    backward.recompile()
    return backward
