"""Everything the rules say about one program: for each op its rule, its operands, its factors and which values take a
gradient.

What enters: a normalised `Program`. What leaves: an `Analysis`, the common ground of pricing, planning and rewriting.
Values are named: a node with one tensor by its name, output i of a node with several as `name.i`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from autopar.errors import UnsupportedOpError
from autopar.layout import Parts
from autopar.program import Program, record, tensors_of
from autopar.rules import rule_of, whole_rule
from autopar.rules.call import is_getitem, tensor_inputs
from autopar.rules.refine import Factor, Operands, refine
from autopar.rules.rule import Rule
from autopar.user_function import op_text

STOPS_GRADIENT = frozenset(
    {
        "detach",
        "argmax",
        "argmin",
        "bernoulli",
        "rand_like",
        "randn_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "sign",
    }
)


@dataclass(frozen=True, eq=False)
class Op:
    """One op call. `ins` and `outs` name values; `in_grads`/`out_grads` say which of them take a gradient."""

    node: Node
    rule: Rule
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    factors: tuple[Factor, ...]
    in_grads: tuple[bool, ...]
    out_grads: tuple[bool, ...]
    has_rule: bool

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def by_name(self) -> dict[str, Factor]:
        return {f.name: f for f in self.factors}


@dataclass(frozen=True, eq=False)
class Analysis:
    program: Program
    ops: Mapping[str, Op]
    """By node name, in graph order."""
    parts: Mapping[str, Parts]
    """By value name."""
    dtypes: Mapping[str, torch.dtype]
    grads: Mapping[str, bool]
    """Does this value take a gradient?"""
    notes: tuple[str, ...] = ()
    """What a person should know of how the rules were found."""

    @cached_property
    def users(self) -> dict[str, list[tuple[str, int]]]:
        """Value -> (op, input position) that read it; the graph's outputs are not among them."""
        found: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for op in self.ops.values():
            for position, value in enumerate(op.ins):
                found[value].append((op.name, position))
        return found

    @cached_property
    def classes(self) -> dict[tuple[str, int], int]:
        """(value, flat part) -> number of its class: parts tied by the factors of the ops between them."""
        parent: dict[tuple[str, int], tuple[str, int]] = {}

        def find(x: tuple[str, int]) -> tuple[str, int]:
            while parent.setdefault(x, x) != x:
                parent[x] = parent[parent[x]]
                x = parent[x]
            return x

        for op in self.ops.values():
            for factor in op.factors:
                places = [
                    (v, p) for v, p in zip((*op.ins, *op.outs), (*factor.ins, *factor.outs), strict=True) if p >= 0
                ]
                root = find(places[0])
                for place in places[1:]:
                    parent[find(place)] = root
        numbers: dict[tuple[str, int], int] = {}
        return {place: numbers.setdefault(find(place), len(numbers)) for place in list(parent)}

    def factor_class(self, op: Op, factor: Factor) -> int:
        """The class of the parts a factor cuts."""
        value, part = next(
            (v, p) for v, p in zip((*op.ins, *op.outs), (*factor.ins, *factor.outs), strict=True) if p >= 0
        )
        return self.classes[value, part]


def value_of(node: Node) -> str:
    """Name of the value of a node with one tensor."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, Node)
        return f"{source.name}.{index}"
    return node.name


def value_names(node: Node) -> tuple[str, ...]:
    """Names of all values of a node."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return (value_of(node),)
    return tuple(f"{node.name}.{i}" for i, _ in enumerate(tensors_of(node)))


def analyse(program: Program, *, rules: Callable[[Node], Rule | None] = rule_of, strict: bool = False) -> Analysis:
    """Look up every op's rule and refine the parts of all values.

    Raises:
        UnsupportedOpError: strict, and an op has no rule; names it and the user's line.
    """
    found: dict[str, Rule] = {}
    operands: dict[str, Operands] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    grads: dict[str, bool] = {}
    ruled: set[str] = set()
    nodes: dict[str, Node] = {}
    by_node = program.by_node
    for node in program.graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        values = tensors_of(node)
        names = value_names(node)
        for name, value in zip(names, values, strict=True):
            shapes[name], dtypes[name] = tuple(value.shape), value.dtype
        if node.op == "placeholder":
            for name, value in zip(names, values, strict=True):
                source = by_node[node.name]
                grads[name] = source.trainable or (source.kind == "input" and value.requires_grad)
            continue
        ins = tuple(value_of(n) for n in tensor_inputs(node))
        rule = rules(node)
        if rule is not None:
            ruled.add(node.name)
        elif strict:
            raise UnsupportedOpError(
                f"{record(node).where or node.name}: {op_text(node)} has no rule, so it would be kept whole; "
                "register one with autopar.register_rule, or pass strict=False"
            )
        takes = any(grads[v] for v in ins) and _name(node) not in STOPS_GRADIENT
        for name, value in zip(names, values, strict=True):
            grads[name] = takes and (value.dtype.is_floating_point or value.dtype.is_complex)
        found[node.name] = rule if rule is not None else whole_rule(node)
        operands[node.name] = Operands(ins, names)
        nodes[node.name] = node
    refined = refine(found, operands, shapes)
    ops = {
        name: Op(
            nodes[name], found[name], operands[name].ins, operands[name].outs, refined.factors[name],
            tuple(grads[v] for v in operands[name].ins), tuple(grads[v] for v in operands[name].outs), name in ruled,
        )
        for name in found
    }  # fmt: skip
    return Analysis(program, ops, refined.parts, dtypes, grads)


def _name(node: Node) -> str:
    return str(getattr(node.target, "_schema", node).name).split("::")[-1]
