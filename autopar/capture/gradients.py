"""Gradients that a model takes inside forward: penalties on them, forces, inner steps of meta learning.

Enters: calls of `torch.autograd.grad` while a model is traced. Leaves: one op each, `autopar::grad`, in whose place
`write_out` puts the backward of what lies between, op by op; each of those can be differentiated again.
    %y = tanh(%x) ; %g = autopar.grad([%y], [%x], [%s], True)[0]
    ->   %y = tanh(%x) ; %t = tanh(%x) ; %u = mul(%t, %t) ; %v = rsub(%u, 1) ; %g = mul(%s, %v)
Refused: gradients of complex values, batched ones, random numbers drawn between.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.autograd.graph import get_gradient_edge
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.capture.explain import refuse
from autopar.capture.functional import functionalise
from autopar.capture.functions import inside_function
from autopar.capture.refused import DroppedError
from autopar.program import tensor_of

aten = torch.ops.aten

_GRAD: Any = torch.autograd.grad
_ORIGINAL = types.FunctionType(_GRAD.__code__, _GRAD.__globals__, _GRAD.__name__, _GRAD.__defaults__)
_STOPS = (aten.detach.default, aten.detach_.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Traced where strides allowed them; those of another plan's values may not."""
_NORMS = (aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._softmax, aten._log_softmax)
_TABLE: dict[Any, Callable[..., Any]] = {
    **{op: rule for op, rule in core_aten_decompositions().items() if "backward" in str(op)},
    **get_decompositions(_NORMS),
}
"""Backwards as ops that have a rule and a derivative, and the forwards whose further results they read."""


def _taken(outputs: Any, inputs: Any, seeds: Any, create_graph: bool, unused: bool | None, zeros: bool) -> Any:
    """What `torch.autograd.grad` does meanwhile."""
    outs, ins = ([t] if isinstance(t, Tensor) else list(t) for t in (outputs, inputs))
    given = [seeds] if seeds is None or isinstance(seeds, Tensor) else list(seeds)
    given = given * len(outs) if given == [None] else given
    if any(not isinstance(t, Tensor) or t.is_complex() or _transformed(t) for t in (*outs, *ins)):
        raise DroppedError("differentiates: complex values, or inside a transform of torch.func")
    for t, seed in zip(outs, given, strict=True):
        if seed is None and t.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
    reached = _reached(outs, ins)
    if not all(reached) and not (unused or zeros):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph")
    filled = [torch.ones_like(t) if seed is None else seed for t, seed in zip(outs, given, strict=True)]
    wanted = [t for t, is_reached in zip(ins, reached, strict=True) if is_reached]
    found = iter(torch.ops.autopar.grad(outs, wanted, filled, create_graph) if wanted else ())
    missing = torch.zeros_like if zeros else lambda t: None
    return tuple(next(found) if is_reached else missing(t) for t, is_reached in zip(ins, reached, strict=True))


_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def _reached(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[bool]:
    """Of each input, whether autograd leads from an output to it.

    Raises: RuntimeError: one of them requires no gradient, as torch says.
    """
    edges = [(e.node, e.output_nr) for e in map(get_gradient_edge, inputs)]
    waiting = [(e.node, e.output_nr) for e in map(get_gradient_edge, outputs)]
    seen, walked = set(waiting), set()
    while waiting:
        node, _ = waiting.pop()
        if node not in walked:
            walked.add(node)
            waiting += [edge for edge in node.next_functions if edge[0] is not None]
            seen.update(waiting)
    return [edge in seen for edge in edges]


def _carrier(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
    only_inputs: bool = True, allow_unused: Any = None, is_grads_batched: bool = False, materialize_grads: bool = False,
) -> Any:  # fmt: skip
    from autopar.capture.gradients import intercepted  # it runs with torch's globals

    rest = only_inputs, allow_unused, is_grads_batched, materialize_grads
    return intercepted(outputs, inputs, grad_outputs, retain_graph, create_graph, *rest)


def intercepted(*args: Any) -> Any:
    """`torch.autograd.grad` with all its arguments, in the model or inside a user's Function, which stays whole."""
    outputs, inputs, seeds, _, create_graph, _, unused, batched, zeros = args
    if inside_function():
        return _ORIGINAL(*args)
    if batched:
        raise DroppedError("differentiates: is_grads_batched")
    if isinstance(inputs, dict):
        found = _taken(outputs, list(inputs.values()), seeds, create_graph, unused, zeros)
        return dict(zip(inputs, found, strict=True))
    return _taken(outputs, inputs, seeds, create_graph, unused, zeros)


@contextlib.contextmanager
def gradients_kept() -> Iterator[None]:
    """Inside, `torch.autograd.grad` is recorded as one op, also under a name that a module imported it by."""
    _GRAD.__code__ = _carrier.__code__
    try:
        yield
    finally:
        _GRAD.__code__ = _ORIGINAL.__code__


def write_out(graph: Graph, no_grad: set[Node]) -> None:
    """Replace every `autopar::grad` in a graph without in-place ops; no_grad: nodes made under it, new ones are added.

    Raises: CaptureError for what the module docstring refuses.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.autopar.grad.default:
            found = _Backward(graph, node, no_grad).run()
            for user in list(node.users):
                user.replace_all_uses_with(found[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)


class _Backward:
    """The backward of what lies between some outputs and inputs, written before the node that asks for it."""

    def __init__(self, graph: Graph, at: Node, no_grad: set[Node]) -> None:
        self.graph, self.at, self.no_grad = graph, at, no_grad
        self.outputs, self.inputs, self.seeds, create_graph = at.args
        self.held = at in no_grad or not create_graph
        """The results carry no gradient of their own."""
        self.mode = at.meta["val"][0].fake_mode
        self.grads: dict[Node, dict[int, Node]] = {}
        """Of each node, and of each of its results (0 where it has one)."""

    def run(self) -> list[Node]:
        """The gradient of each input."""
        between = self._between()
        for output, seed in zip(self.outputs, self.seeds, strict=True):
            self._add(output, seed)
        for node in reversed([n for n in self.graph.nodes if n in between]):
            if node in self.grads and node.op == "call_function":
                self._step(node, between)
        zero = aten.zeros_like.default
        return [self.grads[i][0] if i in self.grads else self.emit(zero, i) for i in self.inputs]

    def _between(self) -> set[Node]:
        """The nodes through which a gradient flows from the outputs to an input."""
        carries: set[Node] = set(self.inputs)
        for node in self.graph.nodes:
            if node is self.at:
                break
            stops = node in self.no_grad or node.target in _STOPS or not _floating(node)
            if not stops and any(a in carries for a in node.all_input_nodes):
                carries.add(node)
        return carries

    def _add(self, node: Node, grad: Node) -> None:
        """Sum a gradient into a node's; what a getitem gets belongs to its tuple."""
        node_of, place = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        for owner, k in dict.fromkeys(((node, 0), (node_of, place))):
            mine = self.grads.setdefault(owner, {})
            mine[k] = self.emit(aten.add.Tensor, mine[k], grad) if k in mine else grad

    def _step(self, node: Node, between: set[Node]) -> None:
        """From a node's gradient to its arguments'."""
        values = list(node.all_input_nodes)
        wanted = [v for v in values if v in between]
        if node.target is operator.getitem or not wanted:
            return
        given = self.grads[node]
        traced = self._traced(node, values, wanted, list(given))
        places = [n for n in traced.nodes if n.op == "placeholder"]
        copies = dict(zip(places, (*values, *given.values()), strict=True))
        for inner in traced.nodes:
            if inner.op == "call_function":
                if torch.Tag.nondeterministic_seeded in getattr(inner.target, "tags", ()):
                    raise refuse(node, "a gradient is taken through this inside forward", "write the derivative out")
                args, kwargs = map_arg((inner.args, inner.kwargs), copies.__getitem__)
                target = aten.reshape.default if inner.target in _VIEWS else inner.target
                copies[inner] = self.emit(target, *args, **kwargs)
            elif inner.op == "output":
                for value, grad in zip(wanted, inner.args[0], strict=True):
                    if grad is not None:
                        self._add(value, copies[grad])

    def _traced(self, node: Node, values: list[Node], wanted: list[Node], places: list[int]) -> Graph:
        """A graph from a node's arguments and its results' gradients to the gradients of `wanted`."""

        def pull(leaves: list[Tensor], grads: list[Tensor]) -> Any:
            known = dict(zip(values, leaves, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            results = [result] if isinstance(result, Tensor) else list(result)
            asked = [known[v] for v in wanted]
            pairs = [(results[p], grad) for p, grad in zip(places, grads, strict=True) if results[p].requires_grad]
            if not pairs:  # a value that is constant in its argument, as ones_like
                return (None,) * len(asked)
            made, theirs = zip(*pairs, strict=True)
            return _ORIGINAL(made, asked, theirs, create_graph=True, allow_unused=True)

        with self.mode, torch.enable_grad():
            fakes = [_like(v.meta["val"], v in wanted) for v in values]
            seeds = [_like(self.grads[node][p].meta["val"]) for p in places]
            traced = make_fx(pull, decomposition_table=_TABLE)(fakes, seeds).graph
        for inner in list(traced.nodes):  # autograd detaches what it saves; our ops are differentiated as they stand
            if inner.target in _STOPS:
                inner.replace_all_uses_with(inner.args[0])
                traced.erase_node(inner)
        functionalise(traced, {}, set())
        traced.eliminate_dead_code()
        return traced

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        with self.mode, torch.no_grad():
            fakes, named = map_arg((args, kwargs), lambda n: n.meta["val"])
            value = target(*fakes, **named)
        node.meta = {**{k: v for k, v in self.at.meta.items() if k != "custom"}, "val": value}
        if self.held:
            self.no_grad.add(node)
        return node


def _like(value: Any, wanted: bool = False) -> Any:
    """A fresh tensor of this kind under the mode that is on; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(wanted)


def _floating(node: Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return tensor_of(node) is None or any(isinstance(v, Tensor) and v.is_floating_point() for v in leaves)


def _with_autograd(
    outputs: list[Tensor], inputs: list[Tensor], seeds: list[Tensor], create_graph: bool
) -> list[Tensor]:
    """Values of no meaning, whose gradient leads to everything that a true one's may."""
    with torch.set_grad_enabled(create_graph and torch.is_grad_enabled()):
        link = sum(t.sum() for t in (*outputs, *inputs, *seeds))
        return [torch.zeros_like(t) + (link * 0).to(t) for t in inputs]


def _below_autograd(
    outputs: list[Tensor], inputs: list[Tensor], seeds: list[Tensor], create_graph: bool
) -> list[Tensor]:
    return [torch.zeros_like(t) for t in inputs]


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("grad(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool create_graph) -> Tensor[]")
_LIBRARY.impl("grad", _with_autograd, "Autograd")
_LIBRARY.impl("grad", _below_autograd, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::grad", _below_autograd, lib=_LIBRARY)
