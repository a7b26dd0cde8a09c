"""Scaled dot-product attention: heads and batch are cut freely, queries where no causal mask ties them to their place."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule


def attention(call: Call) -> Rule | None:
    """`b.. h s e, b.. h t e, b.. h t f, (mask ..s t) -> b.. h s f`; with enable_gqa query heads are `(h r)`."""
    if call.arg("dropout_p", 0.0):
        return None
    query, key = call.in_shapes[0], call.in_shapes[1]
    s, t = query[-2], key[-2]
    flop = 4.0 * math.prod(query) * t
    causal = bool(call.arg("is_causal", False))
    whole = "t e f s" if causal else "t e f"
    if causal and s == t:
        flop /= 2
    mask = [", ... s t"] if call.arg("attn_mask") is not None else [""]
    if call.arg("enable_gqa", False) and query[-3] != key[-3]:
        if mask != [""] and len(call.in_shapes[3]) > 2 and call.in_shapes[3][-3] != 1:
            mask = [", ... (h r) s t"]
        elif mask != [""] and len(call.in_shapes[3]) > 2:
            mask = [", ... 1 s t"]
        notation = f"... (h r) s e, ... h t e, ... h t f{mask[0]} -> ... (h r) s f"
    else:
        notation = f"... s e, ... t e, ... t f{mask[0]} -> ... s f"
    sizes = {"s": s, "t": t}
    return rule(notation, call.in_shapes, call.out_shapes, whole=whole, sizes=sizes, flop=flop, saves=(0, 1, 2), saves_output=True)


RULES: dict[str, Callable[[Call], Rule | None]] = {"scaled_dot_product_attention": attention}
