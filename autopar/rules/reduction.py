"""Reductions and scans along dims, and the softmaxes built of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Collective, Dim, Distributed, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def reduced_dims(call: Call) -> list[int]:
    """The dims a reduction removes: `dim` (int, list or none = all)."""
    rank = len(call.in_shapes[0])
    names = [a.name for a in call.target._schema.arguments]
    dim = call.arg("dim") if "dim" in names else None
    if dim is None or dim == []:
        return list(range(rank))
    return [int(d) % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _dims(shape: Sequence[int], gone: Sequence[int], keep: bool) -> tuple[list[Dim], list[Dim], dict[str, int]]:
    """Input dims `d0..` or, where reduced, `r0..`; output dims; sizes."""
    ins: list[Dim] = [(f"r{d}",) if d in gone else (f"d{d}",) for d in range(len(shape))]
    outs: list[Dim] = [() if d in gone else ins[d] for d in range(len(shape)) if keep or d not in gone]
    return ins, outs, {dim[0]: n for dim, n in zip(ins, shape, strict=True)}


def total(call: Call) -> Rule:
    """sum, mean: a cut reduced factor leaves a partial; a mean divides by the global count."""
    shape = call.in_shapes[0]
    gone = reduced_dims(call)
    ins, outs, sizes = _dims(shape, gone, bool(call.arg("keepdim", False)))
    mean = call.target._schema.name == "aten::mean"
    return Rule((tuple(ins),), (tuple(outs),), sizes, linear=_FIRST, local=_mean_local if mean else None)


def _mean_local(ctx: Local) -> Node:
    if not any(ctx.cut(letter) for letter in ctx.rule.letters if letter.startswith("r")):
        return ctx.same()
    count = math.prod(n for letter, n in ctx.rule.sizes.items() if letter.startswith("r"))
    kwargs = {"dtype": ctx.call.arg("dtype")} if ctx.call.arg("dtype") is not None else {}
    args = (ctx.ins[0],) if ctx.call.arg("dim") is None else (ctx.ins[0], ctx.call.arg("dim"), bool(ctx.call.arg("keepdim", False)))
    target = aten.sum.default if len(args) == 1 else aten.sum.dim_IntList
    return ctx.emit(aten.div.Tensor, ctx.emit(target, *args, **kwargs), count)


def whole_dims(call: Call) -> Rule:
    """amax, var, argmax, topk, ...: the reduced dims are whole, the others pass."""
    shape = call.in_shapes[0]
    gone = reduced_dims(call)
    ins, outs, sizes = _dims(shape, gone, bool(call.arg("keepdim", False)))
    whole = frozenset(f"r{d}" for d in gone)
    count = len(call.out_shapes)
    return Rule((tuple(ins),), (tuple(outs),) * count, sizes, whole=whole, saves=(0,))


def scan(call: Call) -> Rule:
    """cumsum, sort, softmax-like ops of the same shape: `dim` is whole, the others pass."""
    shape = call.in_shapes[0]
    gone = reduced_dims(call)
    ins, _, sizes = _dims(shape, gone, True)
    linear = _FIRST if call.target._schema.name == "aten::cumsum" else ()
    return Rule((tuple(ins),), (tuple(ins),) * len(call.out_shapes), sizes, whole=frozenset(f"r{d}" for d in gone), linear=linear, saves_output=True)


def diff(call: Call) -> Rule:
    """Differences along `dim`, which is whole in all inputs."""
    rank = len(call.in_shapes[0])
    at = int(call.arg("dim", -1)) % rank
    dims: list[Dim] = [(f"d{i}",) if i != at else () for i in range(rank)]
    sizes = {f"d{i}": n for i, n in enumerate(call.in_shapes[0]) if i != at}
    return Rule((tuple(dims),) * len(call.inputs), (tuple(dims),), sizes)


def softmax(call: Call) -> Rule:
    """Along a cut dim: the maximum and the sum of exponentials are reduced over the axis."""
    shape = call.in_shapes[0]
    at = reduced_dims(call)[0]
    ins, _, sizes = _dims(shape, [at], True)
    letter = f"r{at}"
    rest = tuple(dim[0] for i, dim in enumerate(ins) if i != at)
    costs = Distributed((Collective("all_reduce", "nothing", rest), Collective("all_reduce", "all_reduce", rest)))
    return Rule((tuple(ins),), (tuple(ins),), sizes, distributed={letter: costs}, local=_softmax_local, saves_output=True)


def _softmax_local(ctx: Local) -> Node:
    at = reduced_dims(ctx.call)[0]
    if not ctx.cut(f"r{at}"):
        return ctx.same()
    log = "log_softmax" in ctx.call.target._schema.name
    x = ctx.ins[0]
    dtype = ctx.call.arg("dtype")
    if dtype is not None:
        x = ctx.emit(aten.to.dtype, x, dtype)
    shifted = ctx.emit(aten.sub.Tensor, x, ctx.reduce(local_max(ctx, x, at, f"r{at}"), f"r{at}", "max"))
    exponentials = ctx.emit(aten.exp.default, shifted)
    # the sum is used against sharded values, so its gradient is a part on each rank: R, not I
    norm = ctx.reduce(ctx.emit(aten.sum.dim_IntList, exponentials, [at], True), f"r{at}", "R")
    if log:
        return ctx.emit(aten.sub.Tensor, shifted, ctx.emit(aten.log.default, norm))
    return ctx.emit(aten.div.Tensor, exponentials, norm)


def local_max(ctx: Local, x: Node, dim: int, letter: str) -> Node:
    """Largest value along `dim` of a shard, -inf where the shard is empty; no gradient."""
    stopped = ctx.emit(aten.detach.default, x)
    if ctx.uneven(letter):
        stopped = one_longer(ctx, stopped, dim, float("-inf"))
    return ctx.emit(aten.amax.default, stopped, [dim], True)


def one_longer(ctx: Local, x: Node, dim: int, fill: float) -> Node:
    """Add one row of `fill` along `dim`, so that an empty shard can be read; every rank does so, to run the same nodes."""
    shape = [1 if d == dim else n for d, n in enumerate(x.meta["val"].shape)]
    return ctx.emit(aten.cat.default, [x, ctx.emit(aten.new_full.default, x, shape, fill)], dim)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "sum": total,
    "mean": total,
    **dict.fromkeys("amax amin var std argmax argmin any all prod logsumexp norm linalg_vector_norm var_mean std_mean".split(), whole_dims),
    **dict.fromkeys("cumsum cumprod logcumsumexp flip".split(), scan),
    "diff": diff,
    **dict.fromkeys("softmax _softmax log_softmax _log_softmax".split(), softmax),
}
