"""Ops made of several steps: activations with options and their backwards, plain reductions.

RULES: rule(builder, node, item, at) gives the step that holds the element at `at` of the op's result.
SUMS: plain reductions, over the columns of a kernel or over its rows.
Source of the formulas: the definitions in PyTorch's documentation; gradients derived from them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from autopar.codegen.formulas import POINTWISE, POWERS, SLOPES
from autopar.codegen.index import ZERO, Index, NotLinear
from autopar.codegen.kernel import KINDS
from autopar.codegen.views import At, argument, given, packet, shape_of

if TYPE_CHECKING:
    from autopar.codegen.build import _Builder

SUMS: Mapping[str, str] = {"sum": "sum", "mean": "sum", "amax": "amax", "amin": "amin"}
"""Plain reductions, and how they reduce."""
ROUNDINGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Formulas of casts to half precision, which round. What is computed in half precision is float32 in a kernel."""
FEW = 8
"""[derived] numbers that a short reduction is over: as many key heads to a query head as most models have."""
_JOINS = {"sum": "add", "amax": "maximum", "amin": "minimum"}


def _kind(node: Node) -> str:
    return KINDS[node.meta["val"].dtype]


def _dims(node: Node) -> list[int]:
    """The reduced dims of a plain reduction, rising."""
    rank = len(shape_of(given(node)[0]))
    dims = argument(node, 1, "dim")
    overload = str(node.target).rpartition(".")[2]
    if (overload == "default" and packet(node) in ("sum", "mean")) or not dims:
        return list(range(rank))
    return sorted(d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def suffix(node: Node) -> int:
    """How many last dims a plain reduction is over; 0 when it is not over the last ones."""
    rank, dims = len(shape_of(given(node)[0])), _dims(node)
    return len(dims) if dims == list(range(rank - len(dims), rank)) else 0


def prefix(node: Node) -> int:
    """How many first dims a sum is over; 0 when it is not over the first ones, or over all."""
    rank, dims = len(shape_of(given(node)[0])), _dims(node)
    return len(dims) if packet(node) == "sum" and dims == list(range(len(dims))) and len(dims) < rank else 0


def short(node: Node) -> bool:
    """Is a plain reduction over so few numbers, neither the last dims nor the first, that each result can read them
    itself? (The gradients of a key or value that several heads share.)"""
    if packet(node) not in SUMS or suffix(node) or prefix(node):
        return False
    return math.prod(shape_of(given(node)[0])[d] for d in _dims(node)) <= FEW


def _short(b: _Builder, node: Node, at: At) -> int:
    """One number after the other: each lies at its own place."""
    source, dims, kind = given(node)[0], _dims(node), _kind(node)
    shape = shape_of(source)
    rest = iter(at if len(shape_of(node)) < len(shape) else [i for d, i in enumerate(at) if d not in dims])
    kept = {d: next(rest) for d in range(len(shape)) if d not in dims}
    found = None
    for places in itertools.product(*(range(shape[d]) for d in dims)):
        fixed = {d: Index((), i) for d, i in zip(dims, places, strict=True)}
        value = b.value(source, tuple(fixed.get(d, kept.get(d, ZERO)) for d in range(len(shape))), kind)
        found = value if found is None else b.emit(_JOINS[SUMS[packet(node)]], found, value, kind=kind)
    assert found is not None
    count = float(math.prod(shape[d] for d in dims))
    return b.emit("div", found, count, kind=kind) if packet(node) == "mean" else found


def _plain(b: _Builder, node: Node, item: int, at: At) -> int:
    source, count = given(node)[0], suffix(node)
    if short(node):
        return _short(b, node, at)
    if not count:
        raise NotLinear(f"{packet(node)} over dims {_dims(node)} is read in the kernel that makes it")
    shape, kind = shape_of(source), _kind(node)
    keeps = len(shape_of(node)) == len(shape)
    rows = at[: len(at) - count] if keeps else at
    found = b.row(SUMS[packet(node)], shape, count, rows, lambda i: b.value(source, i, kind))
    return b.emit("div", found, float(math.prod(shape[-count:])), kind=kind) if packet(node) == "mean" else found


# pointwise, from the table and with options


def pointwise(b: _Builder, node: Node, at: At) -> int:
    """An op of `formulas.POINTWISE`."""
    name, kind = packet(node), _kind(node)
    rule = POINTWISE[name]
    if node.kwargs.get("rounding_mode") is not None:
        raise NotLinear(f"{name} with rounding")
    args = [argument(node, i, _NAMES[i]) for i in rule.args]
    wanted = kind
    common = None
    if rule.compares:
        common = torch.result_type(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
        wanted = KINDS.get(common, "f32")
        args = [a if isinstance(a, Node) else torch.tensor(a).to(common).item() for a in args]
    elif name.startswith("logical"):
        wanted = "i1"
    elif kind == "i1" and rule.formula not in ("same", "and", "or", "xor", "where", "not"):
        raise NotLinear(f"{name} of truth values")
    elif kind in ("i32", "i64") and rule.formula not in _WHOLE:
        raise NotLinear(f"{name} of integers")
    steps = [_operand(b, a, at, "i1" if rule.formula == "where" and i == 0 else wanted) for i, a in enumerate(args)]
    for i, arg in enumerate(args):
        if common in ROUNDINGS and isinstance(arg, Node) and arg.meta["val"].dtype != common:
            steps[i] = b.emit(ROUNDINGS[common], steps[i], kind="f32")  # a single number, compared as the others are
    alpha: Any = argument(node, 2, "alpha", 1) if rule.alpha else 1
    if alpha != 1:
        steps[1] = b.emit("mul", steps[1], b.literal(alpha, wanted), kind=wanted)
    if rule.formula == "same":
        dtype = node.meta["val"].dtype
        narrows = dtype in ROUNDINGS and args[0].meta["val"].dtype != dtype
        return b.emit(ROUNDINGS[dtype], steps[0], kind="f32") if narrows else steps[0]
    if rule.compares or rule.formula == "not":
        return b.compare(rule.formula, *steps)
    return b.emit(rule.formula, *steps, kind=kind)


_NAMES = ("self", "other", "value")
_WHOLE = frozenset("same add sub mul neg abs square where maximum minimum and or xor relu".split())
"""Formulas that hold for integers."""


def _operand(b: _Builder, arg: Any, at: At, kind: str) -> int:
    if not isinstance(arg, Node):
        if arg is None:
            raise NotLinear("an argument that is left out")
        return b.literal(arg, kind)
    shape = shape_of(arg)
    aligned = at[len(at) - len(shape) :]
    return b.value(arg, tuple(ZERO if n == 1 else i for i, n in zip(aligned, shape, strict=True)), kind)


def _power(b: _Builder, node: Node, item: int, at: At) -> int:
    exponent, kind = given(node)[1], _kind(node)
    if not isinstance(exponent, (int, float)) or exponent not in POWERS or kind[0] == "i":
        raise NotLinear(f"pow by {exponent}")
    value = _operand(b, given(node)[0], at, kind)
    return value if exponent == 1 else b.emit(POWERS[exponent], value, kind=kind)


def _slope(b: _Builder, node: Node, item: int, at: At) -> int:
    """gradient x slope(value)."""
    formula, place = SLOPES[packet(node)]
    if packet(node) == "gelu_backward" and node.kwargs.get("approximate") == "tanh":
        formula = "gelu_tanh_slope"
    kind = _kind(node)
    grad, value = _operand(b, given(node)[0], at, kind), _operand(b, given(node)[place], at, kind)
    return b.emit("mul", grad, b.emit(formula, value, kind=kind), kind=kind)


def _gelu(b: _Builder, node: Node, item: int, at: At) -> int:
    formula = "gelu_tanh" if argument(node, 1, "approximate", "none") == "tanh" else "gelu"
    return b.emit(formula, _operand(b, given(node)[0], at, _kind(node)), kind=_kind(node))


def _threshold_backward(b: _Builder, node: Node, item: int, at: At) -> int:
    kind = _kind(node)
    grad, value = _operand(b, given(node)[0], at, kind), _operand(b, given(node)[1], at, kind)
    zero = b.compare("le", value, b.literal(given(node)[2], kind))
    return b.emit("where", zero, b.literal(0, kind), grad, kind=kind)


def _clamp(b: _Builder, node: Node, item: int, at: At) -> int:
    kind = _kind(node)
    value = _operand(b, given(node)[0], at, kind)
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if low is not None:
        value = b.emit("maximum", value, _operand(b, low, at, kind), kind=kind)
    return value if high is None else b.emit("minimum", value, _operand(b, high, at, kind), kind=kind)


def _leaky(b: _Builder, node: Node, item: int, at: At) -> int:
    kind = _kind(node)
    value = _operand(b, given(node)[0], at, kind)
    positive = b.compare("gt", value, b.literal(0, kind))
    scaled = b.emit("mul", value, float(argument(node, 1, "negative_slope", 0.01)), kind=kind)
    return b.emit("where", positive, value, scaled, kind=kind)


def _softplus(b: _Builder, node: Node, item: int, at: At) -> int:
    if argument(node, 1, "beta", 1) != 1:
        raise NotLinear("softplus with beta")
    kind = _kind(node)
    value = _operand(b, given(node)[0], at, kind)
    linear = b.compare("gt", value, b.literal(argument(node, 2, "threshold", 20), kind))
    return b.emit("where", linear, value, b.emit("softplus", value, kind=kind), kind=kind)


def _addc(formula: str) -> Callable[..., int]:
    def rule(b: _Builder, node: Node, item: int, at: At) -> int:
        kind = _kind(node)
        x, y, z = (_operand(b, a, at, kind) for a in given(node)[:3])
        joined = b.emit(formula, y, z, kind=kind)
        scale = float(argument(node, 3, "value", 1))
        return b.emit("add", x, joined if scale == 1 else b.emit("mul", joined, scale, kind=kind), kind=kind)

    return rule


RULES: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(SLOPES, _slope),
    **dict.fromkeys(SUMS, _plain),
    "pow": _power,
    "gelu": _gelu,
    "threshold_backward": _threshold_backward,
    "clamp": _clamp,
    "leaky_relu": _leaky,
    "softplus": _softplus,
    "addcmul": _addc("mul"),
    "addcdiv": _addc("div"),
}
