"""Which values autograd keeps from the forward for the backward.

An op keeps what its rule says: for products an input when *another* input takes a gradient, for others an input or the
    output when
anything does. A view shares its input's memory, so a chain of views is charged once, where it is first kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.rules.analyse import Analysis, Op

PRODUCTS = frozenset(
    "mul linear matmul mm bmm mv dot addmm baddbmm embedding index gather masked_fill where outer einsum div".split()
)
"""Ops whose derivative by one input needs only the other inputs."""


def saved_values(analysis: Analysis, weights: frozenset[str]) -> Mapping[str, str]:
    """Value -> its memory's owner, for each value charged; weights are stored anyway and not among them."""
    roots = storage_roots(analysis)
    owners: dict[str, str] = {}
    for op in analysis.ops.values():
        if not any(op.out_grads):
            continue
        kept = [v for i, v in enumerate(op.ins) if keeps(op, i)]
        kept += list(op.outs) if op.rule.saves_output else []
        for value in kept:
            root = roots[value]
            if root not in weights and value not in weights and root not in owners:
                owners[root] = value
    return {value: root for root, value in owners.items()}


def keeps(op: Op, position: int) -> bool:
    """Does the backward of `op` read its input at `position`?"""
    if position not in op.rule.saves:
        return False
    name = str(op.node.target).removeprefix("aten.").partition(".")[0]
    if name in PRODUCTS:
        return any(g for i, g in enumerate(op.in_grads) if i != position)
    return any(op.in_grads)


def storage_roots(analysis: Analysis) -> dict[str, str]:
    """Value -> the value whose memory it shares through views of equal size."""
    roots: dict[str, str] = {v: v for v in analysis.parts}
    for op in analysis.ops.values():
        if op.rule.view and op.ins:
            source = roots[op.ins[0]]
            size = math.prod(analysis.parts[source].shape)
            for out in op.outs:
                if math.prod(analysis.parts[out].shape) == size:
                    roots[out] = source
    return roots
