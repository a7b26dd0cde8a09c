"""Lookups by index: embedding (with a cut vocabulary), index, index_select, gather, one_hot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import FIRST, letters, wrap
from autopar.rules.reduction import one_longer
from autopar.rules.rule import Dim, Dims, Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)


def embedding(call: Call) -> Rule | None:
    """`v d, ... -> ... d`: with the vocabulary cut each rank looks up its own rows, the others give zeros."""
    if call.arg("scale_grad_by_freq", False) or call.arg("sparse", False):
        return None  # gradients that count the ids of the whole batch, or are no dense tensors
    located = frozenset({"v"})
    return rule(
        "v d, ... -> ... d",
        call.in_shapes,
        call.out_shapes,
        contiguous=located,
        linear=FIRST,
        local=_embedding_local,
        saves=(1,),
    )


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
    return ctx.emit(
        aten.masked_fill.Scalar,
        rows,
        ctx.emit(aten.unsqueeze.default, ctx.emit(aten.logical_not.default, here), -1),
        0.0,
    )


def locate(ctx: Local, index: Node, first: int, size: int) -> tuple[Node, Node]:
    """(is it in this shard?, local index or 0) of global indices into a dim that this rank holds from `first`."""
    shifted = ctx.emit(aten.sub.Tensor, index, first)
    here = ctx.emit(
        aten.logical_and.default, ctx.emit(aten.ge.Scalar, shifted, 0), ctx.emit(aten.lt.Scalar, shifted, size)
    )
    return here, ctx.emit(aten.mul.Tensor, shifted, here)


def indexed(call: Call) -> tuple[Dims, list[Dims], Dims, dict[str, int]] | None:
    """Of `x[i, :, j]`: dims of x, of each index, of the result, and sizes. Indexed dims are whole, the dims of the
    index tensors are broadcast against each other (`i0 i1 ...`). None for a mask: its result's shape depends on data.
    """
    where, shape = call.arg("indices"), call.in_shapes[0]
    tensors = [i.meta["val"] for i in where if isinstance(i, Node)]
    if not tensors or any(t.dtype in MASKS for t in tensors):
        return None
    used = [d for d, i in enumerate(where) if i is not None]
    broadcast = tuple(torch.broadcast_shapes(*(tuple(t.shape) for t in tensors)))
    dims, sizes = letters(shape, used)
    sizes |= {f"i{k}": int(n) for k, n in enumerate(broadcast)}
    index_dims: list[Dim] = [(f"i{k}",) for k in range(len(broadcast))]
    together = used == list(range(used[0], used[-1] + 1))
    before = [dims[d] for d in range(used[0])] if together else []  # indices with a gap between them come first
    after = [dims[d] for d in range(len(shape)) if d not in used and not (together and d < used[0])]
    each = [_broadcast(index_dims, tuple(t.shape)) for t in tensors]
    return tuple(dims), each, (*before, *index_dims, *after), sizes


def _broadcast(dims: Sequence[Dim], shape: Sequence[int]) -> Dims:
    """Dims of a tensor that is broadcast against `dims`, from the right."""
    lead = len(dims) - len(shape)
    return tuple(() if n == 1 else dims[lead + k] for k, n in enumerate(shape))


def index(call: Call) -> Rule | None:
    """`x[i, j]`: the dims of x that are not indexed and the dims of the index tensors pass."""
    found = indexed(call)
    if found is None:
        return None
    dims, each, out, sizes = found
    return Rule((dims, *each), (out,), sizes, linear=FIRST, saves=tuple(range(1, 1 + len(each))))


def index_select(call: Call) -> Rule:
    """`dim` is whole; the index's own dim takes its place."""
    at = wrap(call.arg("dim"), len(call.in_shapes[0]))
    dims, sizes = letters(call.in_shapes[0], {at})
    where = call.in_shapes[1]
    chosen: Dim = ("i",) if where else ()
    if chosen:
        sizes["i"] = where[0]
    out = tuple(chosen if d == at else dim for d, dim in enumerate(dims))
    return Rule((tuple(dims), (chosen,) * len(where)), (out,), sizes, linear=FIRST, saves=(1,))


def along(source: Sequence[int], where: Sequence[int], at: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of a tensor and of an index into its dim `at`, of the same rank, and sizes.

    `at` is whole in the tensor and `i` in the index; the other dims are shared where both have the same size, and whole
    where the index has fewer (it then means the first ones).
    """
    dims, sizes = letters(source, {d for d in range(len(source)) if d == at or source[d] != where[d]})
    index_dims = [("i",) if d == at else dim for d, dim in enumerate(dims)]
    if len(source):
        sizes["i"] = int(where[at])
    return tuple(dims), tuple(index_dims), sizes


def gather(call: Call) -> Rule | None:
    """`dim` is whole in the source and passes in the index; other dims pass where both have the same size."""
    source, where = call.in_shapes
    if len(source) != len(where):
        return None
    dims, index_dims, sizes = along(source, where, wrap(call.arg("dim"), len(source)))
    return Rule((dims, index_dims), (index_dims,), sizes, linear=FIRST, saves=(1,))


def take_along_dim(call: Call) -> Rule | None:
    """gather, with the other dims broadcast against each other."""
    if call.arg("dim") is None:
        return None
    source, where = call.in_shapes
    at = wrap(call.arg("dim"), len(source))
    dims, sizes = letters(call.out_shapes[0])
    left = tuple(() if d == at or n == 1 else dims[d] for d, n in enumerate(source))
    right = tuple(() if n == 1 else dims[d] for d, n in enumerate(where))
    return Rule((left, right), (tuple(dims),), sizes, linear=FIRST, saves=(1,))


def one_hot(call: Call) -> Rule | None:
    """`... -> ... c`: a rank that holds some classes compares with those."""
    classes = call.out_shapes[0][-1]
    if call.arg("num_classes", -1) != classes:
        return None  # counted from the data
    dims, sizes = letters(call.in_shapes[0])
    out = (*dims, ("c",))
    return Rule((tuple(dims),), (out,), {**sizes, "c": classes}, contiguous=frozenset("c"), local=_one_hot_local)


def _one_hot_local(ctx: Local) -> Node:
    if not ctx.cut("c"):
        return ctx.same()
    first, size = ctx.extent("c")
    classes = ctx.emit(aten.arange.start, first, first + size, device=ctx.ins[0].meta["val"].device)
    return ctx.emit(
        aten.to.dtype, ctx.emit(aten.eq.Tensor, ctx.emit(aten.unsqueeze.default, ctx.ins[0], -1), classes), torch.int64
    )


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "embedding": embedding,
    "index": index,
    "_unsafe_index": index,
    "index_select": index_select,
    "gather": gather,
    "take_along_dim": take_along_dim,
    "one_hot": one_hot,
}
