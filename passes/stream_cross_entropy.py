"""Cross entropies that never store a probability: their sums stream over the logits, which the backward reads again.

Works on the joint graph, before it is cut into forward and backward. A whole vocabulary is one op there, a cut one is
what `rules.loss` makes of it: a local maximum, two collectives, a pick. Meant for kernels: op by op it would cost more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autopar.codegen.views import argument, given, shape_of
from autopar.passes.merge_collectives import ALL_REDUCE, WAIT
from autopar.passes.normalize import Emitter
from autopar.rules.loss import MEAN, NONE

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_SAME = frozenset({aten.detach.default, aten.alias.default})


@dataclass(frozen=True, slots=True)
class StreamCrossEntropy:
    """Sums of exponentials from the logits, without an exponential or a logarithm of a probability that is stored.

    Input:   %y = _log_softmax(%x) ; %l = nll_loss_forward(%y, %t) ; ... ; backward of %x from %y
    Output:  %m = amax(%x) ; %z = log(sum(exp(sub(%x, %m)))) ; %l = sum(sub(%z, sub(gather(%x, %t), %m)))
             ... ; backward of %x from %y = sub(sub(%x, %m), %z), made again
    Input:   %m = all_reduce_max(amax(%x)) ; %s = sum(exp(sub(%x, %m))) ; %p = gather(sub(%x, %m), %i)
    Output:  %a = amax(%x) ; %b = sum(exp(sub(%x, %a))) ; %m = all_reduce_max(%a) ; %s = mul(%b, exp(sub(%a, %m)))
             %p = sub(gather(%x, %i), %m)
    Refuses: weights of classes, and losses of more than two dims: these stay.
    """

    def run(self, joint: GraphModule) -> GraphModule:
        _Rewrite(joint).apply()
        return joint


class _Rewrite:
    def __init__(self, joint: GraphModule) -> None:
        self.joint, self.graph = joint, joint.graph
        self.parts: dict[Node, tuple[Node, Node, Node]] = {}
        """Of a log softmax that was taken apart: the logits, the largest, the logarithm of the sum. (One number for the
        last two would lose what large logits leave of the logarithm.)"""
        self.hots: dict[Node, tuple[int, Node, Node]] = {}
        """Of a scatter that was taken apart: along which dim, the index and the gradient."""

    def apply(self) -> None:
        rewrites: dict[Any, Callable[[Node], Node | None]] = {
            aten.amax.default: self.shorter_maximum,
            aten._log_softmax.default: self.log_softmax,
            aten.nll_loss_forward.default: self.loss,
            aten.sum.dim_IntList: self.local_sum,
            aten.gather.default: self.pick,
            aten.scatter_add.default: self.one_hot,
            aten.slice.Tensor: self.shorter_one_hot,
        }
        changed = False
        for node in list(self.graph.nodes):
            rewrite = rewrites.get(node.target) if node.op == "call_function" else None
            found = rewrite(node) if rewrite is not None else None
            if found is not None:
                node.replace_all_uses_with(found)
                changed = True
        if changed:
            for node in reversed(list(self.graph.nodes)):
                if not node.users and node.op == "call_function" and not _acts(node):
                    self.graph.erase_node(node)
            self.graph.lint()
            self.joint.recompile()

    @contextmanager
    def before(self, node: Node) -> Iterator[Callable[..., Node]]:
        """A function that adds calls ahead of a node, with the record of `like`."""
        with self.graph.inserting_before(node):
            yield Emitter(self.graph, node, {}).emit

    def log_softmax(self, node: Node) -> Node | None:
        x, dim = given(node)[0], given(node)[1]
        losses = [u for u in node.users if u.target is aten.nll_loss_forward.default and u.args[0] is node]
        if not isinstance(x, Node) or x.meta["val"].ndim != 2 or dim not in (1, -1) or not any(map(_plain, losses)):
            return None
        with self.before(node) as emit:
            wide = _wide(emit, x)
            most = _kept(emit(aten.amax.default, wide, [1], True))
            total = emit(aten.sum.dim_IntList, emit(aten.exp.default, emit(aten.sub.Tensor, wide, most)), [1], True)
            log_sum = _kept(emit(aten.log.default, total))
            found = _again(emit(aten.sub.Tensor, _again(emit(aten.sub.Tensor, wide, most)), log_sum))
            if node.meta["val"].dtype in _HALF:
                found = _again(emit(aten._to_copy.default, found, dtype=node.meta["val"].dtype))
        self.parts[found] = (x, most, log_sum)
        return found

    def loss(self, node: Node) -> Node | None:
        scores, target, _, reduction, ignored = given(node)
        if scores not in self.parts or not _plain(node):
            return None
        x, most, log_sum = self.parts[scores]
        dtype = scores.meta["val"].dtype
        with self.before(node) as emit:
            counts = emit(aten.ne.Scalar, target, ignored)
            index = emit(aten.unsqueeze.default, emit(aten.where.ScalarOther, counts, target, 0), 1)
            picked = _wide(emit, emit(aten.squeeze.dim, emit(aten.gather.default, x, 1, index), 1))
            above, rest = (emit(aten.squeeze.dim, value, 1) for value in (most, log_sum))
            lost = emit(aten.sub.Tensor, rest, emit(aten.sub.Tensor, picked, above))
            loss = emit(aten.where.ScalarOther, counts, lost, 0.0)
            number = emit(aten.sum.default, counts)
            if reduction != NONE:
                loss = emit(aten.sum.default, loss)
            if reduction == MEAN:
                loss = emit(aten.div.Tensor, loss, number)
            results = [emit(aten._to_copy.default, r, dtype=dtype) for r in (loss, number)]
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
        return None

    def shorter_maximum(self, node: Node) -> Node | None:
        """amax(cat(x, -inf)): of x, where x is not empty; and of x itself, not of another name of it."""
        source, dims, *keep = given(node)
        short = _without_end(source, dims[0]) if len(dims) == 1 else None
        read = _same(short[0] if short is not None and short[1] == float("-inf") else source)
        if read is source:
            return None
        with self.before(node) as emit:
            return emit(aten.amax.default, read, dims, *keep)

    def local_sum(self, node: Node) -> Node | None:
        """The sum of exp(x - the largest of all ranks): from the local largest, whose sweep it shares; that of a log
        softmax (labels are smoothed): from the sum of x, which needs no logarithm first."""
        power, dims, *keep = given(node)
        if (parts := self.parts.get(_same(power))) is not None and list(dims) in ([1], [-1]):
            x, most, log_sum = parts
            with self.before(node) as emit:
                total = emit(aten.sum.dim_IntList, _wide(emit, x), [1], *keep)
                apart = emit(aten.add.Tensor, log_sum, most)
                apart = apart if keep == [True] else emit(aten.squeeze.dim, apart, 1)
                found = emit(aten.sub.Tensor, total, emit(aten.mul.Tensor, apart, shape_of(x)[1]))
                dtype = node.meta["val"].dtype
                return emit(aten._to_copy.default, found, dtype=dtype) if found.meta["val"].dtype != dtype else found
        shifted = power.args[0] if isinstance(power, Node) and power.target is aten.exp.default else None
        if keep != [True] or len(dims) != 1 or not isinstance(shifted, Node) or shifted.target is not aten.sub.Tensor:
            return None
        x, most = shifted.args
        local = _local_maximum(most)
        if local is None or local.args[1:] != (dims, True) or _same(local.args[0]) is not _same(x):
            return None
        dtype = x.meta["val"].dtype
        with self.before(local.next) as emit:
            finite = emit(aten.clamp.default, local, torch.finfo(dtype).min)  # a rank may hold -inf alone
            total = emit(aten.sum.dim_IntList, emit(aten.exp.default, emit(aten.sub.Tensor, x, finite)), dims, True)
        for made in (power, shifted, x):
            if made.target in (aten.exp.default, aten.sub.Tensor) or _widens(made):
                _again(made)
        with self.before(node) as emit:
            return emit(aten.mul.Tensor, total, emit(aten.exp.default, emit(aten.sub.Tensor, finite, most)))

    def pick(self, node: Node) -> Node | None:
        """gather(x - m, i) as gather(x, i) - m, so that it reads memory and not what a kernel makes."""
        source, dim, index = given(node)
        shape = shape_of(index)
        short = _without_end(source, dim)
        if short is not None and _below(index, shape_of(short[0])[dim]):
            source = short[0]
        shifted = _same(source)
        least = shifted.args[1] if isinstance(shifted, Node) and shifted.target is aten.sub.Tensor else None
        if isinstance(least, Node) and shape_of(least) == shape:
            with self.before(node) as emit:
                x = shifted.args[0]
                inner = x.args[0] if _widens(x) else x
                picked = emit(aten.gather.default, inner, dim, index)
                return emit(aten.sub.Tensor, _wide(emit, picked) if inner is not x else picked, least)
        if source is given(node)[0]:
            return None
        with self.before(node) as emit:
            return emit(aten.gather.default, source, dim, index)

    def one_hot(self, node: Node) -> Node | None:
        """scatter_add(0, i, g) of one index a row, the backward of a pick: g where the position is i."""
        zeros, dim, index, grad = given(node)
        shape = shape_of(node)
        at = dim % len(shape)
        ones = (*shape[:at], 1, *shape[at + 1 :])
        if zeros.target is not aten.new_zeros.default or not shape_of(index) == shape_of(grad) == ones:
            return None
        found = self._one_hot(node, at, index, grad)
        self.hots[found] = (at, index, grad)
        return found

    def shorter_one_hot(self, node: Node) -> Node | None:
        """The first so many positions of a one_hot: made as few from the start."""
        if node.args[0] not in self.hots or argument(node, 2, "start") != 0 or argument(node, 4, "step", 1) != 1:
            return None
        at, index, grad = self.hots[node.args[0]]
        return self._one_hot(node, at, index, grad) if argument(node, 1, "dim", 0) % len(shape_of(node)) == at else None

    def _one_hot(self, node: Node, at: int, index: Node, grad: Node) -> Node:
        """grad where the position along `at` is the index, in a tensor of the node's shape."""
        shape, device = shape_of(node), node.meta["val"].device
        with self.before(node) as emit:
            places = emit(aten.arange.default, shape[at], device=device)
            places = emit(aten.reshape.default, places, [n if d == at else 1 for d, n in enumerate(shape)])
            return emit(aten.where.ScalarOther, emit(aten.eq.Tensor, places, index), grad, 0.0)


def _plain(loss: Node) -> bool:
    return loss.args[2] is None and len(loss.args) == 5


def _wide(emit: Callable[..., Node], x: Node) -> Node:
    return _again(emit(aten._to_copy.default, x, dtype=torch.float32)) if x.meta["val"].dtype in _HALF else x


def _again(node: Node) -> Node:
    """Not saved for the backward: made again there, inside the kernel that needs it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return node


def _kept(node: Node) -> Node:
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return node


def _acts(node: Node) -> bool:
    """May a call that nobody reads not be left out?"""
    target = node.target
    if target is operator.getitem:
        return False
    return not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable


def _same(node: Any) -> Any:
    """The value that a node is another name of."""
    while isinstance(node, Node) and node.target in _SAME:
        node = given(node)[0]
    return node


def _widens(node: Any) -> bool:
    """Is this half precision, cast to float32?"""
    if not isinstance(node, Node) or node.target is not aten._to_copy.default:
        return False
    return node.meta["val"].dtype == torch.float32 and given(node)[0].meta["val"].dtype in _HALF


def _local_maximum(node: Any) -> Node | None:
    """The local maximum that all-reduces of maxima start from."""
    reduced = False
    node = _same(node)
    while isinstance(node, Node) and node.target is WAIT:
        sent = given(node)[0]
        if not isinstance(sent, Node) or sent.target is not ALL_REDUCE or sent.args[1] != "max":
            return None
        node, reduced = _same(sent.args[0]), True
    return node if reduced and isinstance(node, Node) and node.target is aten.amax.default else None


def _without_end(node: Any, dim: int) -> tuple[Node, float] | None:
    """cat(x, one row of a number) along a dim: x, when it is not empty, and the number."""
    if not isinstance(node, Node) or node.target is not aten.cat.default:
        return None
    parts, rank = given(node)[0], len(shape_of(node))
    if len(parts) != 2 or argument(node, 1, "dim", 0) % rank != dim % rank:
        return None
    x, end = parts
    if end.target not in (aten.new_full.default, aten.full.default) or shape_of(end)[dim] != 1:
        return None
    fill = given(end)[2 if end.target is aten.new_full.default else 1]
    return (x, fill) if shape_of(x)[dim] > 0 else None


def _below(index: Any, size: int) -> bool:
    """Is every index less than the size? Where `rules.indexing.locate` made it: shifted x (0 <= shifted < size)."""
    while isinstance(index, Node) and index.target in (aten.unsqueeze.default, *_SAME):
        index = index.args[0]
    if not isinstance(index, Node) or index.target is not aten.mul.Tensor:
        return False
    shifted, here = index.args
    bounds = here.args if getattr(here, "target", None) is aten.logical_and.default else ()
    told = {(b.target, b.args) for b in bounds if isinstance(b, Node)}
    return {(aten.ge.Scalar, (shifted, 0)), (aten.lt.Scalar, (shifted, size))} <= told
