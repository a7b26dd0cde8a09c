"""Matrix products: a factor that both inputs have and the output lacks is summed, so cutting it leaves a partial output."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule


def linear(call: Call) -> Rule:
    notation = "... i, o i, o -> ... o" if len(call.inputs) == 3 else "... i, o i -> ... o"
    if len(call.in_shapes[1]) == 1:
        notation = "... i, i -> ..."
    flop = 2.0 * math.prod(call.in_shapes[0]) * (call.in_shapes[1][0] if len(call.in_shapes[1]) == 2 else 1)
    return rule(notation, call.in_shapes, call.out_shapes, flop=flop, saves=(0, 1), addends=frozenset({2}))


def matmul(call: Call) -> Rule:
    a, b = call.in_shapes
    left, right = ("k" if len(a) == 1 else "... m k"), ("k" if len(b) == 1 else "... k n")
    out = " ".join(["..."] * (len(a) > 2 or len(b) > 2) + ["m"] * (len(a) > 1) + ["n"] * (len(b) > 1))
    if len(a) == 2 and "..." not in out:
        left = "m k"
    if len(b) == 2 and "..." not in out:
        right = "k n"
    flop = 2.0 * math.prod(call.out_shapes[0]) * a[-1]
    return rule(f"{left}, {right} -> {out}", call.in_shapes, call.out_shapes, flop=flop, saves=(0, 1))


def addmm(call: Call) -> Rule | None:
    if call.arg("beta", 1) == 0:
        return None
    bias = {0: "", 1: "n", 2: "m n"}[len(call.in_shapes[0])]
    flop = 2.0 * math.prod(call.in_shapes[1]) * call.in_shapes[2][1]
    return rule(f"{bias}, m k, k n -> m n", call.in_shapes, call.out_shapes, flop=flop, saves=(1, 2), addends=frozenset({0}))


def baddbmm(call: Call) -> Rule | None:
    if call.arg("beta", 1) == 0:
        return None
    bias = " ".join("bmn"[3 - len(call.in_shapes[0]) :])
    flop = 2.0 * math.prod(call.in_shapes[1]) * call.in_shapes[2][2]
    return rule(f"{bias}, b m k, b k n -> b m n", call.in_shapes, call.out_shapes, flop=flop, saves=(1, 2), addends=frozenset({0}))


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "mv": matmul,
    "dot": matmul,
    "addmm": addmm,
    "baddbmm": baddbmm,
}
