"""Lower the local program to the two graphs that really run, cut as the plan says.

AOTAutograd traces the program of one rank, collectives included, into one joint graph; `partition` cuts it. A forward
value that the
backward needs is saved, unless

    it is made of parameters alone (a gathered shard, a transposed weight): made again from the parameter, so a gathered
    parameter is freed after its use and gathered a second time (ZeRO-3);
    it is made of nothing (a mask, positions): made again, as are random numbers from their key, but the key is saved:
    by the time of the backward another call may have begun;
    it lies in a block that the plan recomputes: made again from the block's inputs ("full"), or from the results of
    products and collectives ("selective").

Made-again nodes stand just before their first use in the backward, so that they live shortly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.program import record
from autopar.runtime import random_ops  # noqa: F401 - defines torch.ops.autopar.key

PRODUCTS = frozenset(
    "mm addmm bmm baddbmm convolution native_layer_norm native_batch_norm".split()
    + "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention".split()
    + "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention".split()
)
"""Ops that "selective" recomputation does not run again."""


@dataclass(frozen=True, eq=False)
class Graphs:
    """The lowered program. saved_bytes: what the forward keeps for the backward, parameters and inputs not counted."""

    forward: GraphModule
    backward: GraphModule
    saved_bytes: int


@dataclass(frozen=True, eq=False)
class Partition:
    """Cut a joint graph into forward and backward.

    Input:   %g = all_gather(%w) ; %y = mm(%x, %g) ; ... ; %dx = mm(%dy, t(%g))
    Output:  forward: %g = all_gather(%w) ; %y = mm(%x, %g), saves %w
             backward: %g = all_gather(%w) ; %dx = mm(%dy, t(%g))
    Refuses: nothing; what no rule makes again is saved.
    """

    parameters: frozenset[int]
    """Positions of the placeholders that are parameters."""
    recompute: Mapping[str, str] = field(default_factory=dict)
    """Block -> "none", "selective" or "full"."""

    def run(self, joint: GraphModule, num_forward_outputs: int) -> Graphs:
        outputs = list(_output(joint.graph).args[0])
        results, grads = outputs[:num_forward_outputs], outputs[num_forward_outputs:]
        walk = _Walk(self, joint.graph)
        backward, saved = walk.backward(grads)
        forward = walk.forward(results, saved)
        size = sum(_size_bytes(n) for n in saved if n.op != "placeholder")
        return Graphs(GraphModule(joint, forward), GraphModule(joint, backward), size)


class _Walk:
    def __init__(self, policy: Partition, graph: Graph) -> None:
        self.policy, self.nodes = policy, list(graph.nodes)
        self.places = [n for n in self.nodes if n.op == "placeholder"]
        self.late = self.closure(n for n in self.places if "tangents" in str(n.target))
        primals = [n for n in self.places if n not in self.late]
        self.keys = {n for n in self.nodes if n.target is torch.ops.autopar.key.default}
        inputs = [n for i, n in enumerate(primals) if i not in policy.parameters]
        self.of_inputs = self.closure(inputs)

    def closure(self, roots: Any) -> set[Node]:
        """The nodes that depend on some of the roots."""
        found = set(roots)
        for node in self.nodes:
            if any(i in found for i in node.all_input_nodes):
                found.add(node)
        return found

    def made_again(self, node: Node) -> bool:
        if node.op != "call_function" or node in self.late or node in self.keys:
            return False
        if node not in self.of_inputs:  # of parameters, or of nothing
            return True
        level = self.policy.recompute.get(record(node).block, "none")
        if node.target is operator.getitem:
            source = node.args[0]
            return isinstance(source, Node) and self.made_again(source)
        return level == "full" or (level == "selective" and not _is_product(node))

    def backward(self, grads: Sequence[Any]) -> tuple[Graph, list[Node]]:
        """The backward graph, and the forward values it starts from, in the order of its placeholders."""
        wanted: set[Node] = set()
        stack = [g for g in grads if isinstance(g, Node)]
        saved: dict[Node, None] = {}
        while stack:
            node = stack.pop()
            if node in wanted:
                continue
            wanted.add(node)
            if node in self.late or self.made_again(node):
                stack += node.all_input_nodes
            else:
                saved[node] = None
        order = {n: i for i, n in enumerate(self.nodes)}
        start = sorted(saved, key=order.__getitem__)
        graph, copies = Graph(), {}
        early = [n for n in start if n not in self.late]
        for node in early:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.places:
            if node in self.late:
                copies[node] = graph.node_copy(node)

        def emit(node: Node) -> None:
            pending = [node]
            while pending:
                at = pending[-1]
                missing = [i for i in at.all_input_nodes if i not in copies]
                if missing:
                    pending += missing
                    continue
                pending.pop()
                if at not in copies:
                    copies[at] = graph.node_copy(at, copies.__getitem__)

        for node in self.nodes:
            if node in self.late and node in wanted and node.op == "call_function":
                emit(node)
        for grad in grads:
            if isinstance(grad, Node):
                emit(grad)
        graph.output(tuple(copies[g] if isinstance(g, Node) else g for g in grads))
        return graph, early

    def forward(self, results: Sequence[Any], saved: Sequence[Node]) -> Graph:
        graph, copies = Graph(), {}
        needed: set[Node] = set()
        stack = [n for n in (*results, *saved) if isinstance(n, Node)]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        for node in self.nodes:
            if (node.op == "placeholder" and node not in self.late) or (node.op != "output" and node in needed):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in (*results, *saved)))
        return graph


def _output(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def _is_product(node: Node) -> bool:
    name = str(node.target).partition(".")[2].partition(".")[0] or str(node.target)
    return name in PRODUCTS or "_c10d_functional" in str(node.target)


def _size_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def lower_to_graphs(
    run: Callable[..., Any], partition: Partition, passes: Sequence[Callable[[GraphModule], GraphModule]]
) -> tuple[Callable[..., Any], list[Graphs]]:
    """A function that traces, cuts and runs `run` on its first call, and the graphs it then has (a list that fills).

    Args:    run: the local program as a function of its flat inputs. passes: rewrite each of the two graphs.
    """
    from functorch.compile import aot_function, make_boxed_func

    made: list[Graphs] = []

    def cut(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[GraphModule, GraphModule]:
        graphs = partition.run(joint, num_fwd_outputs)
        forward, backward = graphs.forward, graphs.backward
        for rewrite in passes:
            forward, backward = rewrite(forward), rewrite(backward)
        made.append(Graphs(forward, backward, graphs.saved_bytes))
        return forward, backward

    def compiled(module: GraphModule, inputs: Any) -> Any:
        return make_boxed_func(module.forward)

    return aot_function(run, compiled, compiled, partition_fn=cut), made
