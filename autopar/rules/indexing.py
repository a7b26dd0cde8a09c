"""Lookups by index: embedding (with a cut vocabulary), index, gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.reduction import one_longer
from autopar.rules.rule import Dim, Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def embedding(call: Call) -> Rule:
    """`v d, ... -> ... d`: with the vocabulary cut each rank looks up its own rows, the others give zeros."""
    return rule("v d, ... -> ... d", call.in_shapes, call.out_shapes, contiguous=frozenset({"v"}), local=_embedding_local, saves=(1,))


def _embedding_local(ctx: Local) -> Node:
    if not ctx.cut("v"):
        return ctx.same()
    weight, ids = ctx.ins
    first, size = ctx.extent("v")
    here, row = locate(ctx, ids, first, size)
    padding = int(ctx.call.arg("padding_idx", -1))
    local_padding = padding - first if first <= padding < first + size else -1
    table = one_longer(ctx, weight, 0, 0.0) if ctx.uneven("v") else weight
    rows = ctx.same(weight=table, indices=row, padding_idx=local_padding)
    return ctx.emit(aten.masked_fill.Scalar, rows, ctx.emit(aten.unsqueeze.default, ctx.emit(aten.logical_not.default, here), -1), 0.0)


def locate(ctx: Local, index: Node, first: int, size: int) -> tuple[Node, Node]:
    """(is it in this shard?, local index or 0) of global indices into a dim that this rank holds from `first`."""
    shifted = ctx.emit(aten.sub.Tensor, index, first)
    here = ctx.emit(aten.logical_and.default, ctx.emit(aten.ge.Scalar, shifted, 0), ctx.emit(aten.lt.Scalar, shifted, size))
    return here, ctx.emit(aten.mul.Tensor, shifted, here)


def index(call: Call) -> Rule | None:
    """`x[i, j]`: indexed dims are whole, the other dims of x and the dims of the index tensors pass."""
    where = call.arg("indices")
    shape = call.in_shapes[0]
    if any(isinstance(i, Node) and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in where):
        return None
    used = [d for d, i in enumerate(where) if i is not None]
    tensors = call.in_shapes[1:]
    broadcast = tuple(torch.broadcast_shapes(*tensors))
    dims: list[Dim] = [() if d in used else (f"d{d}",) for d in range(len(shape))]
    sizes = {f"d{d}": n for d, n in enumerate(shape)} | {f"i{k}": n for k, n in enumerate(broadcast)}
    index_dims: list[Dim] = [(f"i{k}",) for k in range(len(broadcast))]
    rest = [d for d in range(len(shape)) if d not in used]
    together = used == list(range(used[0], used[-1] + 1))
    at = used[0] if together else 0
    out: list[Dim] = [dims[d] for d in rest if d < at or not together][: at if together else 0]
    out = [*out, *index_dims, *(dims[d] for d in rest if not together or d > used[-1])]
    ins = [tuple(dims)]
    for t in tensors:
        lead = len(broadcast) - len(t)
        ins.append(tuple(() if n == 1 else index_dims[lead + k] for k, n in enumerate(t)))
    return Rule(tuple(ins), (tuple(out),), sizes, linear=(frozenset({0}),), saves=tuple(range(1, len(ins))))


def gather(call: Call) -> Rule | None:
    """`dim` is whole in the source and passes in the index; other dims pass where both have the same size."""
    source, where = call.in_shapes
    if len(source) != len(where):
        return None
    at = int(call.arg("dim")) % max(len(source), 1) if source else 0
    sizes: dict[str, int] = {}
    left: list[Dim] = []
    right: list[Dim] = []
    for d, (n, m) in enumerate(zip(source, where, strict=True)):
        if d == at:
            left.append(())
            right.append((f"i{d}",))
            sizes[f"i{d}"] = m
        elif n == m:
            left.append((f"d{d}",))
            right.append((f"d{d}",))
            sizes[f"d{d}"] = n
        else:
            left.append(())
            right.append((f"i{d}",))
            sizes[f"i{d}"] = m
    whole = frozenset(k for k in sizes if k.startswith("i") and k != f"i{at}")
    return Rule((tuple(left), tuple(right)), (tuple(right),), sizes, whole=whole, linear=(frozenset({0}),), saves=(1,))


RULES: dict[str, Callable[[Call], Rule | None]] = {"embedding": embedding, "index": index, "gather": gather}
