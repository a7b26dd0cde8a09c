"""Pointwise ops: every output element depends on the input elements at its place. One rule for all of them."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Rule, parse

IDENTITY = frozenset("alias clone contiguous lift_fresh_copy detach".split())
"""Copies and renames of one tensor."""

EXTRA = IDENTITY | frozenset(
    "to _to_copy type_as dropout native_dropout zeros_like ones_like full_like empty_like masked_fill fill complex prelu float half double"
    " __and__ __or__ __xor__ __lshift__ __rshift__ where isfinite isinf isreal square rsub feature_dropout alpha_dropout".split()
)
"""Pointwise ops that torch does not tag as such (those made of other ops, mostly)."""

LINEAR_ANY = IDENTITY | frozenset("neg to _to_copy type_as float half double mul div real imag".split())
"""Linear in their one tensor input, whatever plain numbers stand beside it."""
LINEAR_TOGETHER = frozenset("add sub rsub".split())
"""Linear in all tensor inputs together; a plain number is an offset and breaks it."""
LINEAR_FIRST = frozenset("div".split())
LINEAR_EACH = frozenset("mul".split())

NEEDS_NOTHING = IDENTITY | frozenset("neg to _to_copy type_as add sub rsub float half double".split())
NEEDS_OUTPUT = frozenset("exp tanh sigmoid relu rsqrt sqrt reciprocal".split())


def packet(call: Call) -> str:
    """`aten.add.Tensor` -> `add`."""
    return call.target._schema.name.split("::")[-1]


def is_pointwise(call: Call) -> bool:
    return torch.Tag.pointwise in call.target.tags or packet(call) in EXTRA


def pointwise(call: Call) -> Rule | None:
    """`..., ... -> ...`, broadcasting."""
    outs = call.out_shapes
    if not outs or not call.inputs or any(o != outs[0] for o in outs):
        return None
    tensors = ", ".join("..." for _ in call.inputs)
    ins, out_dims, sizes = parse(f"{tensors} -> {', '.join('...' for _ in outs)}", call.in_shapes, outs)
    name, n = packet(call), len(call.inputs)
    saves: tuple[int, ...] = () if name in NEEDS_NOTHING or name in NEEDS_OUTPUT else tuple(range(n))
    if name in LINEAR_EACH | LINEAR_FIRST and n == 1:
        saves = ()
    return Rule(ins, out_dims, sizes, linear=_linear(call, name, n), saves=saves, saves_output=name in NEEDS_OUTPUT)


def _linear(call: Call, name: str, n: int) -> tuple[frozenset[int], ...]:
    every = frozenset(range(n))
    if name in LINEAR_TOGETHER:
        return (every,) if n == 2 else ()
    if name in LINEAR_EACH and n == 2:
        return (frozenset({0}), frozenset({1}))
    if name == "div":
        rounded = call.arg("rounding_mode") is not None
        numerator_only = n == 1 and not isinstance(call.arg("self"), Node)
        return () if rounded or numerator_only else (frozenset({0}),)
    if name in LINEAR_ANY:
        return (every,) if n == 1 else (frozenset({0}),) if name == "type_as" else ()
    return ()

