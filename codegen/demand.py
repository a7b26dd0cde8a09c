"""What an op asks of the loops of a kernel, and whether it can be in one at all.

Enters: a node. Leaves: its `Demand`. Refused (`Unfusable`): a reduction that is over neither a row nor all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.codegen import composites, constants, rows
from autopar.codegen.formulas import POINTWISE
from autopar.codegen.views import given, packet, shape_of

RULES = {**composites.RULES, **rows.RULES, **constants.RULES}


class Unfusable(Exception):
    """An op that the printer does not know, or a group that has no common grid; the message says which."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a node asks of the loops: so many elements, cut into rows of `columns` (None: any cut)."""

    elements: int
    columns: int | None = None


def known(node: Node) -> bool:
    """Is there a formula for this op? (A group of it may still be refused.)"""
    return (
        node.op == "call_function"
        and (packet(node) in POINTWISE or packet(node) in RULES or packet(node) in composites.SUMS)
        and not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
    )


def demand(node: Node) -> Demand:
    """Raises: Unfusable: a reduction that is over neither a row nor all rows; a value without elements."""
    name = packet(node)
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    if any(isinstance(v, torch.Tensor) and not v.numel() for v in values):
        raise Unfusable(f"{name} of no elements")
    if name in composites.SUMS:
        source = given(node)[0]
        shape = shape_of(source)
        if not shape or (node.meta["val"].dtype == torch.bool):
            raise Unfusable(f"{name} of one number, or of truth values")
        columns = math.prod(shape[len(shape) - composites.suffix(node) :]) if composites.suffix(node) else 0
        if not columns and composites.prefix(node):
            columns = math.prod(shape[composites.prefix(node) :])
        if not columns and composites.short(node):
            return Demand(math.prod(shape_of(node)))
        if not columns:
            raise Unfusable(f"{name} of {shape}: neither over the last dims nor over the first")
        return Demand(math.prod(shape), columns)
    columns = rows.columns(node)
    if columns:
        shape = shape_of(rows.main_input(node))
        return Demand(math.prod(shape), columns)
    if name == "cat":
        return Demand(math.prod(shape_of(node)))
    value = node.meta["val"]
    return Demand(value.numel() if isinstance(value, torch.Tensor) else 0)
