"""From an exported graph to ours: noise dropped, gradients stopped where the user stopped them, autocast made casts.

Enters: an exported graph in which no_grad and autocast are marks. Leaves: a graph of ops alone; a value made under
no_grad reaches code outside it through a `detach`; what autocast casts is cast by nodes of its own. Refused: control
flow operators, and casts inside an operator.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch._export.passes.replace_autocast_with_hop_pass as autocast_pass
import torch._export.passes.replace_set_grad_with_hop_pass as set_grad_pass
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.capture.autocast import CannotTell, Region, casts_of
from autopar.capture.explain import refuse
from autopar.capture.functional import writes
from autopar.program import tensor_of

aten = torch.ops.aten

_KEPT_META = ("val", "stack_trace", "nn_module_stack", "custom")
_CHECKS = ("aten::_assert", "aten::sym_constrain", "aten::_functional_assert", "aten::_functional_sym")
_DETACH = (aten.detach.default, aten.detach_.default)
_PASSES = ((set_grad_pass, "replace_set_grad_with_hop_pass"), (autocast_pass, "replace_autocast_with_hop_pass"))
_FLOATING_KINDS = ("parameter", "input")
"""Sources through which a gradient may flow: a frozen parameter may be unfrozen, an input may require one later."""


def is_check(node: Node) -> bool:
    """Assertions that export adds; they compute nothing."""
    target = node.target
    return node.name.startswith("_guards_fn") or (
        isinstance(target, torch._ops.OpOverload) and target.name().startswith(_CHECKS)
    )


@contextlib.contextmanager
def regions_flat() -> Iterator[None]:
    """Let export leave no_grad and autocast as marks in the graph instead of making regions of them.

    Its own passes make submodules, and lose a no_grad inside an autocast (torch 2.13).
    """
    before = [(module, name, getattr(module, name)) for module, name in _PASSES]
    for module, name, _ in before:
        setattr(module, name, lambda graph_module, signature: (graph_module, signature))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


class Copier:
    """Copies an exported graph into `graph`; `no_grad` collects what is made under no_grad."""

    def __init__(self, graph: Graph, values: dict[Node, Any]) -> None:
        self.graph = graph
        self.values = values
        """Node of the exported graph -> node of ours."""
        self.no_grad: set[Node] = set()
        self._gradients = True
        self._regions: list[Region | None] = [None]
        """The autocast around each open region, the innermost last; None where it is off."""
        self._casts: dict[tuple[Node, torch.dtype, bool], Node] = {}
        """Of parameters and inputs, within a region: torch casts each of them once there."""

    def run(self, module: GraphModule) -> Any:
        """Copy all ops of `module.graph`; its placeholders are in `values` already. Returns the mapped outputs."""
        for node in module.graph.nodes:
            if node.op == "call_function" and not is_check(node):
                self._call(node)
            elif node.op == "output":
                return self._mapped(node.args[0])
            elif node.op not in ("placeholder", "get_attr", "call_function"):
                raise refuse(node, f"a node of kind {node.op} in the captured graph", "please report it")
        raise AssertionError("a graph without output")

    def _call(self, node: Node) -> None:
        if node.target is torch._C._set_grad_enabled:
            self._gradients = bool(node.args[0])
        elif node.target is _enter_autocast:
            self._regions.append(Region.of(*node.args))
        elif node.target is _exit_autocast:
            self._regions.pop()
            if len(self._regions) == 1:
                self._casts.clear()
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise refuse(node, f"the operator {node.target.name()} cannot be split", "choose with torch.where")
        elif getattr(node.target, "__module__", "").startswith("torch._functorch"):
            what = f"torch.func's {node.target.__name__.strip('_')} leaves operators that only this process can run"
            raise refuse(node, what, "write the derivative out, or put it in an autograd.Function")
        else:
            args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
            if self._regions[-1] is not None and isinstance(node.target, torch._ops.OpOverload):
                args, kwargs = self._cast(node, args, kwargs, self._regions[-1])
            self.values[node] = self._new(node, node.target, args, kwargs, node.name)

    def _new(self, like: Node, target: Any, args: Any, kwargs: Any, name: str | None = None) -> Node:
        new = self.graph.create_node("call_function", target, args, kwargs, name)
        new.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
        if not self._gradients:
            self.no_grad.add(new)
        return new

    def _cast(self, node: Node, args: Any, kwargs: Any, region: Region) -> Any:
        """The arguments of a call under autocast, those cast that it casts."""
        mode = next((v.fake_mode for v in map(tensor_of, node.all_input_nodes) if isinstance(v, FakeTensor)), None)
        if mode is None:
            return args, kwargs
        try:
            found = casts_of(node.target, *map_arg((args, kwargs), lambda n: n.meta["val"]), region, mode)
        except CannotTell:
            remedy = "cast explicitly, or leave autocast out and use precision="
            raise refuse(node, "torch.autocast casts inside this operator", remedy) from None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Node) and tensor_of(leaf) is not None]
        for place, dtype in found.items():
            source = leaves[places[place]]
            key = (source, dtype, self._gradients)
            new = self._casts.get(key)
            if new is None:
                new = self._new(node, aten.to.dtype, (source, dtype), {})
                with mode, torch.no_grad():
                    new.meta["val"] = source.meta["val"].to(dtype)
                if source.op == "placeholder":
                    self._casts[key] = new
            leaves[places[place]] = new
        return pytree.tree_unflatten(leaves, spec)

    def _mapped(self, argument: Any) -> Any:
        return map_arg(argument, lambda n: self.values[n])


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
