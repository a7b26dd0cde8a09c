"""Tensors made of nothing, and dropout: full, zeros, arange, triangular masks, random numbers from their key.

Each rule is rule(builder, node, item, at): the step that holds the element at `at`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch.fx import Node

from autopar.codegen.index import Index, NotLinear, dense_strides, flatten
from autopar.codegen.kernel import KINDS, Apply, Condition
from autopar.codegen.views import At, argument, cut, given, shape_of

if TYPE_CHECKING:
    from autopar.codegen.build import _Builder

_FAR = 2**31 - 1


def _kind(node: Node) -> str:
    return KINDS[node.meta["val"].dtype]


def _constant(place: int) -> Callable[..., int]:
    def rule(b: _Builder, node: Node, item: int, at: At) -> int:
        return b.literal(argument(node, place, "fill_value"), _kind(node))

    return rule


def _fixed(value: int) -> Callable[..., int]:
    return lambda b, node, item, at: b.literal(value, _kind(node))


def _arange(b: _Builder, node: Node, item: int, at: At) -> int:
    """start + step x index."""
    overload = str(node.target).rpartition(".")[2]
    numbers = list(given(node)) if overload != "default" else [0, *given(node)]
    start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    if isinstance(start, int) and isinstance(step, int):
        return b.position(at[0] * step + start, _kind(node))
    kind = _kind(node)
    return b.emit("add", b.emit("mul", b.position(at[0], "i32"), float(step), kind=kind), float(start), kind=kind)


def _triangle(lower: bool) -> Callable[..., int]:
    def rule(b: _Builder, node: Node, item: int, at: At) -> int:
        diagonal, source = argument(node, 1, "diagonal", 0), given(node)[0]
        offset = at[-1] + at[-2] * -1
        inside = Condition(offset, -_FAR, diagonal + 1) if lower else Condition(offset, diagonal, _FAR)
        return b.when(inside, lambda: b.value(source, at), lambda kind: b.literal(0, kind))

    return rule


def _slice_backward(b: _Builder, node: Node, item: int, at: At) -> int:
    """The gradient inside the slice, 0 outside."""
    grad, _, dim, start, end, step = given(node)
    if step != 1:
        raise NotLinear("the backward of a slice with a step")
    dim %= len(at)
    first, last = cut(shape_of(node)[dim], start, end)
    moved = (*at[:dim], at[dim] + -first, *at[dim + 1 :])
    return b.when(Condition(at[dim], first, last), lambda: b.value(grad, moved), lambda kind: b.literal(0, kind))


def _select_backward(b: _Builder, node: Node, item: int, at: At) -> int:
    grad, _, dim, place = given(node)
    dim %= len(at)
    place %= shape_of(node)[dim]
    moved = (*at[:dim], *at[dim + 1 :])
    return b.when(Condition(at[dim], place, place + 1), lambda: b.value(grad, moved), lambda kind: b.literal(0, kind))


def _cat(b: _Builder, node: Node, item: int, at: At) -> int:
    """Each piece where it lies."""
    parts = given(node)[0]
    dim = argument(node, 1, "dim", 0) % len(at)
    ends, start = [], 0
    for part in parts:
        ends.append((part, start, start + shape_of(part)[dim]))
        start = ends[-1][2]

    def from_piece(i: int) -> int:
        part, first, last = ends[i]
        moved = (*at[:dim], at[dim] + -first, *at[dim + 1 :])
        kind, inside = _kind(node), Condition(at[dim], first, last)
        if i + 1 == len(ends):
            return b.under(inside, lambda: b.value(part, moved, kind))
        return b.when(inside, lambda: b.value(part, moved, kind), lambda kind: from_piece(i + 1))

    return from_piece(0)


def _embedding(b: _Builder, node: Node, item: int, at: At) -> int:
    """The row of the table that the index names."""
    table, ids = given(node)[:2]
    if b.inside(table):
        raise NotLinear("a gather from a table that the kernel itself makes")
    row = b.value(ids, at[:-1])
    return b.load(table, (Index(), at[-1]), ((row, table.meta["val"].stride()[0], shape_of(table)[0]),))


def _gather(b: _Builder, node: Node, item: int, at: At) -> int:
    """The element that the index names, along one dim."""
    source, dim, index = given(node)[:3]
    if b.inside(source):
        raise NotLinear("a gather from what the kernel itself makes")
    dim %= len(at)
    gather = b.value(index, at), source.meta["val"].stride()[dim], shape_of(source)[dim]
    return b.load(source, (*at[:dim], Index(), *at[dim + 1 :]), (gather,))


def _dropout(b: _Builder, node: Node, item: int, at: At) -> int:
    """x / (1 - p) where 32 random bits of the global index are large enough."""
    x, key, p = given(node)[:3]
    first, sizes, strides = (argument(node, 3 + i, n, d) for i, (n, d) in enumerate(_WHERE))
    threshold = round(p * 2.0**32)
    kind = _kind(node)
    if threshold >= 2**32 or kind == "f64":
        raise NotLinear("dropout of everything, or in float64")
    shape = shape_of(node)
    if sizes and tuple(sizes) != shape:
        raise NotLinear(f"dropout whose numbers lie as {tuple(sizes)} in a value of {shape}")
    place = flatten(at, tuple(strides) if sizes else dense_strides(shape)) + int(first)
    low, high = place.span(b.axes)
    if high >> 32 != low >> 32 or high >> 32:
        raise NotLinear("dropout of elements beyond 2^32")
    limit = b.literal(threshold - 2**31, "i32")
    kept = b.step(Apply("kept", (b.bits(key, place), limit, b.value(x, at, kind))), kind)
    return b.emit("mul", kept, 1.0 / (1.0 - p), kind=kind)


_WHERE = (("first", 0), ("sizes", ()), ("strides", ()))

RULES: Mapping[str, Callable[..., int]] = {
    "full": _constant(1),
    "full_like": _constant(1),
    "scalar_tensor": _constant(0),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _fixed(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _fixed(1)),
    "arange": _arange,
    "tril": _triangle(True),
    "triu": _triangle(False),
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "cat": _cat,
    "embedding": _embedding,
    "gather": _gather,
    "autopar.dropout": _dropout,
}
"""By op."""
