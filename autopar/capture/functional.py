"""Take in-place writes out of a captured graph; every other op stays as the user wrote it.

Enters: a flat graph that may write in place, to buffers, parameters, fresh tensors, or through views of them.
Leaves: the same graph with values only, and the new value of each buffer and parameter that was written.
    %v = select(%x, 0, 1) ; add_(%v, 1) ; f(%x)   ->   %v = select(%x, 0, 1) ; %a = add(%v, 1) ;
                                                       %x1 = select_scatter(%x, %a, 0, 1) ; f(%x1)
Batch and instance norm in training write their statistics without saying so in their schema: they become explicit
means.
What is written under no_grad, or through detach, has the new values and the old gradient, as in torch: so a momentum
encoder, or a weight that is clamped, keeps its gradient.
Refused: writes to constants, or through a view without an inverse here. A write to an input stays inside the graph: the
caller's tensor is left as it was.

(torch's own functionalisation runs below autograd: it would replace batch norm and dropout by ops without a gradient,
and lose where the user stopped gradients.)
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar.capture.explain import refuse

aten = torch.ops.aten

_RENAMED = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
            "__ilshift__": "__lshift__", "__irshift__": "__rshift__", "normal_": "normal_functional"}  # fmt: skip
_OVERLOADS = {("bernoulli_", "float"): "p", ("pow_", "Tensor"): "Tensor_Tensor",
              ("float_power_", "Tensor"): "Tensor_Tensor", ("floor_divide_", "Tensor"): "default"}  # fmt: skip
_ONLY_NAMED_IN_PLACE = ("detach_", "unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_")
"""They write no element: they are views."""
_REFUSED = ("set_", "resize_", "as_strided_", "resize_as_")
_REMEDY = "write the result to a new tensor"

# Views by what undoes them. Order-preserving ones are undone by a reshape.
_STOPS = ("detach",)
_RESHAPES = (*_STOPS, "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as",
             "ravel", "contiguous", "to", "alias", "_unsafe_view", "lift_fresh", "type_as")  # fmt: skip
_SELF_INVERSE = ("transpose", "t", "swapaxes", "swapdims", "mT", "numpy_T")
_SCATTERS = {"slice": aten.slice_scatter, "select": aten.select_scatter, "diagonal": aten.diagonal_scatter}
_SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")


def writes(node: Node) -> bool:
    """Whether a call changes one of its arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.is_mutable or _tracked_norm(node)


def _plain_arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """(name, type) of the arguments that are not written."""
    every = target._schema.arguments
    return [(a.name, str(a.type)) for a in every if a.alias_info is None or not a.alias_info.is_write]


def _tracked_norm(node: Node) -> bool:
    """Batch or instance norm that updates running statistics (arguments x, weight, bias, mean, var, training, ...)."""
    return node.target in (aten.batch_norm.default, aten.instance_norm.default) and bool(
        node.args[5] and node.args[3] is not None
    )


def _stops(node: Node) -> bool:
    """Whether a view is one that gradients do not go through."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.removeprefix("aten::") in _STOPS


def functionalise(graph: Graph, kinds: dict[Node, str], no_grad: set[Node]) -> dict[Node, Node]:
    """Rewrite `graph` (see the module docstring) and return {buffer's or parameter's placeholder: its new value}.

    kinds: the source kind of each placeholder. no_grad: nodes made under no_grad; new ones are added.
    Raises: CaptureError for the writes that are refused.
    """
    for node in graph.nodes:
        name = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, torch._ops.OpOverload) else ""
        if name in _ONLY_NAMED_IN_PLACE:
            node.target = getattr(getattr(aten, name[:-1]), node.target._overloadname)
    if not any(writes(n) for n in graph.nodes):
        return {}
    rewriter = _Rewriter(graph, kinds, no_grad)
    for node in list(graph.nodes):
        rewriter.visit(node)
    return rewriter.finish()


class _Rewriter:
    """One walk over the graph.

    Every storage has a version that grows with each write. A value read at an older version than its storage's is made
    again from the tensor that it is a view of. "Original" below means a node of the graph as it came.
    """

    def __init__(self, graph: Graph, kinds: dict[Node, str], no_grad: set[Node]) -> None:
        self.graph, self.kinds, self.no_grad = graph, kinds, no_grad
        self.mode = next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
        self.original = {n: (n.args, n.kwargs) for n in graph.nodes}
        self.storage: dict[Node, int] = {}
        self.parent: dict[Node, Node] = {}
        """The argument that a node is a view of; bases have none."""
        self._alive = self._run_aliases()
        self.value = {n: n for n in self.storage}
        self.read_at = dict.fromkeys(self.storage, 0)
        self.version = dict.fromkeys(self.storage.values(), 0)
        self.written: dict[Node, Node] = {}
        """An in-place call -> the argument that it returns."""
        self.carrying = {self.storage[n] for n, kind in kinds.items() if kind in ("parameter", "input")}
        """Storages that may carry a gradient."""
        self.at = next(iter(graph.nodes))

    def _run_aliases(self) -> dict[Node, Any]:
        """Run the graph on fresh fake tensors: an output that shares its storage with an argument is a view of it.

        Returns all values: storages are known by address, which names one only while it lives.
        """
        run: dict[Node, Any] = {}
        with self.mode, torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    like = node.meta["val"]
                    run[node] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
                elif node.op == "call_function":
                    args, kwargs = map_arg((node.args, node.kwargs), run.__getitem__)
                    run[node] = node.target(*args, **kwargs)
                else:
                    continue
                several = isinstance(run[node], (tuple, list))
                keys = {
                    v.untyped_storage()._cdata
                    for v in (run[node] if several else (run[node],))
                    if isinstance(v, Tensor)
                }
                parent = next((a for a in node.all_input_nodes if self.storage.get(a) in keys), None)
                if parent is not None:
                    self.parent[node] = parent
                if len(keys) == 1 and (parent is not None or not several):
                    self.storage[node] = keys.pop()
        return run

    def visit(self, node: Node) -> None:
        """Let one original node read current values; replace it when it writes."""
        if node.op == "placeholder":
            return
        self.at = node
        reads_gradient = node not in self.no_grad and any(
            self.storage.get(a) in self.carrying for a in node.all_input_nodes
        )
        node.args, node.kwargs = map_arg((node.args, node.kwargs), self.read)
        if node.op == "output":
            return
        if _tracked_norm(node):
            self._norm_statistics(node)
        elif writes(node):
            args, kwargs = self.original[node]
            target = kwargs["out"] if "out" in kwargs else args[0]
            self.write(target, self._functional(node))
            self.written[node] = target
        if node in self.storage:
            self.read_at[node] = self.version[self.storage[node]]
            if reads_gradient:
                self.carrying.add(self.storage[node])

    def read(self, node: Node) -> Node:
        """The current value of an original node."""
        while node in self.written:
            node = self.written[node]
        key = self.storage.get(node)
        if key is None or self.read_at[node] == self.version[key] or node not in self.parent:
            return self.value.get(node, node)
        args, kwargs = map_arg(self.original[node], self.read)
        self.value[node] = self.emit(node.target, *args, like=node, **kwargs)
        self.read_at[node] = self.version[key]
        return self.value[node]

    def write(self, node: Node, new: Node, unseen: bool = False) -> None:
        """Make `new` the value of an original node, of what it is a view of, and of all other views of that.

        unseen: autograd does not see the write; gradients go on as if nothing had been written.
        """
        while node in self.written:
            node = self.written[node]
        key = self.storage[node]
        unseen = key in self.carrying and (unseen or self.at in self.no_grad or _stops(node))
        if node in self.parent:
            self.write(*self._merge(node, new), unseen=unseen)
            if unseen:  # a view is made again, with the gradient of what it is a view of
                return
        else:
            if self.kinds.get(node) == "constant":
                raise refuse(
                    self.at,
                    f"an in-place write to a tensor that is no registered buffer ({node.name})",
                    "write it outside forward, or register a buffer",
                )
            if unseen:
                new = self._with_gradient_of(self.read(node), new)
            self.version[key] += 1
        self.value[node] = new
        self.read_at[node] = self.version[key]

    def _merge(self, view: Node, new: Node) -> tuple[Node, Node]:
        """(the tensor that `view` is a view of, its value once `new` is written through the view)."""
        step, index = view, None
        if view.target is operator.getitem:
            step, index = self.parent[view], view.args[1]
        whole = self.parent[step]
        old, shape = self.read(whole), list(whole.meta["val"].shape)
        args, name = self.original[step][0][1:], step.target._schema.name.removeprefix("aten::")
        if name in _RESHAPES:
            same = shape == list(new.meta["val"].shape)
            return whole, new if same else self.emit(aten.reshape.default, new, shape)
        if name in _SCATTERS:
            return whole, self._scatter(_SCATTERS[name], old, new, *args)
        if name == "narrow":
            return whole, self._scatter(aten.slice_scatter, old, new, args[0], args[1], args[1] + args[2])
        if name in _SELF_INVERSE:
            return whole, self.emit(step.target, new, *args)
        if name == "permute":
            order = [d % len(shape) for d in args[0]]
            return whole, self.emit(aten.permute.default, new, [order.index(d) for d in range(len(shape))])
        if name == "movedim":
            return whole, self.emit(step.target, new, args[1], args[0])
        if index is not None and name == "unbind":
            return whole, self._scatter(aten.select_scatter, old, new, args[0] if args else 0, index)
        if index is not None and name in _SPLITS:
            dim = args[1] if len(args) > 1 else 0
            pieces = [piece.shape[dim] for piece in step.meta["val"]]
            start = sum(pieces[:index])
            return whole, self._scatter(aten.slice_scatter, old, new, dim, start, start + pieces[index])
        raise refuse(self.at, f"an in-place write through {name}", _REMEDY)

    def _scatter(self, target: Any, old: Node, new: Node, *args: Any) -> Node:
        """`old` with `new` in a part of it; of complex numbers torch differentiates it for their real view alone."""
        if not old.meta["val"].is_complex():
            return self.emit(target.default, old, new, *args)
        rank = old.meta["val"].dim()
        dims = 2 if target is aten.diagonal_scatter else 1
        given = (*args, *(a.default_value for a in target.default._schema.arguments[2 + len(args) :]))
        if dims == 2:  # offset, dim1, dim2
            given = (given[0], given[1] % rank, given[2] % rank)
        else:
            given = (given[0] % rank, *given[1:])
        parts = [self.emit(aten.view_as_real.default, self.emit(aten.resolve_conj.default, v)) for v in (old, new)]
        if dims == 2:  # a diagonal is the last dim of its tensor: the pair goes before it
            parts[1] = self.emit(aten.transpose.int, parts[1], -1, -2)
        return self.emit(aten.view_as_complex.default, self.emit(target.default, *parts, *given))

    def _with_gradient_of(self, old: Node, new: Node) -> Node:
        """new + (old - old), where only the first old has a gradient: the sum of exact zeros changes no value."""
        fixed = [self.emit(aten.detach.default, value) for value in (new, old)]
        made = self.emit(aten.add.Tensor, fixed[0], difference := self.emit(aten.sub.Tensor, old, fixed[1]))
        self.no_grad -= {made, difference}
        return made

    def _functional(self, node: Node) -> Node:
        """The value that an in-place call writes, as a call of its functional twin; of the target's dtype and shape."""
        schema, overload = node.target._schema, node.target._overloadname
        name = schema.name.split("::")[-1]
        if "out" in node.kwargs:
            return self._without_out(node)
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        old, like = node.args[0], node.meta["val"]
        if name == "zero_":
            return self.emit(aten.zeros_like.default, old)
        if name == "fill_" and overload == "Scalar":
            return self.emit(aten.full_like.default, old, node.args[1])
        if name in ("copy_", "fill_"):
            return self._fit(node.args[1], like)
        if name == "fill_diagonal_" and like.dim() == 2 and len(node.args) == 2:
            value = like.diagonal()
            made = self.emit(aten.full.default, list(value.shape), node.args[1], dtype=like.dtype, device=like.device)
            return self._scatter(aten.diagonal_scatter, old, made)
        renamed = _OVERLOADS.get((name, overload), overload)
        twin = getattr(getattr(aten, _RENAMED.get(name, name[:-1]), None), renamed, None)
        if written != [0] or twin is None or name in _REFUSED or not schema.name.startswith("aten::"):
            raise refuse(node, f"the in-place operator {name}", _REMEDY)
        args = node.args
        if renamed != overload:  # an argument that has a default in place only
            rest = [a for a in schema.arguments[len(args) :] if a.has_default_value() and not a.kwarg_only]
            args = (*args, *(a.default_value for a in rest))
        return self._fit(self.emit(twin, *args, **node.kwargs), like)

    def _without_out(self, node: Node) -> Node:
        """`f(x, out=y)`: the overload of f with the same other arguments."""
        wanted = _plain_arguments(node.target)
        packet = node.target.overloadpacket
        twins = [t for t in (getattr(packet, o) for o in packet.overloads()) if not t._schema.is_mutable]
        twin = next((t for t in twins if _plain_arguments(t) == wanted), None)
        if twin is None:
            raise refuse(node, f"out= of {node.target}", _REMEDY)
        new = self.emit(twin, *node.args, **{k: v for k, v in node.kwargs.items() if k != "out"})
        return self._fit(new, node.meta["val"])

    def _fit(self, new: Node, like: Tensor) -> Node:
        if new.meta["val"].shape != like.shape:
            new = self.emit(aten.expand.default, new, list(like.shape))
        value = new.meta["val"]
        if value.dtype == like.dtype and value.device == like.device:
            return new
        return self.emit(aten.to.device, new, like.device, like.dtype)

    def _norm_statistics(self, node: Node) -> None:
        """Write a norm's running mean and variance as means over the (global) batch; keep the norm itself pure.

        mean' = (1 - m) mean + m mean(x) ;  var' = (1 - m) var + m n/(n-1) mean((x - mean(x))^2)
        n is what one mean is over: a channel of the batch, or of one sample (the batch's mean of those is kept).
        """
        x, running_mean, running_var, momentum = node.args[0], node.args[3], node.args[4], node.args[6]
        mean_source, var_source = self.original[node][0][3:5]
        like = running_mean.meta["val"]
        shape, channels = x.meta["val"].shape, like.shape[0]
        by_sample = node.target is aten.instance_norm.default
        dims = [d for d in range(len(shape)) if d != 1 and (d or not by_sample)]
        count = math.prod(shape[d] for d in dims)
        x = self.emit(aten.detach.default, x)
        if x.meta["val"].dtype != like.dtype:
            x = self.emit(aten.to.dtype, x, like.dtype)
        mean = self.emit(aten.mean.dim, x, dims, True)
        centred = self.emit(aten.sub.Tensor, x, mean)
        var = self.emit(aten.mean.dim, self.emit(aten.mul.Tensor, centred, centred), dims, True)
        if by_sample:
            mean, var = (self.emit(aten.mean.dim, value, [0], True) for value in (mean, var))
        for source, running, new, scale in (
            (mean_source, running_mean, self.emit(aten.reshape.default, mean, [channels]), momentum),
            (var_source, running_var, self.emit(aten.reshape.default, var, [channels]), momentum * count / (count - 1)),
        ):
            kept = self.emit(aten.mul.Tensor, running, 1 - momentum)
            self.write(source, self.emit(aten.add.Tensor, kept, self.emit(aten.mul.Tensor, new, scale)))
        node.args = (*node.args[:3], None, None, *node.args[5:])

    def emit(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """A new call before the node being visited; `like` says whose gradient mode and place it has instead."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        with self.mode, torch.no_grad():
            fakes, named = map_arg((args, kwargs), lambda n: n.meta["val"])
            value = target(*fakes, **named)
        origin = like if like is not None else self.at
        place = origin if self.at.op == "output" else self.at
        node.meta = {**{k: v for k, v in place.meta.items() if k != "custom"}, "val": value}
        if origin in self.no_grad:
            self.no_grad.add(node)
        return node

    def finish(self) -> dict[Node, Node]:
        """Erase what has been replaced; {buffer's or parameter's placeholder: new value}."""
        for node in reversed(self.written):
            self.graph.erase_node(node)
        held = [n for n, kind in self.kinds.items() if kind in ("buffer", "parameter") and n in self.storage]
        return {n: self.value[n] for n in held if self.version[self.storage[n]]}
