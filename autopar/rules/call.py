"""One op call as the rules see it: its tensors in order, their shapes, and its plain arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.program import tensors_of


def tensor_inputs(node: Node) -> tuple[Node, ...]:
    """The tensor-valued nodes among a call's arguments, in order, one for each appearance."""
    flat = pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return tuple(a for a in flat if isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor))


def is_getitem(node: Node) -> bool:
    """Does this node take one value out of an op with several outputs?"""
    return node.op == "call_function" and node.target is operator.getitem


@dataclass(frozen=True, slots=True)
class Call:
    """`node` is an `OpOverload` call. Shapes and dtypes are those of the whole (unsplit) tensors."""

    node: Node

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(n.meta["val"] for n in tensor_inputs(self.node))

    @property
    def in_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in self.inputs]

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in tensors_of(self.node)]

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument by its schema name, positional or by keyword."""
        for position, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                if name in self.node.kwargs:
                    return self.node.kwargs[name]
                if position < len(self.node.args):
                    return self.node.args[position]
                return argument.default_value if argument.has_default_value() else default
        return default

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor argument `name`, None when it is absent."""
        value = self.arg(name)
        return tuple(value.meta["val"].shape) if isinstance(value, Node) else None

    def named_inputs(self) -> Iterator[str]:
        """For each tensor input the schema name of the argument it came in."""
        for position, argument in enumerate(self.target._schema.arguments):
            value = self.node.kwargs.get(
                argument.name, self.node.args[position] if position < len(self.node.args) else None
            )
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), torch.Tensor):
                    yield argument.name
