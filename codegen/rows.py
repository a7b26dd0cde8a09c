"""Norms and softmaxes, which work on whole rows, and their backwards.

RULES: rule(builder, node, item, at) gives the step that holds the element at `at` of the op's result number `item`.
`column_sum` knows the results that are sums over all rows (the gradient of a norm's weight).
Source of the formulas: the definitions in PyTorch's documentation; gradients derived from them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from autopar.codegen.composites import prefix, suffix
from autopar.codegen.index import ZERO, Index, NotLinear
from autopar.codegen.kernel import KINDS
from autopar.codegen.views import VIEWS, At, given, packet, shape_of, view_of, viewed

if TYPE_CHECKING:
    from autopar.codegen.build import _Builder


def columns(node: Node) -> int:
    """The length of the rows that a norm or a softmax works on; 0 for other ops."""
    op = given(node)[0] if node.target is operator.getitem else node
    if not isinstance(op, Node) or packet(op) not in _ROW_DIMS:
        return 0
    shape = shape_of(main_input(op))
    return math.prod(shape[len(shape) - _ROW_DIMS[packet(op)](op) :])


def main_input(node: Node) -> Node:
    """The tensor whose rows a norm or a softmax works on."""
    op = given(node)[0] if node.target is operator.getitem else node
    source = given(op)[0]
    return source


def _last_dim(place: int) -> Callable[[Node], int]:
    def count(node: Node) -> int:
        rank, dim = len(shape_of(main_input(node))), given(node)[place]
        assert isinstance(dim, int)
        if rank == 0 or dim % rank != rank - 1:
            raise NotLinear(f"{packet(node)} over dim {dim} of {rank}")
        return 1

    return count


def _normalized(place: int) -> Callable[[Node], int]:
    return lambda node: len(given(node)[place])


_ROW_DIMS: Mapping[str, Callable[[Node], int]] = {
    "native_layer_norm": _normalized(1),
    "native_layer_norm_backward": _normalized(2),
    "_fused_rms_norm": _normalized(1),
    "_fused_rms_norm_backward": _normalized(2),
    "_softmax": _last_dim(1),
    "_log_softmax": _last_dim(1),
    "_softmax_backward_data": _last_dim(2),
    "_log_softmax_backward_data": _last_dim(2),
}
"""How many last dims a row is."""


class _Row:
    """The row of a norm or a softmax that an index lies in. compute: the kind in which it works."""

    def __init__(self, b: _Builder, node: Node, at: At) -> None:
        self.b, self.node, self.shape = b, node, shape_of(main_input(node))
        self.dims = _ROW_DIMS[packet(node)](node)
        self.rows, self.here = at[: len(self.shape) - self.dims], at
        self.compute = KINDS[main_input(node).meta["val"].dtype]

    def at(self, whole: At) -> Callable[[Any], int]:
        return lambda node: self.b.value(node, whole, self.compute)

    def reduce(self, how: str, of: Callable[[At], int]) -> int:
        return self.b.row(how, self.shape, self.dims, self.rows, of)

    def mean(self, of: Callable[[At], int], name: str = "mean") -> int:
        return self.do("div", self.reduce("sum", of), float(math.prod(self.shape[-self.dims :])), name=name)

    def stat(self, node: Node, whole: At) -> int:
        """A row's saved number, at the row of a whole index."""
        rows = whole[: len(self.shape) - self.dims]
        rank = len(shape_of(node))
        return self.b.value(node, (*rows, *(ZERO,) * (rank - len(rows))), self.compute)

    def column(self, node: Any, whole: At) -> int:
        """A number of a weight, at the columns of a whole index."""
        return self.b.value(node, whole[len(self.shape) - self.dims :], self.compute)

    def do(self, formula: str, *args: int | float, name: str = "") -> int:
        found = self.b.emit(formula, *args, kind=self.compute)
        return self.b.named(found, name) if name else found


def _layer_norm(b: _Builder, node: Node, item: int, at: At) -> int:
    x, _, weight, bias, eps = given(node)
    row = _Row(b, node, at)
    mean = row.mean(lambda i: row.at(i)(x))

    def centred(i: At) -> int:
        return row.do("sub", row.at(i)(x), mean, name="centred")

    if item == 1:
        return mean
    variance = row.mean(lambda i: row.do("square", centred(i)), "variance")
    rstd = row.do("rsqrt", row.do("add", variance, float(eps)), name="rstd")
    if item == 2:
        return rstd
    found = row.do("mul", centred(at), rstd)
    if weight is not None:
        found = row.do("mul", found, row.column(weight, at))
    return found if bias is None else row.do("add", found, row.column(bias, at))


def _rms_norm(b: _Builder, node: Node, item: int, at: At) -> int:
    x, _, weight, eps = given(node)
    row = _Row(b, node, at)
    if eps is None:
        eps = torch.finfo(main_input(node).meta["val"].dtype).eps
    mean_square = row.mean(lambda i: row.do("square", row.at(i)(x)), "mean_square")
    rstd = row.do("rsqrt", row.do("add", mean_square, float(eps)), name="rstd")
    if item == 1:
        return rstd
    found = row.do("mul", row.at(at)(x), rstd)
    return found if weight is None else row.do("mul", found, row.column(weight, at))


def _norm_backward(b: _Builder, node: Node, item: int, at: At) -> int:
    """rstd (g - mean(g) - xhat mean(g xhat)), g the gradient times the weight; an RMS norm has no second term."""
    if item:
        raise NotLinear(f"a weight's gradient, of {packet(node)}, is read in the kernel that makes it")
    layer = packet(node) == "native_layer_norm_backward"
    grad, x, _ = given(node)[:3]
    weight = given(node)[5] if layer else given(node)[4]
    row = _Row(b, node, at)

    def scaled(i: At) -> int:
        g = row.at(i)(grad)
        return g if weight is None else row.do("mul", g, row.column(weight, i), name="scaled")

    def hat(i: At) -> int:
        return normal(row, node, x, i)

    along = row.mean(lambda i: row.do("mul", scaled(i), hat(i)), "along")
    found = row.do("sub", scaled(at), row.do("mul", hat(at), along))
    if layer:
        found = row.do("sub", found, row.mean(scaled, "mean_grad"))
    return row.do("mul", found, row.stat(given(node)[4] if layer else given(node)[3], at))


def normal(row: _Row, node: Node, x: Any, i: At) -> int:
    """The normalised input of a norm's backward, from its saved statistics."""
    if packet(node) == "native_layer_norm_backward":
        mean, rstd = given(node)[3:5]
        centred = row.do("sub", row.at(i)(x), row.stat(mean, i), name="centred")
        return row.do("mul", centred, row.stat(rstd, i), name="normal")
    return row.do("mul", row.at(i)(x), row.stat(given(node)[3], i), name="normal")


def _softmax(b: _Builder, node: Node, item: int, at: At) -> int:
    x, row = given(node)[0], _Row(b, node, at)
    largest = row.reduce("max", lambda i: row.at(i)(x))

    def shifted(i: At) -> int:
        return row.do("sub", row.at(i)(x), largest, name="shifted")

    total = row.reduce("sum", lambda i: row.do("exp", shifted(i)))
    if packet(node) == "_log_softmax":
        return row.do("sub", shifted(at), row.do("log", total))
    return row.do("div", row.do("exp", shifted(at)), total)


def _softmax_backward(b: _Builder, node: Node, item: int, at: At) -> int:
    grad, y, row = given(node)[0], given(node)[1], _Row(b, node, at)
    if packet(node) == "_softmax_backward_data":
        along = row.reduce("sum", lambda i: row.do("mul", row.at(i)(grad), row.at(i)(y)))
        return row.do("mul", row.at(at)(y), row.do("sub", row.at(at)(grad), along))
    if isinstance(grad, Node) and packet(grad) == "nll_loss_backward" and b.inside(grad) and len(at) == 2:
        total = _nll_slope(b, grad, at[0])  # the one element of the row that is not 0
    else:
        total = row.reduce("sum", lambda i: row.at(i)(grad))
    return row.do("sub", row.at(at)(grad), row.do("mul", row.do("exp", row.at(at)(y)), total))


def _nll_backward(b: _Builder, node: Node, item: int, at: At) -> int:
    """The gradient of a negative log likelihood: 0 but at the target."""
    if len(at) != 2:
        raise NotLinear(f"nll_loss_backward of {len(at)} dims")
    target = b.value(given(node)[2], at[:1], "i64")
    kind = KINDS[node.meta["val"].dtype]
    hit = b.compare("eq", target, b.position(at[1], "i64"))
    return b.emit("where", hit, _nll_slope(b, node, at[0]), b.literal(0, kind), kind=kind)


def _nll_slope(b: _Builder, node: Node, row: Index) -> int:
    """The gradient of a row's loss at its target: -gradient (/ count), 0 where the target is ignored."""
    grad, _, target, weight, reduction, ignored, count = given(node)
    if weight is not None:
        raise NotLinear("nll_loss_backward with weights of classes")
    kind = KINDS[node.meta["val"].dtype]
    slope = b.emit("neg", b.value(grad, (row,) if reduction == 0 else (), kind), kind=kind)
    if reduction == 1:
        slope = b.emit("div", slope, b.value(count, (), kind), kind=kind)
    label = b.value(target, (row,), "i64")
    counts = b.compare("ne", label, b.literal(ignored, "i64"))
    return b.emit("where", counts, slope, b.literal(0, kind), kind=kind)


RULES: Mapping[str, Callable[..., int]] = {
    "nll_loss_backward": _nll_backward,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
}


def column_sum(node: Node) -> tuple[Node, Callable[[_Builder, At], int]] | None:
    """When a node is a sum over all rows: a tensor of the shape that is summed, and the value at one of its indices."""
    if packet(node) == "sum" and prefix(node) and not suffix(node):
        source, kind = given(node)[0], KINDS[node.meta["val"].dtype]
        return source, lambda b, at: b.value(source, at, kind)
    if packet(node) == "_to_copy":
        return _summed_then_cast(node)
    op = given(node)[0] if node.target is operator.getitem else None
    if isinstance(op, Node) and packet(op) in _WEIGHT_ITEMS and given(node)[1] in _WEIGHT_ITEMS[packet(op)]:
        grad, x = given(op)[:2]

        def gradient(b: _Builder, at: At) -> int:
            row = _Row(b, op, at)
            g = row.at(at)(grad)
            return g if given(node)[1] == 2 else row.do("mul", g, normal(row, op, x, at))

        return x, gradient
    return None


def _summed_then_cast(node: Node) -> tuple[Node, Callable[[_Builder, At], int]] | None:
    """The gradient of a weight, kept in another dtype than it is summed in: cast by the last step of the sum."""
    source = given(node)[0]
    while isinstance(source, Node) and (rule := view_of(source)) is not None:
        if rule is not VIEWS["reshape"]:
            return None  # it may turn, drop or repeat elements
        source = viewed(source)
    if not isinstance(source, Node) or KINDS.get(source.meta["val"].dtype) != "f32":
        return None
    return column_sum(source) if node.meta["val"].dtype.is_floating_point else None


_WEIGHT_ITEMS: Mapping[str, tuple[int, ...]] = {
    "native_layer_norm_backward": (1, 2),
    "_fused_rms_norm_backward": (1,),
}
