"""Normalisations: the statistics of a group of elements need the whole group.

Where the group is cut, mean and variance are those of all ranks together: sums over the shard are reduced over the
axis, the mean first and then the squares of what is left (two passes, since the difference of two large sums is
inexact). The statistics are used against sharded values, so each rank has a part of their gradient: R, not I.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Collective, Distributed, Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def _statistics(letters: Sequence[str], rows: Sequence[str], reductions: int = 2) -> dict[str, Distributed]:
    """`letters` may be cut for `reductions` all-reduces of a buffer with the factors `rows`, and as many backward."""
    return {
        letter: Distributed((Collective("all_reduce", "all_reduce", tuple(rows)),) * reductions) for letter in letters
    }


def _named(prefix: str, first: int, stop: int) -> list[str]:
    return [f"{prefix}{d}" for d in range(first, stop)]


def layer_norm(call: Call) -> Rule:
    """layer_norm, rms_norm: the last dims are normalised together; weight and bias have just these."""
    rank, tail = len(call.in_shapes[0]), len(call.arg("normalized_shape"))
    rows, group = _named("d", 0, rank - tail), _named("r", rank - tail, rank)
    dims, names = " ".join(rows + group), " ".join(group)
    notation = f"{', '.join([dims] + [names] * (len(call.inputs) - 1))} -> {dims}"
    rms = "rms" in call.target._schema.name
    return rule(
        notation,
        call.in_shapes,
        call.out_shapes,
        distributed=_statistics(group, rows, 1 if rms else 2),
        local=_layer_norm_local,
        saves=(0,),
    )


def _layer_norm_local(ctx: Local) -> Node:
    group = [f for f in ctx.rule.letters if f.startswith("r")]
    if not any(ctx.cut(f) for f in group):
        return ctx.same()
    x, tensors = _wide(ctx, ctx.ins[0]), dict(zip(ctx.call.named_inputs(), ctx.ins, strict=True))
    dims = list(range(len(x.meta["val"].shape) - len(group), len(x.meta["val"].shape)))
    if "rms" in ctx.call.target._schema.name:
        eps = ctx.call.arg("eps")
        eps = torch.finfo(x.meta["val"].dtype).eps if eps is None else eps
        squares = _mean(ctx, ctx.emit(aten.mul.Tensor, x, x), dims, group)
        return _scaled(ctx, x, squares, eps, tensors.get("weight"), None)
    centred, var = moments(ctx, x, dims, group)
    return _scaled(ctx, centred, var, ctx.call.arg("eps"), tensors.get("weight"), tensors.get("bias"))


def moments(ctx: Local, x: Node, dims: Sequence[int], letters: Sequence[str]) -> tuple[Node, Node]:
    """(x - mean, variance) over `dims`, which are the factors `letters`, of all ranks together."""
    centred = ctx.emit(aten.sub.Tensor, x, _mean(ctx, x, dims, letters))
    return centred, _mean(ctx, ctx.emit(aten.mul.Tensor, centred, centred), dims, letters)


def _mean(ctx: Local, x: Node, dims: Sequence[int], letters: Sequence[str]) -> Node:
    total = ctx.emit(aten.sum.dim_IntList, x, list(dims), True)
    for letter in letters:
        total = ctx.reduce(total, letter, "R")
    return ctx.emit(aten.div.Tensor, total, math.prod(ctx.rule.sizes[f] for f in letters))


def _scaled(ctx: Local, centred: Node, var: Node, eps: float, weight: Node | None, bias: Node | None) -> Node:
    """centred / sqrt(var + eps) * weight + bias, in the output's dtype; weight and bias broadcast as they are."""
    out = ctx.emit(aten.mul.Tensor, centred, ctx.emit(aten.rsqrt.default, ctx.emit(aten.add.Scalar, var, eps)))
    if weight is not None:
        out = ctx.emit(aten.mul.Tensor, out, weight)
    if bias is not None:
        out = ctx.emit(aten.add.Tensor, out, bias)
    wanted = ctx.call.node.meta["val"].dtype
    return out if out.meta["val"].dtype == wanted else ctx.emit(aten.to.dtype, out, wanted)


def _wide(ctx: Local, x: Node) -> Node:
    """Statistics of half-precision values are taken in float32, as torch's kernels do."""
    narrow = x.meta["val"].dtype in (torch.float16, torch.bfloat16)
    return ctx.emit(aten.to.dtype, x, torch.float32) if narrow else x


def batch_norm(call: Call) -> Rule | None:
    """`n c space, c... -> n c space`: in training the statistics are over the global batch and space, else inputs.

    Training that writes running statistics has no rule: capture has replaced these writes by means.
    """
    training = bool(call.arg("training"))
    if training and call.arg("running_mean") is not None:
        return None
    space = _named("s", 0, len(call.in_shapes[0]) - 2)
    dims = " ".join(["n", "c", *space])
    group = ["n", *space] if training else []
    return rule(
        f"{', '.join([dims] + ['c'] * (len(call.inputs) - 1))} -> {dims}",
        call.in_shapes,
        call.out_shapes,
        distributed=_statistics(group, ("c",)),
        filled=frozenset("c"),
        local=_batch_norm_local if training else None,
        saves=(0,),
    )


def _batch_norm_local(ctx: Local) -> Node:
    group = [f for f in ctx.rule.letters if f != "c"]
    return _over_channels(ctx, group) if any(ctx.cut(f) for f in group) else ctx.same()


def _over_channels(ctx: Local, group: Sequence[str]) -> Node:
    """Normalise over `group`, some of the factors n, s0, ...; weight and bias have the channels."""
    x, tensors = _wide(ctx, ctx.ins[0]), dict(zip(ctx.call.named_inputs(), ctx.ins, strict=True))
    rank = len(x.meta["val"].shape)
    dims = [d for d in range(rank) if d != 1 and (d or "n" in group)]
    centred, var = moments(ctx, x, dims, group)
    weight, bias = (_channels(ctx, tensors.get(name), rank - 2) for name in ("weight", "bias"))
    return _scaled(ctx, centred, var, ctx.call.arg("eps"), weight, bias)


def _channels(ctx: Local, x: Node | None, space: int) -> Node | None:
    return None if x is None else ctx.emit(aten.reshape.default, x, [-1, *[1] * space])


def instance_norm(call: Call) -> Rule | None:
    """`n c space, c... -> n c space`: statistics of each sample and channel over space, or running ones."""
    own = bool(call.arg("use_input_stats"))
    if own and call.arg("running_mean") is not None:
        return None
    space = _named("s", 0, len(call.in_shapes[0]) - 2)
    dims = " ".join(["n", "c", *space])
    return rule(
        f"{', '.join([dims] + ['c'] * (len(call.inputs) - 1))} -> {dims}",
        call.in_shapes,
        call.out_shapes,
        distributed=_statistics(space if own else [], ("n", "c")),
        filled=frozenset("nc"),
        local=_instance_norm_local if own else None,
        saves=(0,),
    )


def _instance_norm_local(ctx: Local) -> Node:
    space = [f for f in ctx.rule.letters if f.startswith("s")]
    return _over_channels(ctx, space) if any(ctx.cut(f) for f in space) else ctx.same()


def group_norm(call: Call) -> Rule:
    """`n (g c) space, (g c)... -> n (g c) space`: statistics over the channels of a group and space."""
    groups = int(call.arg("num_groups"))
    space = _named("s", 0, len(call.in_shapes[0]) - 2)
    dims = " ".join(["n", "(g c)", *space])
    return rule(
        f"{', '.join([dims] + ['(g c)'] * (len(call.inputs) - 1))} -> {dims}",
        call.in_shapes,
        call.out_shapes,
        sizes={"g": groups, "c": call.in_shapes[0][1] // groups},
        distributed=_statistics(["c", *space], ("n", "g")),
        filled=frozenset("gc"),
        local=_group_norm_local,
        saves=(0,),
    )


def _group_norm_local(ctx: Local) -> Node:
    group = [f for f in ctx.rule.letters if f not in ("n", "g")]
    groups = ctx.local_size("g")
    if not any(ctx.cut(f) for f in group):
        return ctx.same(num_groups=groups)
    x, tensors = _wide(ctx, ctx.ins[0]), dict(zip(ctx.call.named_inputs(), ctx.ins, strict=True))
    shape = list(x.meta["val"].shape)
    split = [groups, shape[1] // groups]
    x = ctx.emit(aten.reshape.default, x, [shape[0], *split, *shape[2:]])
    centred, var = moments(ctx, x, range(2, len(shape) + 1), ["c", *(f for f in group if f != "c")])
    weight, bias = (
        None if t is None else ctx.emit(aten.reshape.default, t, [*split, *[1] * (len(shape) - 2)])
        for t in (tensors.get("weight"), tensors.get("bias"))
    )
    return ctx.emit(aten.reshape.default, _scaled(ctx, centred, var, ctx.call.arg("eps"), weight, bias), shape)


def weight_norm(call: Call) -> Rule | None:
    """`w = v g / |v|`, where the length is taken over all dims but `dim`."""
    rank, at = len(call.in_shapes[0]), int(call.arg("dim", 0))
    if not 0 <= at < rank or rank < 2:
        return None
    dims = [f"r{d}" if d != at else "o" for d in range(rank)]
    size = " ".join("o" if d == at else "1" for d in range(rank))
    group = [d for d in dims if d != "o"]
    return rule(
        f"{' '.join(dims)}, {size} -> {' '.join(dims)}",
        call.in_shapes,
        call.out_shapes,
        distributed=_statistics(group, ("o",), 1),
        filled=frozenset("o"),
        local=_weight_norm_local,
        saves=(0, 1),
    )


def _weight_norm_local(ctx: Local) -> Node:
    group = [f for f in ctx.rule.letters if f != "o"]
    if not any(ctx.cut(f) for f in group):
        return ctx.same()
    v, length = ctx.ins
    dims = [d for d, dim in enumerate(ctx.rule.ins[0]) if dim != ("o",)]
    squares = ctx.emit(aten.sum.dim_IntList, ctx.emit(aten.mul.Tensor, v, v), dims, True)
    for letter in group:
        squares = ctx.reduce(squares, letter, "R")
    scale = ctx.emit(aten.div.Tensor, length, ctx.emit(aten.sqrt.default, squares))
    return ctx.emit(aten.mul.Tensor, v, scale)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "group_norm": group_norm,
    "_weight_norm": weight_norm,
}
