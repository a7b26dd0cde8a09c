"""Divide a backward graph into the gradients of the inputs and those of the weights.

Zero-bubble schedules send input gradients back at once and compute weight gradients when a rank would wait. What
enters: a lowered backward graph and which of its results are gradients of weights. What leaves: two graphs. Refused:
nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from autopar.passes.lower import ancestors
from autopar.runtime.backward_split import Split


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """Eliminate from each of two copies what the other one is for.

    Input:   %dh = mm(%dy, %w1) ; %dw1 = mm(%dy, %h) ; %dx = mm(%dh, %w0) ; %dw0 = mm(%dh, %x)
    Output:  inputs: %dh = mm(%dy, %w1) ; %dx = mm(%dh, %w0), gives %dx and %dh
             weights: %dw1 = mm(%dy, %h) ; %dw0 = mm(%dh, %x)
    Refuses: nothing; work for both is done in the first.
    """

    weights: Collection[int]
    """Positions of the weights among the forward's inputs, so of their gradients among the results."""

    def run(self, backward: GraphModule) -> tuple[GraphModule, GraphModule, Split]:
        nodes = list(backward.graph.nodes)
        results = list(nodes[-1].args[0])
        there = [i for i, r in enumerate(results) if isinstance(r, Node)]
        weights = tuple(i for i in there if i in self.weights)
        inputs = tuple(i for i in there if i not in self.weights)
        first = ancestors(results[i] for i in inputs)
        second = ancestors(results[i] for i in weights)
        late = [n for n in nodes if n in second and n not in first and n.op != "placeholder"]
        # what is given by the first half: read by the second, or itself the gradient of a weight
        read = {n for node in late for n in node.all_input_nodes} | {results[i] for i in weights}
        handed = [n for n in nodes if n in read and n in first and n.op != "placeholder"]
        places = [n for n in nodes if n.op == "placeholder"]
        kept = [i for i, n in enumerate(places) if n in read]
        one = Graph()
        copies: dict[Node, Node] = {}
        for node in nodes:
            if node.op == "placeholder" or (node in first and node.op != "output"):
                copies[node] = one.node_copy(node, copies.__getitem__)
        one.output(tuple(copies[n] for n in (*(results[i] for i in inputs), *handed)))
        two = Graph()
        copies = {}
        for node in (*(places[i] for i in kept), *handed):
            copies[node] = two.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in late:
            copies[node] = two.node_copy(node, copies.__getitem__)
        two.output(tuple(copies[results[i]] for i in weights))
        split = Split(len(results), inputs, weights, tuple(kept))
        return GraphModule(backward, one), GraphModule(backward, two), split
