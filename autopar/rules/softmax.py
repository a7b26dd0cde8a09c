"""Softmax and logsumexp along a cut dim: the maximum and the sum of exponentials are reduced over the axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.reduction import local_max, reduced, reduced_dims, reduction_dims
from autopar.rules.rule import Collective, Distributed, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def softmax(call: Call) -> Rule:
    """Along a cut dim: the maximum and the sum of exponentials are reduced over the axis."""
    shape = call.in_shapes[0]
    ins, _, sizes = reduction_dims(shape, reduced_dims(call), True)
    if not shape:
        return Rule(((),), ((),), {}, saves_output=True)
    at = reduced_dims(call)[0]
    rest = tuple(dim[0] for i, dim in enumerate(ins) if i != at)
    costs = Distributed((Collective("all_reduce", "nothing", rest), Collective("all_reduce", "all_reduce", rest)))
    return Rule(
        (tuple(ins),), (tuple(ins),), sizes, distributed={f"r{at}": costs}, local=_softmax_local, saves_output=True
    )


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


def whole_softmax(call: Call) -> Rule:
    """_safe_softmax: `dim` is whole (rows of -inf become zeros, which the formula above doesn't do)."""
    found = softmax(call)
    return replace(found, whole=frozenset(found.distributed), distributed={}, local=None)


def logsumexp(call: Call) -> Rule:
    """log(sum exp(x - max)) + max: both are reduced over the axis. Of several dims, or integers, all are whole."""
    gone = reduced_dims(call)
    letters = frozenset(f"r{d}" for d in gone)
    if len(gone) != 1 or not call.in_shapes[0] or not call.inputs[0].dtype.is_floating_point:
        return reduced(call, whole=letters, saves=(0,), saves_output=True)
    rest = tuple(f"d{d}" for d in range(len(call.in_shapes[0])) if d not in gone)
    costs = Distributed(
        (Collective("all_reduce", "nothing", rest), Collective("all_reduce", "nothing", rest)), output="I"
    )
    return reduced(
        call, distributed=dict.fromkeys(letters, costs), local=_logsumexp_local, saves=(0,), saves_output=True
    )


def _logsumexp_local(ctx: Local) -> Node:
    at = reduced_dims(ctx.call)[0]
    if not ctx.cut(f"r{at}"):
        return ctx.same()
    x = ctx.ins[0]
    top = ctx.reduce(local_max(ctx, x, at, f"r{at}"), f"r{at}", "max")
    top = ctx.emit(aten.masked_fill.Scalar, top, ctx.emit(aten.isinf.default, top), 0.0)  # inf - inf is no number
    norm = ctx.reduce(
        ctx.emit(aten.sum.dim_IntList, ctx.emit(aten.exp.default, ctx.emit(aten.sub.Tensor, x, top)), [at], True),
        f"r{at}",
        "I",
    )
    out = ctx.emit(aten.add.Tensor, ctx.emit(aten.log.default, norm), top)
    return out if ctx.call.arg("keepdim", False) else ctx.emit(aten.squeeze.dim, out, at)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys("softmax _softmax log_softmax _log_softmax special_softmax special_log_softmax".split(), softmax),
    "_safe_softmax": whole_softmax,
    "logsumexp": logsumexp,
    "special_logsumexp": logsumexp,
}
