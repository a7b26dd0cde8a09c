"""Losses. `normalize` has turned means into sum / count, so what stands here are sums and unreduced losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.indexing import locate
from autopar.rules.reduction import local_max, one_longer
from autopar.rules.rule import Collective, Distributed, Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten
REDUCTION = {0: "none", 1: "mean", 2: "sum"}


def cross_entropy(call: Call) -> Rule | None:
    """`n v ..., n ... -> ` (sum) or `-> n ...` (none): tokens are cut freely; a cut vocabulary needs three small all-reduces.

    Cut vocabulary: loss = log(sum exp(x - max)) - (x - max)[target], where the maximum, the sum and the picked logit are
    each reduced over the axis (Shoeybi et al. 2019, section 3).
    """
    reduction = REDUCTION[int(call.arg("reduction", 1))]
    logits, target = call.in_shapes[0], call.in_shapes[1]
    if reduction == "mean" or len(logits) < 2 or len(target) != len(logits) - 1:
        return None
    tokens = " ".join(["n", *(f"k{i}" for i in range(len(logits) - 2))])
    v_spec = tokens.replace("n", "n v", 1)
    plain = call.arg("weight") is None and not call.arg("label_smoothing", 0.0)
    out = tokens if reduction == "none" else ""
    notation = f"{v_spec}, {tokens} -> {out}" if call.arg("weight") is None else f"{v_spec}, {tokens}, v -> {out}"
    row = tuple(tokens.split())
    summed = Collective("all_reduce", "nothing", row)
    return rule(
        notation,
        call.in_shapes,
        call.out_shapes,
        whole="" if plain else "v",
        contiguous=frozenset({"v"}),
        distributed={"v": Distributed((summed, summed, summed), output="I")},
        local=_cross_entropy_local,
        saves=(0,),
        saves_output=False,
    )


def _cross_entropy_local(ctx: Local) -> Node:
    if not ctx.cut("v"):
        return ctx.same()
    x, target = ctx.ins
    ignore = int(ctx.call.arg("ignore_index", -100))
    first, size = ctx.extent("v")
    shifted = ctx.emit(aten.sub.Tensor, x, ctx.reduce(local_max(ctx, x, 1, "v"), "v", "max"))
    norm = ctx.reduce(ctx.emit(aten.sum.dim_IntList, ctx.emit(aten.exp.default, shifted), [1]), "v", "I")
    here, row = locate(ctx, target, first, size)
    table = one_longer(ctx, shifted, 1, 0.0) if ctx.uneven("v") else shifted
    picked = ctx.emit(aten.squeeze.dim, ctx.emit(aten.gather.default, table, 1, ctx.emit(aten.unsqueeze.default, row, 1)), 1)
    picked = ctx.emit(aten.masked_fill.Scalar, picked, ctx.emit(aten.logical_not.default, here), 0.0)
    picked = ctx.reduce(picked, "v", "I")
    loss = ctx.emit(aten.sub.Tensor, ctx.emit(aten.log.default, norm), picked)
    loss = ctx.emit(aten.masked_fill.Scalar, loss, ctx.emit(aten.eq.Scalar, target, ignore), 0.0)
    return loss if REDUCTION[int(ctx.call.arg("reduction", 1))] == "none" else ctx.emit(aten.sum.default, loss)


RULES: dict[str, Callable[[Call], Rule | None]] = {"cross_entropy_loss": cross_entropy}
