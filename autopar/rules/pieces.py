"""Ops that take pieces of a tensor or put pieces together: slices, splits, joins. All are linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import FIRST, letters, passing, wrap
from autopar.rules.rule import Dim, Dims, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def _at(call: Call) -> int:
    return wrap(call.arg("dim", 0), len(call.in_shapes[0]))


def piece(call: Call) -> Rule | None:
    """slice, narrow: the dim is whole, or free when the piece is all of it."""
    if len(call.inputs) != 1:
        return None  # a start that is a tensor
    at = _at(call)
    full = call.in_shapes[0][at] == call.out_shapes[0][at] and call.arg("step", 1) == 1
    dims, sizes = letters(call.in_shapes[0], () if full else {at})
    return Rule((tuple(dims),), (tuple(dims),), sizes, linear=FIRST, local=_alias if full else None, view=True)


def _alias(ctx: Local) -> Node:
    return ctx.emit(aten.alias.default, ctx.ins[0])


def select(call: Call) -> Rule | None:
    """The dim goes; it is whole."""
    if len(call.inputs) != 1:
        return None
    at = _at(call)
    dims, sizes = letters(call.in_shapes[0], {at})
    return Rule((tuple(dims),), (tuple(d for i, d in enumerate(dims) if i != at),), sizes, linear=FIRST, view=True)


def unbind(call: Call) -> Rule:
    at = _at(call)
    dims, sizes = letters(call.in_shapes[0], {at})
    out = tuple(d for i, d in enumerate(dims) if i != at)
    return Rule((tuple(dims),), (out,) * len(call.out_shapes), sizes, linear=FIRST, view=True)


def split(where: Callable[[Call], int] = _at) -> Callable[[Call], Rule | None]:
    """Equal pieces of a dim: `(n x) -> x, x, ...`, so that each piece can be cut; unequal pieces keep the dim whole."""

    def build(call: Call) -> Rule | None:
        if len(call.inputs) != 1:
            return None  # places to split at that are a tensor
        at, shape, outs = where(call), call.in_shapes[0], call.out_shapes
        if len({o[at] for o in outs}) != 1 or outs[0][at] * len(outs) != shape[at] or not shape[at]:
            dims, sizes = letters(shape, {at})
            return Rule((tuple(dims),), (tuple(dims),) * len(outs), sizes, linear=FIRST, view=True)
        dims, sizes = letters(outs[0])
        sizes["n"] = len(outs)
        source: Dims = tuple(("n", *d) if i == at else d for i, d in enumerate(dims))
        return Rule(
            (source,), (tuple(dims),) * len(outs), sizes, whole=frozenset("n"), linear=FIRST, local=local, view=True
        )

    def local(ctx: Local) -> Node:
        at = where(ctx.call)
        return ctx.emit(aten.split_with_sizes.default, ctx.ins[0], [ctx.out_shape()[at]] * len(ctx.out_parts), at)

    return build


def _first_or_second(call: Call) -> int:
    return 0 if len(call.in_shapes[0]) == 1 else 1


def joined(
    where: Callable[[Call, int], int], lift: Callable[[Sequence[int]], list[int | None]] = lambda s: list(range(len(s)))
) -> Callable[[Call], Rule | None]:
    """cat and its relatives: `x, x, ... -> (n x)` of equal pieces, which can be cut; unequal ones are whole there.

    Partial pieces give a partial whole. where: (call, rank of the output) -> joined dim. lift: for each dim of a lifted
    piece the dim of the piece it was.
    """

    def build(call: Call) -> Rule | None:
        out = call.out_shapes[0]
        places = [lift(s) for s in call.in_shapes]
        if any(len(p) != len(out) for p in places):
            return None  # old-style empty tensors among the pieces
        at, n = where(call, len(out)), len(places)
        lengths = [1 if p[at] is None else s[p[at]] for s, p in zip(call.in_shapes, places, strict=True)]
        equal = n > 1 and len(set(lengths)) == 1 and lengths[0] > 1
        dims, sizes = letters([lengths[0] if d == at else size for d, size in enumerate(out)], () if equal else {at})
        ins = []
        for shape, place in zip(call.in_shapes, places, strict=True):
            mine: list[Dim] = [()] * len(shape)
            for d, source in enumerate(place):
                if source is not None:
                    mine[source] = dims[d]
            ins.append(tuple(mine))
        every = (frozenset(range(n)),)
        if not equal:
            return Rule(tuple(ins), (tuple(dims),), sizes, linear=every)
        joint = tuple(("n", *dim) if d == at else dim for d, dim in enumerate(dims))
        return Rule(tuple(ins), (joint,), {**sizes, "n": n}, whole=frozenset("n"), linear=every)

    return build


def _named(call: Call, rank: int) -> int:
    return wrap(call.arg("dim", 0), rank)


def _rows(shape: Sequence[int]) -> list[int | None]:
    """atleast_2d: a vector is one row."""
    return [None, *range(len(shape))] if len(shape) == 1 else [None, None] if not shape else list(range(len(shape)))


def _columns(shape: Sequence[int]) -> list[int | None]:
    """A vector is one column."""
    return [0, None] if len(shape) == 1 else [None, None] if not shape else list(range(len(shape)))


def _deep(shape: Sequence[int]) -> list[int | None]:
    """atleast_3d: a vector lies in the middle dim, a matrix in the first two."""
    return {0: [None, None, None], 1: [None, 0, None], 2: [0, 1, None]}.get(len(shape), list(range(len(shape))))


def _flat(shape: Sequence[int]) -> list[int | None]:
    """atleast_1d."""
    return list(range(len(shape))) if shape else [None]


def stack(call: Call) -> Rule:
    """A new dim, without a factor."""
    dims, sizes = letters(call.in_shapes[0])
    at = int(call.arg("dim", 0)) % (len(dims) + 1)
    n = len(call.in_shapes)
    return Rule((tuple(dims),) * n, ((*dims[:at], (), *dims[at:]),), sizes, linear=(frozenset(range(n)),))


def select_scatter(call: Call) -> Rule:
    """`select` backwards: the dim is whole in the tensor, and the piece lacks it."""
    at = _at(call)
    dims, sizes = letters(call.in_shapes[0], {at})
    missing = tuple(d for i, d in enumerate(dims) if i != at)
    return Rule((tuple(dims), missing), (tuple(dims),), sizes, linear=(frozenset({0, 1}),))


def slice_scatter(call: Call) -> Rule:
    """The sliced dim is whole."""
    return _both(call, {_at(call)})


def diagonal_scatter(call: Call) -> Rule:
    """The two dims are whole; the piece has the others first and its diagonal last."""
    rank = len(call.in_shapes[0])
    gone = {wrap(call.arg("dim1", 0), rank), wrap(call.arg("dim2", 1), rank)}
    dims, sizes = letters(call.in_shapes[0], gone)
    small = (*(d for i, d in enumerate(dims) if i not in gone), ())
    return Rule((tuple(dims), small), (tuple(dims),), sizes, linear=(frozenset({0, 1}),))


def _both(call: Call, whole: set[int]) -> Rule:
    one = passing(call, whole)
    return Rule(one.ins * 2, one.outs, one.sizes, linear=(frozenset({0, 1}),))


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "slice": piece,
    "narrow": piece,
    "select": select,
    "unbind": unbind,
    **dict.fromkeys(
        "split chunk split_with_sizes tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes".split(), split()
    ),
    "hsplit": split(_first_or_second),
    "vsplit": split(lambda call: 0),
    "dsplit": split(lambda call: 2),
    **dict.fromkeys("cat concat concatenate".split(), joined(_named)),
    "hstack": joined(lambda call, rank: min(rank, 2) - 1, _flat),
    "vstack": joined(lambda call, rank: 0, _rows),
    "row_stack": joined(lambda call, rank: 0, _rows),
    "dstack": joined(lambda call, rank: 2, _deep),
    "column_stack": joined(lambda call, rank: 1, _columns),
    "stack": stack,
    "select_scatter": select_scatter,
    "slice_scatter": slice_scatter,
    "diagonal_scatter": diagonal_scatter,
}
