"""Our own random ops: every element draws for itself, so every dim may be cut; a shard is told where it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.fx import Node

from autopar.layout import local_parts, part_offset
from autopar.rules.call import Call
from autopar.rules.dims import FIRST, letters
from autopar.rules.rule import Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

_KEY = ((),)
"""The key's one dim is whole: every rank has the same."""


def dropout(call: Call) -> Rule:
    """`..., key -> ...`; linear, since the mask is the same wherever it is drawn. Only the key is saved."""
    dims, sizes = letters(call.in_shapes[0])
    return Rule((tuple(dims), _KEY), (tuple(dims),), sizes, linear=FIRST, local=_local, saves=(1,))


def made(call: Call) -> Rule:
    """`key -> ...`: keep, uniform, normal."""
    dims, sizes = letters(call.out_shapes[0])
    return Rule((_KEY,), (tuple(dims),), sizes, local=lambda ctx: _local(ctx, size=ctx.out_shape()))


def key(call: Call) -> Rule:
    """Made whole on every rank."""
    return Rule((), (_KEY,), {})


def _local(ctx: Local, **changes: object) -> Node:
    parts, layout = ctx.out_parts[0], ctx.strategy.outs[0]
    strides = [math.prod(parts.flat[j + 1 :]) for j in range(len(parts.flat))]
    at = [part_offset(parts, layout, ctx.ranks, ctx.coordinate, j) for j in range(len(parts.flat))]
    sizes = list(local_parts(parts, layout, ctx.ranks, ctx.coordinate).flat)
    first = sum(offset * stride for offset, stride in zip(at, strides, strict=True))
    return ctx.same(first=first, sizes=sizes, strides=strides, **changes)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "autopar::key": key,
    "autopar::dropout": dropout,
    "autopar::keep": made,
    "autopar::uniform": made,
    "autopar::normal": made,
}
