"""Lower the local program to the two graphs that really run, cut as the plan says.

AOTAutograd traces the program of one rank, collectives included, into one joint graph; `Partition` cuts it. A forward
value that the backward needs is saved, unless

    it is a view: made again from the value whose memory it shares, so that no memory is counted or kept twice;
    it is a cheap part of one op of the user's (the scaled input in an RMS norm): made again from the op's own input;
    it is made of parameters alone (a gathered shard, a transposed weight): made again from the parameter, so a gathered
    parameter is freed after its use and gathered a second time (ZeRO-3);
    it is made of nothing (a mask, positions): made again, as are random numbers from their key, but the key is saved:
    by the time of the backward another call may have begun;
    a rewrite of the joint graph says so (torch's own mark, `recompute`): made again, or saved, whatever else holds;
    it lies in a block that the plan recomputes and is read inside that block only: made again from the block's inputs
    ("full"), or from the results of products and collectives ("selective").

Made-again nodes stand just before their first use in the backward, so that they live shortly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autopar.passes.aliases import is_view, own_gradients, shares
from autopar.program import record
from autopar.runtime.bound import bound
from autopar.runtime.unused import gradients_read

aten = torch.ops.aten

PRODUCTS = frozenset(
    "mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention".split()
)
"""Ops that "selective" recomputation does not run again."""


_TOLD = {CheckpointPolicy.MUST_RECOMPUTE: True, CheckpointPolicy.MUST_SAVE: False}


@dataclass(frozen=True, eq=False)
class Graphs:
    """The lowered program. saved: names of the forward values kept for the backward, and the bytes of each; parameters
    and inputs, which live anyway, are not among them. results: how many outputs the forward gives before what is saved.
    read: for each input, the incoming gradients that its own is made of, as bits.
    """

    forward: GraphModule
    backward: GraphModule
    saved: Mapping[str, int]
    results: int
    read: tuple[int, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())


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

    def run(self, joint: GraphModule, num_forward_outputs: int, made: type[GraphModule] = GraphModule) -> Graphs:
        """made: the class of the two modules."""
        outputs = list(_output(joint.graph).args[0])
        results, grads = outputs[:num_forward_outputs], outputs[num_forward_outputs:]
        cut = _Cut(self, joint.graph, results)
        saved = cut.saved(grads)
        backward, forward = cut.backward(grads, saved), cut.forward(results, saved)
        sizes = {n.name: _size_bytes(n) for n in saved if n.op != "placeholder"}
        return Graphs(made(joint, forward), made(joint, backward), sizes, len(results))


class _Cut:
    """The joint graph and what is decided for its nodes."""

    def __init__(self, policy: Partition, graph: Graph, results: Sequence[Any]) -> None:
        self.policy, self.nodes = policy, list(graph.nodes)
        self.places = [n for n in self.nodes if n.op == "placeholder"]
        self.results = {n for n in results if isinstance(n, Node)}
        self.late = late_nodes(self.nodes)
        self.primals = [n for n in self.places if n not in self.late]
        self.of_inputs = dependents(self.nodes, (n for i, n in enumerate(self.primals) if i not in policy.parameters))

    def made_again(self, node: Node) -> bool:
        if node.op != "call_function" or node in self.late or _draws(node):
            return False
        if (told := node.meta.get("recompute")) in _TOLD:
            return _TOLD[told]
        if is_view(node) or node not in self.of_inputs:  # the latter: of parameters, or of nothing
            return True
        if node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, Node) and is_view(source):
                return True
            return isinstance(source, Node) and self.made_again(source) and not self.leaves_block(node)
        if self.inside_op(node):
            return True
        level = self.policy.recompute.get(record(node).block, "none")
        if level == "none" or (level == "selective" and _is_product(node)):
            return False
        return not self.leaves_block(node)

    def inside_op(self, node: Node) -> bool:
        """Is this an elementwise step inside one op of the user's, read by the same op's other steps only?"""
        users = [u for u in node.users if u not in self.late and u.op != "output"]
        pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        op = record(node).op
        if not pointwise or not op or not users or node in self.results or _takes_a_part(node):
            return False
        return all(record(u).op == op for u in users)

    def leaves_block(self, node: Node) -> bool:
        """Is this value, or a view of it, an output or read by another block's forward? Such values are saved: without
        that each block would be made again from the first one's input."""
        block = record(node).block
        if node in self.results:
            return True
        for user in node.users:
            if user in self.late or user.op == "output":
                continue
            if user.target is operator.getitem and not is_view(node):
                continue  # its own items answer for themselves
            if record(user).block != block or (shares(user) and self.leaves_block(user)):
                return True
        return False

    def saved(self, grads: Sequence[Any]) -> list[Node]:
        """Forward values that the backward starts from, in the order of the graph."""
        wanted: set[Node] = set()
        stack = [g for g in grads if isinstance(g, Node)]
        found: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in wanted:
                continue
            wanted.add(node)
            if node in self.late or self.made_again(node):
                stack += node.all_input_nodes
            else:
                found.add(node)
        return [n for n in self.nodes if n in found]

    def backward(self, grads: Sequence[Any], saved: Sequence[Node]) -> Graph:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in saved:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.places:
            if node in self.late:
                copies[node] = graph.node_copy(node)
        wanted = ancestors([g for g in grads if isinstance(g, Node)])
        for node in [n for n in self.nodes if n in self.late and n in wanted and n.op == "call_function"]:
            _emit(graph, node, copies)
        for grad in grads:
            if isinstance(grad, Node):
                _emit(graph, grad, copies)
        graph.output(tuple(copies[g] if isinstance(g, Node) else g for g in grads))
        return graph

    def forward(self, results: Sequence[Any], saved: Sequence[Node]) -> Graph:
        graph = Graph()
        copies: dict[Node, Node] = {}
        needed = ancestors([n for n in (*results, *saved) if isinstance(n, Node)])
        for node in self.nodes:
            if node in self.primals or (node.op != "output" and node in needed):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in (*results, *saved)))
        return graph


def _emit(graph: Graph, node: Node, copies: dict[Node, Node]) -> None:
    """Copy a node, and before it those of its inputs that are not there yet."""
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


def late_nodes(nodes: Sequence[Node]) -> set[Node]:
    """The nodes of a joint graph that belong to the backward, gradients that come in included. What autograd's formulas
    make of forward values alone (2 x, for a square) does, too.
    """
    tangents = (n for n in nodes if n.op == "placeholder" and "tangents" in str(n.target))
    return dependents(nodes, (*tangents, *(n for n in nodes if n.meta.get("partitioner_tag") == "is_backward")))


def dependents(nodes: Sequence[Node], roots: Iterable[Node]) -> set[Node]:
    """The nodes that depend on some of the roots, and these."""
    found = set(roots)
    for node in nodes:
        if any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """These nodes and all that they are made of."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _output(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def _takes_a_part(node: Node) -> bool:
    """Is this a copy of a shard of a whole value? It is saved itself: the whole one is larger."""
    source = node.args[0] if node.target is aten.clone.default else None
    while isinstance(source, Node) and is_view(source):
        source = source.args[0]
    return isinstance(source, Node) and _size_bytes(source) > _size_bytes(node)


def _draws(node: Node) -> bool:
    """Does this op give something else when it runs a second time? torch's random ops, and the key of ours."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return target.name() == "autopar::key"
    names = [a.name for a in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0  # attention draws for its dropout only


def _is_product(node: Node) -> bool:
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    return name.partition("::")[2] in PRODUCTS or name.startswith("_c10d_functional::")


def _size_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


class Draft(GraphModule):
    """A graph that passes still rewrite: no code is made of it after each of them, which took a fifth of lowering."""

    def recompile(self) -> Any:
        return None


def lower_to_graphs(
    run: Callable[..., Any],
    partition: Partition,
    passes: Sequence[Callable[[GraphModule], GraphModule]],
    told: Callable[[Graphs], None],
    inductor: bool = False,
    backward_of: Callable[[GraphModule], Callable[[list[Any]], Any]] | None = None,
    joint_passes: Sequence[Callable[[GraphModule], GraphModule]] = (),
) -> Callable[..., Any]:
    """A function that traces, cuts and runs `run` on its first call.

    Args:    run: the local program as a function of its flat inputs. passes: rewrite each of the two graphs.
             told: is handed the graphs when they are made. inductor: takes ops apart as Inductor wants them, and hands
             it both graphs. backward_of: makes the function of the backward graph; `boxed` when not given.
             joint_passes: rewrite the joint graph before it is cut.
    """
    from functorch.compile import aot_function

    def cut(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[GraphModule, GraphModule]:
        try:
            graphs = rewritten(joint, num_fwd_outputs)
        except Exception as error:
            raise PassError(str(error)) from error
        told(graphs)
        return graphs.forward, graphs.backward

    def rewritten(joint: GraphModule, num_fwd_outputs: int) -> Graphs:
        for rewrite in joint_passes:
            joint = rewrite(joint)
        read = gradients_read(joint.graph, num_fwd_outputs)
        graphs = partition.run(joint, num_fwd_outputs, Draft)
        forward, backward = graphs.forward, own_gradients(graphs.backward)
        for rewrite in passes:
            forward, backward = rewrite(forward), rewrite(backward)
        if not inductor:
            _loosen(forward)
            _loosen(backward)
        forward, backward = (GraphModule(m, m.graph) for m in (forward, backward))
        return replace(graphs, forward=forward, backward=backward, read=read)

    def compiled(module: GraphModule, inputs: Any) -> Any:
        return boxed(module)

    if not inductor:
        late = backward_of or boxed
        return aot_function(run, compiled, lambda module, inputs: late(module), partition_fn=cut)
    from torch._inductor.compile_fx import compile_fx_inner

    return aot_function(
        run, compile_fx_inner, compile_fx_inner, partition_fn=cut, decompositions=decompositions_of(inductor)
    )


def decompositions_of(inductor: bool) -> dict[Any, Callable[..., Any]] | None:
    """How ops are taken apart when they are traced: as Inductor wants them, or as AOTAutograd does by itself."""
    if not inductor:
        return None
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


class PassError(Exception):
    """One of our own passes failed on a graph that AOTAutograd made; the cause says how."""


class _Traced(Exception):
    """The joint graph is there; nothing is to be run."""


def trace_joint(
    run: Callable[..., Any], values: Sequence[torch.Tensor], decompositions: Mapping[Any, Callable[..., Any]] | None
) -> tuple[Graph, int]:
    """The joint graph of a function of tensors, which may be fake, and how many of its results are the forward's."""
    from functorch.compile import aot_function

    found: list[tuple[Graph, int]] = []

    def traced(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append((joint.graph, num_fwd_outputs))
        raise _Traced

    def without_gradients(module: GraphModule, inputs: Any) -> Any:
        return traced(module, inputs, num_fwd_outputs=len(_output(module.graph).args[0]))  # type: ignore[arg-type]

    with suppress(_Traced):
        table = dict(decompositions) if decompositions is not None else None
        aot_function(run, without_gradients, partition_fn=traced, decompositions=table)(*values)
    return found[0]


def _loosen(module: GraphModule) -> None:
    """Views become reshapes: some ops (the backward of elu) lay out their result otherwise than they say when traced,
    so that a view of the traced strides does not always fit. No write is ever read through a view.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    module.recompile()


def boxed(module: GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function of one list, which it empties: so each saved value is freed after its last use."""
    from functorch.compile import make_boxed_func

    codegen = getattr(torch.fx.graph, "_BoxedCodeGen", None)
    if codegen is None:  # torch before 2.9: saved values live as long as the call
        return make_boxed_func(module.forward)
    module.graph.set_codegen(codegen())
    module.recompile()
    run = bound(module)
    call: Any = lambda args: run(args)  # noqa: E731 - a bound method takes no attribute
    call._boxed_call = True
    return call
