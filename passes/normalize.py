"""Bring the captured graph into the few forms that the rules know: sums with global counts instead of means of losses,
random numbers from our own generator, no factory that reads a tensor only for its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.passes import normalize_random
from autopar.program import Program, record, set_record, tensors_of
from autopar.rules import loss
from autopar.rules.call import Call, is_getitem
from autopar.rules.loss import MEAN, NONE, SUM, probabilities

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Normalize:
    """Split mean losses into sum and global count, draw random numbers by key, and free factories of the tensors they
    only look at.

    Input:   %l = cross_entropy_loss(%x, %t)
    Output:  %s = cross_entropy_loss(%x, %t, reduction=sum) ; %n = sum(ne(%t, -100)) ; %l = div(%s, %n)
    Refuses: random ops that `normalize_random` does not know; everything else that it does not know stays as it is.
    """

    def run(self, program: Program) -> Program:
        graph = Graph()
        values: dict[Node, Any] = {}
        for node in program.graph.nodes:
            if is_getitem(node) and isinstance(values[node.args[0]], tuple):
                values[node] = values[node.args[0]][node.args[1]]
                continue
            if node.op == "call_function":
                rewrite = REWRITES.get(_packet(node))
                replaced = rewrite(Emitter(graph, node, values)) if rewrite is not None else None
                if replaced is not None:
                    values[node] = replaced
                    continue
                normalize_random.refuse(node)
            values[node] = graph.node_copy(node, values.__getitem__)
        return replace(program, graph=_clean(graph))


@dataclass(frozen=True, slots=True)
class Emitter:
    """Adds calls in place of `node`, computing their fake values and copying its record."""

    graph: Graph
    node: Node
    values: dict[Node, Any]
    """Node of the old graph -> node of the new one; a tuple of them for an op with several outputs that was replaced.
    """

    @property
    def call(self) -> Call:
        return Call(self.node)

    def new(self, name: str) -> Any:
        """An argument by schema name, as it is in the new graph."""
        value = self.call.arg(name)
        return self.values[value] if isinstance(value, Node) else value

    def again(self, *, like: str = "", **changes: Any) -> Node:
        """The call itself with some arguments changed by schema name."""
        args, kwargs = torch.fx.node.map_arg((self.node.args, dict(self.node.kwargs)), self.values.__getitem__)
        args, kwargs = list(args), dict(kwargs)
        for position, argument in enumerate(self.call.target._schema.arguments):
            if argument.name in changes:
                if position < len(args):
                    args[position] = changes[argument.name]
                else:
                    kwargs[argument.name] = changes[argument.name]
        return self.emit(self.node.target, *args, like=like, **kwargs)

    def emit(self, target: Any, *args: Any, like: str = "", **kwargs: Any) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self.node.meta.items() if k != "val"}
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next(
            (v.fake_mode for v in torch.utils._pytree.tree_leaves((fake_args, fake_kwargs)) if hasattr(v, "fake_mode")),
            None,
        )
        mode = mode or next((v.fake_mode for v in tensors_of(self.node) if hasattr(v, "fake_mode")), None)
        if mode is not None:
            with mode:
                made.meta["val"] = target(*fake_args, **fake_kwargs)
        else:
            made.meta["val"] = target(*fake_args, **fake_kwargs)
        found = record(self.node)
        set_record(made, replace(found, op=f"{found.op}:{like}" if like else found.op))
        return made


def _packet(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _classification(e: Emitter) -> Node | None:
    """cross_entropy_loss, nll_loss: a mean is the sum over / the number (or weight) of the targets that count."""
    if e.call.arg("reduction", MEAN) != MEAN:
        return None
    if e.node.meta["val"].dtype in (torch.float16, torch.bfloat16):  # a sum over many tokens may overflow
        rows = e.emit(aten.to.dtype, e.again(reduction=NONE, like="rows"), torch.float32, like="wide")
        total = e.emit(aten.sum.default, rows, like="sum")
        return e.emit(aten.to.dtype, e.emit(aten.div.Tensor, total, _count(e), like="mean"), e.node.meta["val"].dtype)
    return e.emit(aten.div.Tensor, e.again(reduction=SUM, like="sum"), _count(e))


def _count(e: Emitter) -> Node | int:
    call = e.call
    logits = call.shape("self")
    assert logits is not None
    if probabilities(call):
        return math.prod(logits) // max(logits[1 if len(logits) > 1 else 0], 1)
    target = e.new("target")
    valid = e.emit(aten.ne.Scalar, target, int(call.arg("ignore_index", -100)), like="valid")
    if call.arg("weight") is None:
        return e.emit(aten.sum.default, valid, like="count")
    known = e.emit(aten.mul.Tensor, target, valid, like="known")
    weights = e.emit(aten.index.Tensor, e.new("weight"), [known], like="weight")
    return e.emit(aten.sum.default, e.emit(aten.mul.Tensor, weights, valid, like="counted"), like="count")


def _unreduced(e: Emitter) -> Node | None:
    """Losses of single elements or samples: reduced by ops of their own, whose rules know the global count."""
    reduction = e.call.arg("reduction", MEAN)
    if reduction == NONE:
        return None
    rows = e.again(reduction=NONE, like="rows")
    return e.emit(aten.mean.default if reduction == MEAN else aten.sum.default, rows)


def _new_filled(value: float | None) -> Callable[[Emitter], Node | None]:
    def rewrite(e: Emitter) -> Node | None:
        out = e.node.meta["val"]
        fill = value if value is not None else e.call.arg("fill_value")
        if isinstance(fill, Node):
            return None
        return e.emit(aten.full.default, list(out.shape), fill, dtype=out.dtype, device=out.device)

    return rewrite


REWRITES: dict[str, Callable[[Emitter], Node | tuple[Node, ...] | None]] = {
    **normalize_random.REWRITES,
    **{f"aten::{name}": _classification for name in loss.BY_CLASS},
    **{f"aten::{name}": _unreduced for name in loss.BY_ROW},
    "aten::new_ones": _new_filled(1),
    "aten::new_zeros": _new_filled(0),
    "aten::new_full": _new_filled(None),
    "aten::new_empty": _new_filled(0),  # written over before it is read; zeros are the same on every rank
}


def _clean(graph: Graph) -> Graph:
    graph.eliminate_dead_code()
    graph.lint()
    return graph
