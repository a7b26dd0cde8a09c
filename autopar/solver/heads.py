"""Products whose results a cross entropy alone reads: logits that can be made a few rows at a time.

Enters: an `Analysis`. Leaves: for each such product the values between it and its loss. The same heads that
`passes/chunk_loss.py` finds in the joint graph, known before there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.rules.analyse import Analysis, Op, value_of

LOSS_CHUNKS = 8
"""[derived] chunks that the planner takes where memory wants it: an eighth of the logits is less than what a block
keeps, and each chunk still has the rows to fill a GPU."""
CASTS = ("to", "_to_copy", "float")


@dataclass(frozen=True, slots=True)
class Head:
    """product, loss: names of ops. values: the logits under all their names."""

    product: str
    loss: str
    values: frozenset[str]


def heads_of(analysis: Analysis) -> Mapping[str, Head]:
    """By the product, and by the loss."""
    results = {value_of(r) for r in pytree.tree_leaves(analysis.program.output.args[0]) if isinstance(r, Node)}
    found: dict[str, Head] = {}
    for op in analysis.ops.values():
        if _name(op) == "cross_entropy_loss" and any(op.in_grads):
            head = _above(analysis, op, results)
            if head is not None:
                found[head.product] = found[head.loss] = head
    return found


def _above(analysis: Analysis, loss: Op, results: set[str]) -> Head | None:
    """The product above a loss, through views and casts that nothing else reads."""
    values = []
    value = loss.ins[0]
    while value not in results and len(analysis.users.get(value, ())) == 1:
        values.append(value)
        maker = analysis.ops.get(value.partition(".")[0])
        if maker is None:
            return None
        if maker.rule.flop:
            product = _name(maker) in ("linear", "mm", "addmm", "matmul")
            return Head(maker.name, loss.name, frozenset(values)) if product else None
        if not maker.rule.view and _name(maker) not in CASTS:
            return None
        value = maker.ins[0]
    return None


def _name(op: Op) -> str:
    return str(op.node.target).removeprefix("aten.").partition(".")[0]
