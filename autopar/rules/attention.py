"""Scaled dot-product attention: heads, batch and queries are cut; a query needs all keys, a product all features.

A causal mask ties queries to their place. Where they are cut, the local program masks by global position itself: query
i sees the keys j <= i, both counted from 0 (torch's convention, also for other numbers of keys than queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def attention(call: Call) -> Rule | None:
    """`... s e, ... t e, ... t f, (... s t) -> ... s f`; with enable_gqa there are `(h r)` query, `h` key heads.

    Dropout draws random numbers, so it has no rule here.
    """
    if call.arg("dropout_p", 0.0):
        return None
    query, key, value = call.in_shapes[:3]
    s, t = query[-2], key[-2]
    causal = bool(call.arg("is_causal", False))
    grouped = bool(call.arg("enable_gqa", False)) and (query[-3] != key[-3] or key[-3] != value[-3])
    if grouped and key[-3] != value[-3]:
        return None
    mask = call.shape("attn_mask")
    heads = ("(h r) ", "h ", "h ") if grouped else ("", "", "")
    specs = [f"... {heads[0]}s e", f"... {heads[1]}t e", f"... {heads[2]}t f"]
    if mask is not None:
        if len(mask) < 2:
            return None
        shared = not grouped or len(mask) == 2
        specs.append("... s t" if shared else f"... {'1' if mask[-3] == 1 else '(h r)'} s t")
    pairs = t * (s + 1) / 2 if causal and s == t else s * t
    return rule(
        f"{', '.join(specs)} -> ... {heads[0]}s f",
        call.in_shapes,
        call.out_shapes,
        whole="t e f",
        sizes={"s": s, "t": t} | ({"h": key[-3], "r": query[-3] // key[-3]} if grouped else {}),
        contiguous=frozenset("s" if causal else ""),
        filled=frozenset("hr") | (_every(query) if mask is not None else frozenset()),
        local=_attention_local if causal else None,
        flop=2.0 * math.prod(query[:-2]) * pairs * (query[-1] + value[-1]),
        saves=(0, 1, 2),
        saves_output=True,
    )


def _every(query: tuple[int, ...]) -> frozenset[str]:
    """Queries and batch dims: without them torch gives a mask no gradient, for which the other ranks would wait."""
    return frozenset({"s", *(f"e{i}" for i in range(len(query) - 2))})


def _attention_local(ctx: Local) -> Node:
    if not ctx.cut("s"):
        return ctx.same()
    first, size = ctx.extent("s")
    device = ctx.ins[0].meta["val"].device
    places = ctx.emit(aten.arange.start, first, first + size, device=device)
    keys = ctx.emit(aten.arange.default, ctx.rule.sizes["t"], device=device)
    seen = ctx.emit(aten.ge.Tensor, ctx.emit(aten.unsqueeze.default, places, 1), keys)
    return ctx.same(attn_mask=seen, is_causal=False)


RULES: dict[str, Callable[[Call], Rule | None]] = {"scaled_dot_product_attention": attention}
