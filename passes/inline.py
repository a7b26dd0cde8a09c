"""Put the joint graph of one block in the place of every call of a block equal to it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.passes.lower import Draft, late_nodes
from autopar.program import Record, record, set_record
from autopar.repeated import Place

EDGE = torch.ops.autopar.edge.default


@dataclass(frozen=True, eq=False)
class Inline:
    """Write blocks out again, forward and backward, each value once and under the names of its own block.

    Input:   %r = block([%x, %w], 3) ; %y = getitem(%r, 0) ; ... ; %g = block_backward([%dy], 3) ; %dx = getitem(%g, 0)
    Output:  %a = mul(%x, %w) ; %y = sin(%a) ; ... ; %c = cos(%a) ; %e = mul(%dy, %c) ; %dx = mul(%e, %w)
    Refuses: nothing.
    """

    places: Mapping[int, Place]

    def run(self, joint: GraphModule) -> GraphModule:
        graph, copies = Graph(), dict[Node, Node]()
        results: dict[Node, Sequence[Node]] = {}
        entered: dict[int, _Copy] = {}
        for node in joint.graph.nodes:
            if node.target is torch.ops.autopar.block.default:
                values, number = node.args
                entered[number] = _Copy(graph, self.places[number], [copies[v] for v in values])
                results[node] = entered[number].forward()
            elif node.target is torch.ops.autopar.block_backward.default:
                grads, number = node.args
                results[node] = entered[number].backward([copies[g] for g in grads])
            elif node.target is operator.getitem and node.args[0] in results:
                copies[node] = results[node.args[0]][node.args[1]]
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.lint()
        found = Draft(joint, graph)
        found.meta.update(joint.meta)
        return found


class _Copy:
    """A block on its way into the graph."""

    def __init__(self, graph: Graph, place: Place, values: Sequence[Node]) -> None:
        self.graph, template = graph, place.template
        self.records: Mapping[Record, Record] = place.block.records(place.kind.first)
        self.nodes = list(template.graph.nodes)
        places = [n for n in self.nodes if n.op == "placeholder"]
        self.late = late_nodes(self.nodes)
        self.tangents = places[len(values) :]
        self.copies = dict(zip(places, values, strict=False))
        outputs = self.nodes[-1].args[0]
        self.outputs, self.grads = outputs[: len(template.outputs)], outputs[len(template.outputs) :]

    def forward(self) -> list[Node]:
        self.emit(n for n in self.nodes if n not in self.late)
        return [self.copies[o] for o in self.outputs]

    def backward(self, grads: Sequence[Node]) -> list[Node]:
        self.copies.update(zip(self.tangents, grads, strict=True))
        self.emit(n for n in self.nodes if n in self.late)
        return [self.copies[g] for g in self.grads if isinstance(g, Node)]

    def emit(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op != "call_function":
                continue
            if node.target is EDGE:
                self.copies[node] = self.copies[node.args[0]]  # type: ignore[index]
                continue
            made = self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            if "custom" in node.meta:
                set_record(made, self.records.get(record(node), record(node)))
