"""Factor rules: for each op, which dims of its tensors are one loop that can be split.

`rule_of(node)` is the way in. An op without a rule is kept whole: `whole_rule` gives its tensors no factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autopar.rules import (
    attention,
    batched,
    contraction,
    conv,
    indexing,
    loss,
    norm,
    pieces,
    pointwise,
    pooling,
    random,
    recurrent,
    reduction,
    scan,
    scatter,
    shift,
    softmax,
    variance,
    view,
)
from autopar.rules.call import Call
from autopar.rules.dims import sums_survive
from autopar.rules.register import has_linear_backward, register_rule, registered_rule
from autopar.rules.rule import Rule

FAMILIES: tuple[dict[str, Callable[[Call], Rule | None]], ...] = (
    view.RULES,
    scatter.RULES,
    variance.RULES,
    softmax.RULES,
    scan.RULES,
    pointwise.RULES,
    shift.RULES,
    pieces.RULES,
    contraction.RULES,
    conv.RULES,
    reduction.RULES,
    attention.RULES,
    indexing.RULES,
    loss.RULES,
    norm.RULES,
    pooling.RULES,
    recurrent.RULES,
    batched.RULES,
    random.RULES,
)
TABLE: dict[str, Callable[[Call], Rule | None]] = {name: build for family in FAMILIES for name, build in family.items()}
"""By op packet name, any overload; ops of our own with their namespace."""


def rule_of(node: Node) -> Rule | None:
    """The rule of a call node; None when there is none (the op is then kept whole)."""
    registered = registered_rule(node)
    if registered is not None:
        return registered
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "autopar"):
        return None
    if node.target._schema.is_mutable:
        return None  # capture has written in-place calls as new values; what still writes is not split
    call = Call(node)
    if (
        not call.inputs
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and node.target.namespace == "aten"
    ):
        return Rule((), tuple(((),) * len(s) for s in call.out_shapes), {})  # a factory: each rank makes all of it
    build = TABLE.get(node.target._schema.name.removeprefix("aten::"))
    found = build(call) if build is not None else None
    if found is None and build is None and pointwise.is_pointwise(call):
        found = pointwise.pointwise(call)
    if found is not None and found.linear:
        found = replace(found, linear=tuple(partial for partial in found.linear if sums_survive(call, partial)))
    return found


def whole_rule(node: Node) -> Rule:
    """No factors: the op runs whole on every rank."""
    call = Call(node)
    return Rule(
        tuple(((),) * len(s) for s in call.in_shapes),
        tuple(((),) * len(s) for s in call.out_shapes),
        {},
        saves=tuple(range(len(call.inputs))),
        linear_backward=has_linear_backward(node),
    )


__all__ = ["FAMILIES", "TABLE", "register_rule", "rule_of", "whole_rule"]
