"""Reductions along dims. Sums are cut anywhere; the others keep what they reduce whole (softmax.py and variance.py have
those that are computed across shards)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import FIRST, arguments, dim_list
from autopar.rules.pointwise import pointwise
from autopar.rules.rule import Dim, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def reduced_dims(call: Call) -> list[int]:
    """The dims a reduction removes: `dim` (int, list or none = all)."""
    return dim_list(call) if "dim" in arguments(call) else list(range(len(call.in_shapes[0])))


def reduction_dims(
    shape: Sequence[int], gone: Sequence[int], keep: bool
) -> tuple[list[Dim], list[Dim], dict[str, int]]:
    """Input dims `d0..` or, where reduced, `r0..`; output dims; sizes."""
    ins: list[Dim] = [(f"r{d}",) if d in gone else (f"d{d}",) for d in range(len(shape))]
    outs: list[Dim] = [() if d in gone else ins[d] for d in range(len(shape)) if keep or d not in gone]
    return ins, outs, {dim[0]: int(n) for dim, n in zip(ins, shape, strict=True)}


def reduced(call: Call, **options: object) -> Rule:
    """The plain rule of a reduction: `r` factors go. options: further fields of `Rule`."""
    ins, outs, sizes = reduction_dims(call.in_shapes[0], reduced_dims(call), bool(call.arg("keepdim", False)))
    return Rule((tuple(ins),), (tuple(outs),) * len(call.out_shapes), sizes, **options)  # type: ignore[arg-type]


def reduced_letters(rule: Rule) -> tuple[str, ...]:
    return tuple(letter for letter in rule.sizes if letter.startswith("r"))


def total(call: Call) -> Rule:
    """sum: a cut reduced factor leaves a partial."""
    return reduced(call, linear=FIRST)


def counted(call: Call) -> Rule:
    """nansum, count_nonzero: sums of something that is not linear in the input."""
    return reduced(call, saves=() if "nonzero" in call.target._schema.name else (0,))


def mean(call: Call) -> Rule:
    """A cut reduced factor leaves a partial; the mean divides by the global count."""
    return reduced(call, linear=FIRST, local=_mean_local)


def _mean_local(ctx: Local) -> Node:
    cut = [letter for letter in reduced_letters(ctx.rule) if ctx.cut(letter)]
    if not cut:
        return ctx.same()
    if not any(ctx.uneven(letter) for letter in cut):
        # a local mean, divided by the number of shards: a sum could overflow in half precision where the mean doesn't
        return ctx.emit(aten.div.Tensor, ctx.same(), math.prod(ctx.rule.sizes[k] // ctx.local_size(k) for k in cut))
    count = math.prod(ctx.rule.sizes[letter] for letter in reduced_letters(ctx.rule))
    kwargs = {"dtype": ctx.call.arg("dtype")} if ctx.call.arg("dtype") is not None else {}
    args = (
        (ctx.ins[0],)
        if ctx.call.arg("dim") is None
        else (ctx.ins[0], ctx.call.arg("dim"), bool(ctx.call.arg("keepdim", False)))
    )
    target = aten.sum.default if len(args) == 1 else aten.sum.dim_IntList
    return ctx.emit(aten.div.Tensor, ctx.emit(target, *args, **kwargs), count)


def whole_dims(call: Call) -> Rule | None:
    """argmax, prod, median, ...: the reduced dims are whole, the others pass."""
    if len(call.inputs) != 1:
        return None
    gone = reduced_dims(call)
    return reduced(call, whole=frozenset(f"r{d}" for d in gone), saves=(0,))


def filled_dims(call: Call) -> Rule | None:
    """quantile: as `whole_dims`, and torch refuses an empty tensor."""
    found = whole_dims(call)
    return replace(found, filled=frozenset(found.sizes)) if found is not None else None


def largest(call: Call) -> Rule | None:
    """max, min: of one tensor a reduction, of two a pointwise op."""
    return pointwise(call) if len(call.inputs) == 2 else whole_dims(call)


def histogram(call: Call) -> Rule | None:
    """histc: counts of shards add up, when the bins do not depend on the data."""
    if call.arg("min", 0) == call.arg("max", 0):
        return None
    ins, _, sizes = reduction_dims(call.in_shapes[0], range(len(call.in_shapes[0])), False)
    return Rule((tuple(ins),), (((),),), sizes)


def local_max(ctx: Local, x: Node, dim: int, letter: str) -> Node:
    """Largest value along `dim` of a shard, -inf where the shard is empty; no gradient."""
    stopped = ctx.emit(aten.detach.default, x)
    if ctx.uneven(letter):
        stopped = one_longer(ctx, stopped, dim, float("-inf"))
    return ctx.emit(aten.amax.default, stopped, [dim], True)


def one_longer(ctx: Local, x: Node, dim: int, fill: float) -> Node:
    """Add one row of `fill` along `dim`: an empty shard can then be read. Every rank does so, to run the same nodes."""
    shape = [1 if d == dim else n for d, n in enumerate(x.meta["val"].shape)]
    return ctx.emit(aten.cat.default, [x, ctx.emit(aten.new_full.default, x, shape, fill)], dim)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "sum": total,
    "mean": mean,
    "nansum": counted,
    "count_nonzero": counted,
    "histc": histogram,
    "max": largest,
    "min": largest,
    **dict.fromkeys(
        "amax amin aminmax argmax argmin any all prod median nanmedian mode kthvalue nanmean".split(), whole_dims
    ),
    **dict.fromkeys("quantile nanquantile".split(), filled_dims),
}
