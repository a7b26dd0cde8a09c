"""Losses. `normalize` has turned means into sum / count, so what stands here are sums and unreduced losses.

A cut vocabulary needs only small all-reduces, of one number a token:

    loss = log sum_v exp(x_v - max) - (x_target - max)

The maximum and the sum are reduced over the axis (Shoeybi et al. 2019, section 3); the picked logit lies on one rank
and the logarithm is kept on one rank, so the loss leaves as a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.layout import I, P
from autopar.rules.call import Call
from autopar.rules.indexing import locate
from autopar.rules.reduction import local_max, one_longer
from autopar.rules.rule import Collective, Distributed, Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for `reduction`."""


def probabilities(call: Call) -> bool:
    """Is the target of a cross entropy a distribution, not an index?"""
    return call.shape("target") == call.shape("self")


def _classes(call: Call, distributed: Distributed | None, local: Callable[[Local], Node]) -> Rule | None:
    """`n v k.., n k.., v -> n k..` (none) or `-> ` (sum). The class weight is read at any target, so it is not cut."""
    logits, reduction = call.in_shapes[0], int(call.arg("reduction", MEAN))
    if reduction == MEAN or not logits:
        return None
    tokens = [*(["n"] if len(logits) > 1 else []), *(f"k{d}" for d in range(len(logits) - 2))]
    scores = " ".join([*tokens[:1], "v", *tokens[1:]])
    target = scores if probabilities(call) else " ".join(tokens)
    weight = ", u" if call.arg("weight") is not None else ""
    return rule(
        f"{scores}, {target}{weight} -> {' '.join(tokens) if reduction == NONE else ''}",
        call.in_shapes,
        call.out_shapes,
        whole="u",
        contiguous=frozenset("v"),
        distributed={} if distributed is None else {"v": distributed},
        local=local,
        saves=(0,),
    )


def cross_entropy(call: Call) -> Rule | None:
    """Index or probability targets, class weights, label smoothing, any number of further dims."""
    row = tuple(["n"] * (len(call.in_shapes[0]) > 1)) + tuple(f"k{d}" for d in range(len(call.in_shapes[0]) - 2))
    back = "all_reduce" if probabilities(call) else "nothing"
    costs = Distributed((Collective("all_reduce", "nothing", row), Collective("all_reduce", back, row)))
    return _classes(call, costs, _cross_entropy_local)


def _cross_entropy_local(ctx: Local) -> Node:
    if not ctx.cut("v"):
        return ctx.same()
    x, soft = _wide(ctx, ctx.ins[0]), probabilities(ctx.call)
    at = 1 if len(ctx.call.in_shapes[0]) > 1 else 0
    shifted = ctx.emit(aten.sub.Tensor, x, ctx.reduce(local_max(ctx, x, at, "v"), "v", "max"))
    total = ctx.emit(aten.sum.dim_IntList, ctx.emit(aten.exp.default, shifted), [at], True)
    # against sharded probabilities each rank has a part of the sum's gradient (R); against what all ranks know, all (I)
    log_total = ctx.emit(aten.log.default, ctx.reduce(total, "v", "R" if soft else "I"))
    loss = _soft_rows(ctx, shifted, log_total, at) if soft else _index_rows(ctx, shifted, log_total, at)
    return _finish(ctx, loss)


def _soft_rows(ctx: Local, shifted: Node, log_total: Node, at: int) -> Node:
    """- sum_v q_v w_v log softmax(x)_v over the classes here; q smoothed."""
    smoothing = float(ctx.call.arg("label_smoothing", 0.0))
    q = ctx.ins[1]
    if smoothing:
        q = ctx.emit(aten.add.Scalar, ctx.emit(aten.mul.Scalar, q, 1 - smoothing), smoothing / ctx.rule.sizes["v"])
    if len(ctx.ins) > 2:
        q = ctx.emit(aten.mul.Tensor, q, _weights_here(ctx, at))
    return ctx.emit(
        aten.sum.dim_IntList, ctx.emit(aten.mul.Tensor, q, ctx.emit(aten.sub.Tensor, log_total, shifted)), [at]
    )


def _index_rows(ctx: Local, shifted: Node, log_total: Node, at: int) -> Node:
    """(1 - a) w_t (log total - x_t) + a / C sum_v w_v (log total - x_v), where ignored targets give 0."""
    smoothing, classes = float(ctx.call.arg("label_smoothing", 0.0)), ctx.rule.sizes["v"]
    log_total = ctx.emit(aten.squeeze.dim, log_total, at)
    for axis in ctx.cut("v"):
        log_total = ctx.emit_move(log_total, axis, I, P)
    target = ctx.ins[1]
    loss = ctx.emit(aten.sub.Tensor, log_total, _pick(ctx, shifted, target, at))
    loss = _weighted(ctx, loss, target)
    if smoothing:
        scores, counted = shifted, classes
        if len(ctx.ins) > 2:
            scores = ctx.emit(aten.mul.Tensor, shifted, _weights_here(ctx, at))
            counted = ctx.emit(aten.sum.default, ctx.ins[2])
        everything = ctx.emit(aten.mul.Tensor, log_total, counted)
        smooth = ctx.emit(aten.sub.Tensor, everything, ctx.emit(aten.sum.dim_IntList, scores, [at]))
        smooth = ctx.emit(aten.mul.Scalar, smooth, smoothing / classes)
        loss = ctx.emit(aten.add.Tensor, ctx.emit(aten.mul.Scalar, loss, 1 - smoothing), smooth)
    return _without_ignored(ctx, loss, target)


def nll(call: Call) -> Rule | None:
    """-x[target]: a cut class dim leaves a partial, since each target lies on one rank."""
    return _classes(call, None, _nll_local)


def _nll_local(ctx: Local) -> Node:
    if not ctx.cut("v"):
        return ctx.same()
    at = 1 if len(ctx.call.in_shapes[0]) > 1 else 0
    target = ctx.ins[1]
    picked = ctx.emit(aten.neg.default, _pick(ctx, ctx.ins[0], target, at))
    return _finish(ctx, _without_ignored(ctx, _weighted(ctx, picked, target), target))


def _pick(ctx: Local, scores: Node, target: Node, at: int) -> Node:
    """scores[target] where the target's class is here, else 0."""
    here, row = locate(ctx, target, *ctx.extent("v"))
    table = one_longer(ctx, scores, at, 0.0) if ctx.uneven("v") else scores
    picked = ctx.emit(aten.gather.default, table, at, ctx.emit(aten.unsqueeze.default, row, at))
    picked = ctx.emit(aten.squeeze.dim, picked, at)
    return ctx.emit(aten.masked_fill.Scalar, picked, ctx.emit(aten.logical_not.default, here), 0.0)


def _weighted(ctx: Local, rows: Node, target: Node) -> Node:
    if len(ctx.ins) < 3:
        return rows
    known = ctx.emit(aten.mul.Tensor, target, ctx.emit(aten.ne.Scalar, target, _ignored(ctx)))
    return ctx.emit(aten.mul.Tensor, rows, ctx.emit(aten.index.Tensor, ctx.ins[2], [known]))


def _weights_here(ctx: Local, at: int) -> Node:
    """The weights of the classes here, broadcast against the logits."""
    mine = ctx.emit(aten.narrow.default, ctx.ins[2], 0, *ctx.extent("v"))
    return ctx.emit(aten.reshape.default, mine, [-1, *[1] * (len(ctx.call.in_shapes[0]) - at - 1)])


def _without_ignored(ctx: Local, rows: Node, target: Node) -> Node:
    return ctx.emit(aten.masked_fill.Scalar, rows, ctx.emit(aten.eq.Scalar, target, _ignored(ctx)), 0.0)


def _finish(ctx: Local, rows: Node) -> Node:
    out = rows if int(ctx.call.arg("reduction", MEAN)) == NONE else ctx.emit(aten.sum.default, rows)
    wanted = ctx.call.node.meta["val"].dtype
    return out if out.meta["val"].dtype == wanted else ctx.emit(aten.to.dtype, out, wanted)


def _ignored(ctx: Local) -> int:
    return int(ctx.call.arg("ignore_index", -100))


def _wide(ctx: Local, x: Node) -> Node:
    narrow = x.meta["val"].dtype in (torch.float16, torch.bfloat16)
    return ctx.emit(aten.to.dtype, x, torch.float32) if narrow else x


def elementwise(call: Call) -> Rule | None:
    """Unreduced losses of each element."""
    if int(call.arg("reduction", MEAN)) != NONE:
        return None
    tensors = ", ".join("..." for _ in call.inputs)
    return rule(f"{tensors} -> ...", call.in_shapes, call.out_shapes, saves=tuple(range(len(call.inputs))))


def _rows(notation: str, single: str) -> Callable[[Call], Rule | None]:
    """Unreduced losses of each sample, whose dim `c` is whole; `single` is the notation without a batch."""

    def build(call: Call) -> Rule | None:
        if int(call.arg("reduction", MEAN)) != NONE:
            return None
        spec, weight = (single if len(call.in_shapes[0]) == 1 else notation), ", c" if call.shape("weight") else ""
        spec = spec.replace(" ->", f"{weight} ->")
        return rule(spec, call.in_shapes, call.out_shapes, whole="c", saves=tuple(range(len(call.inputs))))

    return build


def similarity(call: Call) -> Rule | None:
    """cosine_similarity, pairwise_distance: `... c, ... c -> ...` along `dim`."""
    rank = max(map(len, call.in_shapes))
    at = int(call.arg("dim", -1)) % rank
    names = ["c" if d == at else f"d{d}" for d in range(rank)]
    ins = ", ".join(" ".join(names[rank - len(s) :]) for s in call.in_shapes)
    kept = ["1"] if call.arg("keepdim", False) else []
    out = " ".join([*names[:at], *kept, *names[at + 1 :]])
    return rule(f"{ins} -> {out}", call.in_shapes, call.out_shapes, whole="c", saves=(0, 1))


_ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
    " hinge_embedding_loss margin_ranking_loss soft_margin_loss poisson_nll_loss"
)

_BY_ROW: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    "cosine_embedding_loss": _rows("n c, n c, n -> n", "c, c, -> "),
    "multi_margin_loss": _rows("n c, n -> n", "c, -> "),
    "multilabel_margin_loss": _rows("n c, n c -> n", "c, c -> "),
    "triplet_margin_loss": _rows("... c, ... c, ... c -> ...", "c, c, c -> "),
}


def alignment(call: Call) -> Rule | None:
    """`autopar.ctc_loss`, `t n c, n s, n, n -> n`; targets of all samples in one row have no rule."""
    if len(call.in_shapes[1]) != 2:
        return None
    return rule("t n c, n s, n, n -> n", call.in_shapes, call.out_shapes, whole="t c s", saves=(0, 1, 2, 3))


BY_CLASS = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
"""Losses whose mean divides by what the targets say."""
BY_ROW = tuple(_BY_ROW)
"""Losses whose mean divides by the number of their rows or elements."""

RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict(zip(BY_CLASS, (cross_entropy, nll, nll, nll), strict=True)),
    **_BY_ROW,
    "cosine_similarity": similarity,
    "pairwise_distance": similarity,
    "autopar::ctc_loss": alignment,
}
