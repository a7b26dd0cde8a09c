"""From an exported graph to a plain one: regions inlined, noise dropped, gradients stopped where the user stopped them.

Enters: an exported graph whose no_grad and autocast regions are submodules. Leaves: one flat graph of ops; a value made
under no_grad reaches code outside it through a `detach`. Refused: regions under an enabled autocast, control flow ops.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar.capture.explain import refuse
from autopar.capture.functional import writes
from autopar.program import tensor_of

aten = torch.ops.aten

_KEPT_META = ("val", "stack_trace", "nn_module_stack", "custom")
_CHECKS = ("aten::_assert", "aten::sym_constrain", "aten::_functional_assert", "aten::_functional_sym")
_DETACH = (aten.detach.default, aten.detach_.default)
_FLOATING_KINDS = ("parameter", "input")
"""Sources through which a gradient may flow: a frozen parameter may be unfrozen, an input may require one later."""


def is_check(node: Node) -> bool:
    """Assertions that export adds; they compute nothing."""
    target = node.target
    return node.name.startswith("_guards_fn") or (
        isinstance(target, torch._ops.OpOverload) and target.name().startswith(_CHECKS)
    )


class Inliner:
    """Copies an exported graph into `graph`, region bodies included; `no_grad` collects what is made under no_grad."""

    def __init__(self, graph: Graph, values: dict[Node, Any]) -> None:
        self.graph = graph
        self.values = values
        """Node of an exported graph -> node of ours, or a tuple of them for a region."""
        self.no_grad: set[Node] = set()

    def run(self, module: GraphModule, gradients: bool = True) -> Any:
        """Copy all ops of `module.graph`; its placeholders are in `values` already. Returns the mapped outputs."""
        for node in module.graph.nodes:
            if node.op == "call_function" and not is_check(node):
                self._call(module, node, gradients)
            elif node.op == "output":
                return self._mapped(node.args[0])
            elif node.op not in ("placeholder", "get_attr", "call_function"):
                raise refuse(node, f"a node of kind {node.op} in the captured graph", "please report it")
        raise AssertionError("a graph without output")

    def _call(self, module: GraphModule, node: Node, gradients: bool) -> None:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self.values[node] = self._region(module, node, gradients)
            return
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and isinstance(self.values.get(source), tuple):
            self.values[node] = self.values[source][node.args[1]]  # getitem of a region
            return
        copy = self.graph.create_node(
            "call_function", node.target, self._mapped(node.args), self._mapped(node.kwargs), node.name
        )
        copy.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        self.values[node] = copy
        if not gradients:
            self.no_grad.add(copy)

    def _region(self, module: GraphModule, node: Node, gradients: bool) -> Any:
        name = node.target.name()
        if name == "wrap_with_set_grad_enabled":
            gradients, body, operands = node.args[0], node.args[1], node.args[2:]
        elif name == "wrap_with_autocast" and not node.args[2]:
            body, operands = node.args[4], node.args[5:]
        elif name == "wrap_with_autocast":
            inner = next((n for n in _body(module, node.args[4]).graph.nodes if n.op == "call_function"), node)
            raise refuse(inner, "torch.autocast inside forward", "cast explicitly, or leave it out and use precision=")
        else:
            raise refuse(node, f"the operator {name} cannot be split", "choose with torch.where")
        inner = _body(module, body)
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for place, operand in zip(places, operands, strict=True):
            self.values[place] = self._mapped(operand)
        return self.run(inner, gradients)

    def _mapped(self, argument: Any) -> Any:
        return map_arg(argument, lambda n: self.values[n])


def _body(module: GraphModule, node: Node) -> GraphModule:
    return module.get_submodule(node.target)


def drop_unused(graph: Graph) -> None:
    """Erase calls that nothing reads and that write nothing (random ops too: their generator is ours)."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)


def stop_gradients(graph: Graph, no_grad: set[Node], kinds: dict[Node, str]) -> set[Node]:
    """Put a `detach` behind each value made under no_grad that would carry a gradient into code outside.

    kinds: the source kind of each placeholder. Returns: the nodes that may carry a gradient.
    """
    carries: set[Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if kinds[node] in _FLOATING_KINDS and _differentiable(node):
                carries.add(node)
        elif node.op == "call_function" and node.target not in _DETACH and _differentiable(node):
            if not any(a in carries for a in node.all_input_nodes):
                continue
            carries.add(node)
            if node.target is operator.getitem and node.args[0] in no_grad:
                no_grad.add(node)
            if node in no_grad and tensor_of(node) is not None:
                outside = [u for u in node.users if u not in no_grad]
                stop = detach_after(graph, node) if outside else node
                for user in outside:
                    user.replace_input_with(node, stop)
    return carries


def detach_after(graph: Graph, node: Node) -> Node:
    """A new `detach` of a node, right behind it."""
    with graph.inserting_after(node):
        stop = graph.call_function(aten.detach.default, (node,))
    stop.meta = {**node.meta, "val": node.meta["val"].detach()}
    return stop


def drop_noise(graph: Graph, carries: set[Node]) -> None:
    """Erase ops that change nothing, in a graph without in-place ops.

    Casts to the dtype and device that a value has, dropout that drops nothing, alias, lift_fresh_copy, and detach of
    what carries no gradient. `contiguous` and `clone` stay: a shard of a contiguous tensor need not be contiguous.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], Node) and _is_noise(node, carries):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_noise(node: Node, carries: set[Node]) -> bool:
    source, packet = node.args[0], getattr(node.target, "overloadpacket", None)
    assert isinstance(source, Node)
    if packet is aten.to:
        old, new = tensor_of(source), tensor_of(node)
        kept = node.kwargs.get("memory_format") in (None, torch.preserve_format)
        copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[2:])
        return (
            old is not None and new is not None and kept and not copies
            and (old.dtype, old.device, old.layout) == (new.dtype, new.device, new.layout)
        )  # fmt: skip
    if packet is aten.dropout:
        return node.args[1] == 0 or node.args[2] is False
    if node.target in _DETACH:
        return source not in carries
    if packet in (aten.lift_fresh_copy, aten.lift_fresh):
        return all(user.op != "output" for user in node.users)  # the user may write to a tensor that we hand out
    return packet is aten.alias


def _differentiable(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)
