"""Ops that draw random numbers, rewritten to draw from our own generator: the same numbers whatever the plan.

    %y = dropout(%x, p, True)    ->    %k = autopar.key(salt) ; %y = autopar.dropout(%x, %k, p)
    %r = randn_like(%x)          ->    %k = autopar.key(salt) ; %r = autopar.normal(shape of %x, %k)

The salt is made of the op's stable name, so every op draws for itself. Attention with dropout is taken apart, because
its mask is drawn for the weights that the fused op never shows. Refused, in `refuse`: what draws and is not in the
table.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from autopar.errors import UnsupportedOpError
from autopar.program import record
from autopar.rules.call import Call
from autopar.runtime import random_ops  # noqa: F401 - defines torch.ops.autopar

if TYPE_CHECKING:
    from autopar.passes.normalize import Emitter

aten, ours = torch.ops.aten, torch.ops.autopar
_ALPHA = 1.7580993408473766
"""SELU's scale x alpha: what alpha dropout puts for a dropped element is its negative (Klambauer et al. 2017)."""

Rewrite = Callable[["Emitter"], "Node | tuple[Node, ...] | None"]


def key(e: Emitter) -> Node:
    """The key of the op at hand."""
    name = hashlib.sha256(record(e.node).op.encode()).digest()
    return e.emit(ours.key.default, int.from_bytes(name[:8], "big") >> 1, like="key")


def _filled(e: Emitter, target: Any, *, dtype: torch.dtype | None = None, like: str = "") -> Node | None:
    """A value of the op's own shape from `uniform` or `normal`; they give real numbers only."""
    out = e.node.meta["val"]
    dtype = dtype or out.dtype
    if not dtype.is_floating_point:
        return None
    return e.emit(target, list(out.shape), key(e), dtype=dtype, device=out.device, like=like)


def _uniform(e: Emitter) -> Node | None:
    return _filled(e, ours.uniform.default)


def _normal(e: Emitter) -> Node | None:
    return _filled(e, ours.normal.default)


def _times_plus(e: Emitter, x: Node, factor: Any, offset: Any) -> Node:
    """x * factor + offset, each a number or a node."""
    if isinstance(factor, Node) or factor != 1:
        x = e.emit(aten.mul.Tensor if isinstance(factor, Node) else aten.mul.Scalar, x, factor, like="scaled")
    if isinstance(offset, Node) or offset != 0:
        x = e.emit(aten.add.Tensor if isinstance(offset, Node) else aten.add.Scalar, x, offset)
    return x


def _normal_with(e: Emitter) -> Node | None:
    """normal(mean, std, ...), and what `normal_` becomes."""
    drawn = _filled(e, ours.normal.default, like="normal")
    return None if drawn is None else _times_plus(e, drawn, e.new("std"), e.new("mean"))


def _uniform_between(e: Emitter) -> Node | None:
    low, high = float(e.call.arg("from", 0.0)), float(e.call.arg("to", 1.0))
    drawn = _filled(e, ours.uniform.default, like="uniform")
    return None if drawn is None else _times_plus(e, drawn, high - low, low)


def _exponential(e: Emitter) -> Node | None:
    """-log(1 - u) / rate, above 0 as in torch: its logarithm is taken by whoever makes Gumbel noise of it."""
    drawn = _filled(e, ours.uniform.default, like="uniform")
    if drawn is None:
        return None
    log = e.emit(aten.log1p.default, e.emit(aten.neg.default, drawn, like="negative"), like="log")
    eps = torch.finfo(e.node.meta["val"].dtype).eps
    least = e.emit(aten.clamp_min.default, e.emit(aten.neg.default, log, like="positive"), eps / 2, like="least")
    return _times_plus(e, least, 1.0 / float(e.call.arg("lambd", 1.0)), 0)


def _integers(e: Emitter) -> Node | None:
    """low + floor(u (high - low)) with u of 53 bits."""
    out, low, high = e.node.meta["val"], e.call.arg("low", 0), e.call.arg("high")
    if isinstance(high, Node):
        return None
    drawn = _filled(e, ours.uniform.default, dtype=torch.float64, like="uniform")
    assert drawn is not None
    steps = e.emit(
        aten.floor.default, e.emit(aten.mul.Scalar, drawn, int(high) - int(low), like="scaled"), like="floor"
    )
    return e.emit(aten.to.dtype, e.emit(aten.add.Scalar, steps, int(low), like="moved"), out.dtype)


def _permutation(e: Emitter) -> Node:
    out = e.node.meta["val"]
    drawn = _filled(e, ours.uniform.default, dtype=torch.float64, like="uniform")
    return e.emit(aten.to.dtype, e.emit(aten.argsort.default, drawn, like="order"), out.dtype)


def _multinomial(e: Emitter) -> Node | None:
    """Without replacement: the largest p / exponential noise (Efraimidis and Spirakis 2006)."""
    weights, count = e.new("self"), int(e.call.arg("num_samples"))
    if e.call.arg("replacement") and count > 1:
        return None
    value = weights.meta["val"]
    wide = _wide(value.dtype)
    drawn = e.emit(ours.uniform.default, list(value.shape), key(e), dtype=wide, device=value.device, like="uniform")
    noise = e.emit(
        aten.neg.default, e.emit(aten.log1p.default, e.emit(aten.neg.default, drawn, like="n"), like="l"), like="e"
    )
    noise = e.emit(aten.clamp_min.default, noise, torch.finfo(wide).eps / 2, like="noise")
    best = e.emit(aten.topk.default, e.emit(aten.div.Tensor, weights, noise, like="ratio"), count, like="best")
    return e.emit(operator.getitem, best, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a probability of this dtype is compared."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bernoulli(e: Emitter) -> Node:
    """1 with probability p, given as a number, as another tensor, or by the input itself."""
    out = e.node.meta["val"]
    named = "p" in {a.name for a in e.call.target._schema.arguments}
    p = e.new("p") if named else e.new("self")
    if isinstance(p, Node):
        drawn = _filled(e, ours.uniform.default, dtype=_wide(p.meta["val"].dtype), like="uniform")
        yes = e.emit(aten.lt.Tensor, drawn, p, like="yes")
    else:
        yes = e.emit(ours.keep.default, list(out.shape), key(e), 1.0 - float(p), device=out.device, like="yes")
    return e.emit(aten.to.dtype, yes, out.dtype)


def _dropout(e: Emitter) -> Node:
    p, x = e.call.arg("p"), e.new("input")
    return e.emit(ours.dropout.default, x, key(e), float(p)) if e.call.arg("train") and p else x


def _native_dropout(e: Emitter) -> tuple[Node, ...] | None:
    """(x kept / (1 - p), kept)."""
    x, p = e.new("input"), float(e.call.arg("p"))
    value = x.meta["val"]
    if e.call.arg("train") is False:
        p = 0.0
    kept = e.emit(ours.keep.default, list(value.shape), key(e), p, device=value.device, like="kept")
    noise = e.emit(aten.to.dtype, kept, value.dtype, like="noise")
    scaled = _times_plus(e, noise, 1.0 / (1.0 - p) if p < 1 else 0.0, 0)
    return e.emit(aten.mul.Tensor, x, scaled), kept


def _dropout_of(*, features: bool, alpha: bool) -> Rewrite:
    """feature_dropout drops whole channels; alpha dropout keeps mean and variance of a SELU's output."""

    def rewrite(e: Emitter) -> Node:
        x, p = e.new("input"), float(e.call.arg("p"))
        value = x.meta["val"]
        if not e.call.arg("train") or not p:
            return x
        if p >= 1:
            return e.emit(aten.mul.Scalar, x, 0)
        shape = [n if d < 2 or not features else 1 for d, n in enumerate(value.shape)]
        kept = e.emit(ours.keep.default, shape, key(e), p, device=value.device, like="kept")
        noise = e.emit(aten.to.dtype, kept, value.dtype, like="noise")
        if not alpha:
            return e.emit(aten.mul.Tensor, x, e.emit(aten.mul.Scalar, noise, 1.0 / (1.0 - p), like="factor"))
        a = 1.0 / math.sqrt((_ALPHA**2 * p + 1.0) * (1.0 - p))
        factor = e.emit(aten.mul.Scalar, noise, a, like="factor")
        scaled = e.emit(aten.mul.Scalar, noise, _ALPHA * a, like="moved")
        offset = e.emit(aten.add.Scalar, scaled, _ALPHA * a * (p - 1.0), like="offset")
        return e.emit(aten.add.Tensor, e.emit(aten.mul.Tensor, x, factor, like="kept_x"), offset)

    return rewrite


def _rrelu(e: Emitter) -> Node | None:
    """x where x >= 0, else x times a slope drawn between lower and upper."""
    if not e.call.arg("training"):
        return None
    x, low, high = e.new("self"), float(e.call.arg("lower", 1 / 8)), float(e.call.arg("upper", 1 / 3))
    drawn = _filled(e, ours.uniform.default, like="uniform")
    assert drawn is not None
    slope = e.emit(aten.add.Scalar, e.emit(aten.mul.Scalar, drawn, high - low, like="scaled"), low, like="slope")
    above = e.emit(aten.ge.Scalar, x, 0, like="above")
    return e.emit(aten.where.self, above, x, e.emit(aten.mul.Tensor, x, slope, like="below"))


def _attention(e: Emitter) -> Node | None:
    """softmax(q k^T scale + mask) -> dropout -> times v, as in torch's own reference; grouped queries as `(h r)`."""
    p = float(e.call.arg("dropout_p", 0.0))
    if not p:
        return None
    q, k, v, mask = (e.new(name) for name in ("query", "key", "value", "attn_mask"))
    shapes = [tuple(n.meta["val"].shape) for n in (q, k, v)]
    dtype, device = q.meta["val"].dtype, q.meta["val"].device
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = (e.emit(aten.to.dtype, n, torch.float32, like=f"wide_{i}") for i, n in enumerate((q, k, v)))
    grouped = bool(e.call.arg("enable_gqa", False)) and shapes[0][-3] != shapes[1][-3]
    if grouped:
        if shapes[1][-3] != shapes[2][-3]:
            return None
        groups = [shapes[1][-3], shapes[0][-3] // shapes[1][-3]]
        q = e.emit(aten.reshape.default, q, [*shapes[0][:-3], *groups, *shapes[0][-2:]], like="grouped")
        k, v = (e.emit(aten.unsqueeze.default, n, -3, like=f"grouped_{i}") for i, n in enumerate((k, v)))
    scale = e.call.arg("scale")
    scale = 1.0 / math.sqrt(shapes[0][-1]) if scale is None else float(scale)
    scaled = e.emit(aten.mul.Scalar, q, scale, like="scaled")
    scores = e.emit(aten.matmul.default, scaled, e.emit(aten.transpose.int, k, -2, -1, like="columns"), like="scores")
    if e.call.arg("is_causal", False):
        rows = e.emit(aten.arange.default, shapes[0][-2], device=device, like="rows")
        places = e.emit(aten.arange.default, shapes[1][-2], device=device, like="places")
        later = e.emit(aten.lt.Tensor, e.emit(aten.unsqueeze.default, rows, 1, like="row"), places, like="later")
        scores = e.emit(aten.masked_fill.Scalar, scores, later, -math.inf, like="causal")
    if isinstance(mask, Node):
        scores = _masked(e, scores, mask, groups if grouped else None)
        weights = e.emit(aten._safe_softmax.default, scores, -1, like="weights")
    else:
        weights = e.emit(aten.softmax.int, scores, -1, like="weights")
    dropped = e.emit(ours.dropout.default, weights, key(e), p, like="dropout")
    out = e.emit(aten.matmul.default, dropped, v, like="product")
    if grouped:
        out = e.emit(aten.reshape.default, out, list(e.node.meta["val"].shape), like="joined")
    return e.emit(aten.to.dtype, out, dtype) if out.meta["val"].dtype != dtype else out


def _masked(e: Emitter, scores: Node, mask: Node, groups: list[int] | None) -> Node:
    shape = tuple(mask.meta["val"].shape)
    if groups is not None and len(shape) > 2:
        inner = [1, 1] if shape[-3] == 1 else groups
        mask = e.emit(aten.reshape.default, mask, [*shape[:-3], *inner, *shape[-2:]], like="grouped_mask")
    if mask.meta["val"].dtype == torch.bool:
        return e.emit(
            aten.masked_fill.Scalar,
            scores,
            e.emit(aten.logical_not.default, mask, like="hidden"),
            -math.inf,
            like="masked",
        )
    return e.emit(aten.add.Tensor, scores, mask, like="masked")


REWRITES: dict[str, Rewrite] = {
    "aten::dropout": _dropout,
    "aten::native_dropout": _native_dropout,
    "aten::feature_dropout": _dropout_of(features=True, alpha=False),
    "aten::alpha_dropout": _dropout_of(features=False, alpha=True),
    "aten::feature_alpha_dropout": _dropout_of(features=True, alpha=True),
    "aten::bernoulli": _bernoulli,
    **dict.fromkeys(("aten::rand", "aten::rand_like"), _uniform),
    **dict.fromkeys(("aten::randn", "aten::randn_like"), _normal),
    **dict.fromkeys(("aten::randint", "aten::randint_like"), _integers),
    **dict.fromkeys(("aten::normal", "aten::normal_functional"), _normal_with),
    "aten::uniform": _uniform_between,
    "aten::exponential": _exponential,
    "aten::randperm": _permutation,
    "aten::multinomial": _multinomial,
    "aten::rrelu": _rrelu,
    "aten::scaled_dot_product_attention": _attention,
}

_ONLY_IF: dict[str, Callable[[Call], bool]] = {
    "aten::scaled_dot_product_attention": lambda call: bool(call.arg("dropout_p", 0.0)),
    "aten::rrelu": lambda call: bool(call.arg("training")),
    **dict.fromkeys(
        ("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"),
        lambda call: bool(call.arg("dropout", 0.0)) and bool(call.arg("train")) and int(call.arg("num_layers", 2)) > 1,
    ),
}
"""Ops that torch calls random and that are so in some calls only."""


def refuse(node: Node) -> None:
    """Raises: UnsupportedOpError when a call that no rewrite took draws random numbers; names the user's line."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return
    draws = _ONLY_IF.get(target._schema.name)
    if draws is None or draws(Call(node)):
        raise UnsupportedOpError(
            f"{record(node).where or node.name}: {target} draws random numbers from torch's generator, which no "
            "two plans "
            "draw alike; use dropout, rand, randn, randint, bernoulli, normal, uniform or exponential instead, or pass "
            "the numbers in as an input"
        )
