"""Ops that move elements along dims, or keep some of them by place: roll, flip, pad, triangles, diagonals, windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import FIRST, dim_list, letters, passing, wrap
from autopar.rules.rule import Dim, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def moved_along(name: str) -> Callable[[Call], Rule]:
    """roll, flip: the dims that the argument names are whole."""
    return lambda call: passing(call, dim_list(call, name), linear=True)


def flipped(dim: int) -> Callable[[Call], Rule]:
    return lambda call: passing(call, {dim}, linear=True)


def pad(call: Call) -> Rule:
    """Padded dims are whole. Partial stays partial unless the border is filled with a number."""
    amounts = list(call.arg("pad") if call.arg("pad") is not None else call.arg("padding"))
    shape, spatial = call.in_shapes[0], len(amounts) // 2
    mode = _mode(call)
    padded = {len(shape) - 1 - i // 2 for i, n in enumerate(amounts) if n}
    if mode != "constant":
        padded |= set(range(len(shape) - spatial, len(shape)))
    zero = mode != "constant" or not call.arg("value", None)
    return replace(passing(call, padded, linear=zero), local=None if mode == "constant" else _border_local)


def _mode(call: Call) -> str:
    name = call.target._schema.name.split("::")[-1]
    return str(call.arg("mode", "constant")) if name == "pad" else "constant" if name == "constant_pad_nd" else name


def _border_local(ctx: Local) -> Node:
    # torch refuses to reflect or replicate with no channels: a shard may be empty, so all leading dims become the batch
    amounts = ctx.call.arg("pad") if ctx.call.arg("pad") is not None else ctx.call.arg("padding")
    shape, spatial = tuple(ctx.ins[0].meta["val"].shape), len(amounts) // 2
    lead = len(shape) - spatial
    flat = ctx.emit(aten.reshape.default, ctx.ins[0], [math.prod(shape[:lead]), 1, *shape[lead:]])
    return ctx.emit(
        aten.reshape.default,
        ctx.emit(ctx.call.target, flat, *ctx.call.node.args[1:], **ctx.call.node.kwargs),
        ctx.out_shape(),
    )


def triangle(call: Call) -> Rule:
    """tril, triu: a shard of the last two dims has its diagonal moved by where it starts."""
    dims, sizes = letters(call.in_shapes[0])
    rows = frozenset(d[0] for d in dims[-2:])
    return Rule((tuple(dims),), (tuple(dims),), sizes, contiguous=rows, linear=FIRST, local=_triangle_local)


def _triangle_local(ctx: Local) -> Node:
    rank = len(ctx.call.in_shapes[0])
    first_row, first_column = (ctx.extent(f"d{d}")[0] if ctx.cut(f"d{d}") else 0 for d in (rank - 2, rank - 1))
    return ctx.emit(ctx.call.target, ctx.ins[0], int(ctx.call.arg("diagonal", 0)) + first_row - first_column)


def diagonal(call: Call) -> Rule:
    """The two dims are whole; the diagonal comes last."""
    rank = len(call.in_shapes[0])
    gone = {wrap(call.arg("dim1", 0), rank), wrap(call.arg("dim2", 1), rank)}
    dims, sizes = letters(call.in_shapes[0], gone)
    out = (*(d for i, d in enumerate(dims) if i not in gone), ())
    return Rule((tuple(dims),), (out,), sizes, linear=FIRST, view=True)


def diag_embed(call: Call) -> Rule:
    """The last dim is whole and becomes two."""
    rank = len(call.out_shapes[0])
    new = {wrap(call.arg("dim1", -2), rank), wrap(call.arg("dim2", -1), rank)}
    dims, sizes = letters(call.in_shapes[0], {rank - 2})
    rest = iter(dims[:-1])
    out: list[Dim] = [() if i in new else next(rest) for i in range(rank)]
    return Rule((tuple(dims),), (tuple(out),), sizes, linear=FIRST)


def unfold(call: Call) -> Rule:
    """Windows along a dim, which is whole; a last dim holds each window."""
    at = wrap(call.arg("dimension"), len(call.in_shapes[0]))
    dims, sizes = letters(call.in_shapes[0], {at})
    return Rule((tuple(dims),), ((*dims, ()),), sizes, linear=FIRST, view=True)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "roll": moved_along("dims"),
    "flip": moved_along("dims"),
    "fliplr": flipped(1),
    "flipud": flipped(0),
    **dict.fromkeys("pad constant_pad_nd".split(), pad),
    **dict.fromkeys((f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)), pad),
    "tril": triangle,
    "triu": triangle,
    "diagonal": diagonal,
    "diag_embed": diag_embed,
    "unfold": unfold,
}
