"""Which values autograd keeps from the forward for the backward.

An op keeps what its rule says: for products an input when *another* input takes a gradient, for others an input or the
output when anything does. A view shares its input's memory, so a chain of views is charged once, where it is first
kept. Where the backward runs an op again, its result is not kept but what it is made of is: the same walk that
`passes/lower.py` makes over the joint graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.rules.analyse import Analysis, Op, value_of

PRODUCTS = frozenset(
    "mul linear matmul mm bmm mv dot addmm baddbmm embedding index gather masked_fill where outer einsum div".split()
)
"""Ops whose derivative by one input needs only the other inputs."""


def saved_values(
    analysis: Analysis,
    weights: frozenset[str],
    again: frozenset[str] = frozenset(),
    blocks: Mapping[str, str] | None = None,
) -> Mapping[str, bool]:
    """Values charged, and for each: is it made again in the backward, so that it lives one block at a time?

    Args:    weights: values stored anyway, never charged. again: ops that the backward runs again.
             blocks: the block of each op that has one; what another block reads is saved, not made again.
    """
    roots = storage_roots(analysis)
    charged: dict[str, str] = {}
    for op in analysis.ops.values():
        if any(op.out_grads):
            kept = [v for i, v in enumerate(op.ins) if keeps(op, i)]
            for value in [*kept, *(op.outs if op.rule.saves_output else ())]:
                if value not in weights:
                    charged.setdefault(roots[value], value)
    leaving = _leaving(analysis, roots, blocks or {})
    found: dict[str, bool] = {}
    seen, stack = set(weights), list(charged)
    while stack:
        root = stack.pop()
        if root in seen:
            continue
        seen.add(root)
        maker = analysis.ops.get(root.partition(".")[0])
        made_again = maker is not None and maker.name in again and root not in leaving
        if made_again and maker is not None:
            stack += [roots[v] for v in maker.ins if v.partition(".")[0] in analysis.ops]
        if root in charged or not made_again:  # what is only passed through on the way is freed at once
            found[charged.get(root, root)] = made_again
    return found


def _leaving(analysis: Analysis, roots: Mapping[str, str], blocks: Mapping[str, str]) -> set[str]:
    """Memory that another block reads, or that is an output."""
    found = set()
    for value, root in roots.items():
        home = blocks.get(root.partition(".")[0])
        if any(blocks.get(reader) != home for reader, _ in analysis.users.get(value, ())):
            found.add(root)
    results = pytree.tree_leaves(analysis.program.output.args[0])
    return found | {roots[value_of(r)] for r in results if isinstance(r, Node)}


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
