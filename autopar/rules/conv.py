"""Convolutions: batch, output channels and groups are cut freely, cut input channels are summed, space is whole.

`n (g i) space, (g o) i kernel, (g o) -> n (g o) space'`; transposed, the weight is `(g i) o kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local


def convolution(call: Call) -> Rule:
    """Any convolution with arguments (input, weight, bias, ...); the weight's rank - 2 is the number of space dims."""
    name = call.target._schema.name
    transposed = "conv_transpose" in name or bool(call.arg("transposed", False))
    x, weight = call.in_shapes[:2]
    groups = int(call.arg("groups", 1))
    dims = len(weight) - 2
    space, kernel, moved = (" ".join(f"{c}{d}" for d in range(dims)) for c in "xky")
    batch = "n " if len(x) == dims + 2 else ""
    spec = f"(g i) o {kernel}" if transposed else f"(g o) i {kernel}"
    bias = ", (g o)" if len(call.inputs) == 3 else ""
    sizes = {"g": groups, "i": x[-dims - 1] // groups, "o": call.out_shapes[0][-dims - 1] // groups}
    return rule(
        f"{batch}(g i) {space}, {spec}{bias} -> {batch}(g o) {moved}",
        call.in_shapes,
        call.out_shapes,
        whole=f"{space} {kernel} {moved}",
        sizes=sizes,
        filled=frozenset("gio"),
        addends=frozenset({2}),
        local=_convolution_local,
        flop=2.0 * math.prod(x if transposed else call.out_shapes[0]) * math.prod(weight[1:]),
        saves=(0, 1),
    )


def _convolution_local(ctx: Local) -> Node:
    return ctx.same(groups=ctx.local_size("g")) if ctx.cut("g") else ctx.same()


RULES: dict[str, Callable[[Call], Rule | None]] = dict.fromkeys(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution".split(), convolution
)
