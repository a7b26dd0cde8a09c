"""Factor rules: for each op, which dims of its tensors are one loop that can be split.

`rule_of(node)` is the way in. An op without a rule is kept whole: `whole_rule` gives its tensors no factors.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload
from torch.fx import Node

from autopar.rules import attention, contraction, indexing, loss, norm, pointwise, reduction, view
from autopar.rules.call import Call
from autopar.rules.rule import Rule

FAMILIES: tuple[dict[str, Callable[[Call], Rule | None]], ...] = (
    view.RULES,
    contraction.RULES,
    reduction.RULES,
    attention.RULES,
    indexing.RULES,
    loss.RULES,
    norm.RULES,
)
TABLE: dict[str, Callable[[Call], Rule | None]] = {name: build for family in FAMILIES for name, build in family.items()}
"""By op packet name, any overload."""


def rule_of(node: Node) -> Rule | None:
    """The rule of a call node; None when there is none (the op is then kept whole)."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    call = Call(node)
    build = TABLE.get(pointwise.packet(call))
    found = build(call) if build is not None else None
    if found is None and build is None and pointwise.is_pointwise(call):
        found = pointwise.pointwise(call)
    return found


def whole_rule(node: Node) -> Rule:
    """No factors: the op runs whole on every rank."""
    call = Call(node)
    return Rule(tuple(((),) * len(s) for s in call.in_shapes), tuple(((),) * len(s) for s in call.out_shapes), {}, saves=tuple(range(len(call.inputs))))
