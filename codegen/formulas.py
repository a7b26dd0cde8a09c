"""The formulas of pointwise ops: Triton text with {0}, {1}, ... for the arguments.

FORMULAS says how a step of a kernel is printed; POINTWISE which formula an ATen op is, and what its arguments are.
Half-precision values are float32 inside a kernel, so formulas exist for float32, float64, integers and booleans only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = {"f32": "tl.float32", "f64": "tl.float64", "i32": "tl.int32", "i64": "tl.int64", "i1": "tl.int1"}
_LEAST = {"f32": 'float("-inf")', "f64": 'float("-inf")', "i32": "-2147483648", "i64": "-9223372036854775808"}
_MOST = {"f32": 'float("inf")', "f64": 'float("inf")', "i32": "2147483647", "i64": "9223372036854775807"}
NEUTRAL: Mapping[str, Mapping[str, str]] = {
    "sum": dict.fromkeys(_LEAST, "0"),
    "max": _LEAST,
    "amax": _LEAST,
    "amin": _MOST,
}
"""What changes nothing, by the reduction and the kind."""

FORMULAS: Mapping[str, str] = {
    "same": "{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "square": "{0} * {0}",
    "cube": "{0} * {0} * {0}",
    "reciprocal": "1.0 / {0}",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "tanh": "tanh({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "relu": "tl.where({0} < 0, 0, {0})",  # a NaN stays one, and -0
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "where": "tl.where({0}, {1}, {2})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "{0} == 0",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "0.5 * {0} * (1.0 + tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))",
    "gelu_slope": (
        "0.5 * (1.0 + tl.erf({0} * 0.7071067811865476)) + {0} * 0.3989422804014327 * tl.exp(-0.5 * {0} * {0})"
    ),
    "gelu_tanh_slope": ("gelu_slope({0}, tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))"),
    "silu_slope": "silu_slope({0}, 1.0 / (1.0 + tl.exp(-{0})))",
    "sigmoid_slope": "{0} * (1.0 - {0})",
    "tanh_slope": "1.0 - {0} * {0}",
    "softplus": "tl.maximum({0}, 0.0) + log1p(tl.exp(-tl.abs({0})))",
    "log1p": "log1p({0})",
    "expm1": "expm1({0})",
    "kept": "tl.where({0} >= {1}, {2}, 0.0)",
    "f32": "{0}.to(tl.float32)",
    "f64": "{0}.to(tl.float64)",
    "i32": "{0}.to(tl.int32)",
    "i64": "{0}.to(tl.int64)",
    "i1": "{0} != 0",
    "bf16": "{0}.to(tl.bfloat16).to(tl.float32)",
    "fp16": "{0}.to(tl.float16).to(tl.float32)",
}
"""By name: how it is printed."""

HELPERS: Mapping[str, str] = {
    "tanh": '''
@triton.jit
def tanh(x):
    """Near 0, where 1 - 2 / (e^2x + 1) cancels, its series."""
    y = x * x
    near = x * (1 + y * (-0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397
               + y * (0.021869488536155203 + y * -0.008863235529902197)))))
    return tl.where(tl.abs(x) < 0.125, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
''',
    "gelu_slope": '''
@triton.jit
def gelu_slope(x, t):
    """The derivative of the tanh form of GELU at x; t is its tanh."""
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
''',
    "silu_slope": '''
@triton.jit
def silu_slope(x, s):
    """The derivative of x sigmoid(x); s is the sigmoid."""
    return s * (1.0 + x * (1.0 - s))
''',
    "log1p": '''
@triton.jit
def log1p(x):
    """Exact to rounding near 0: the error of 1 + x is divided out."""
    u = 1.0 + x
    near = tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, near))
''',
    "expm1": '''
@triton.jit
def expm1(x):
    """Near 0 its series, elsewhere e^x - 1."""
    near = x * (1 + x * (0.5 + x * (0.16666666666666666 + x * (0.041666666666666664 + x * (0.008333333333333333
               + x * (0.001388888888888889 + x * (0.0001984126984126984 + x * (2.48015873015873e-05
               + x * (2.7557319223985893e-06 + x * (2.755731922398589e-07 + x * 2.505210838544172e-08))))))))))
    return tl.where(tl.abs(x) < 0.25, near, tl.exp(x) - 1.0)
''',
    "row_amax": '''
@triton.jit
def row_amax(x):
    """The largest number of each row; NaN where there is one."""
    lost = tl.max((x != x).to(tl.int32), axis=1, keep_dims=True)
    return tl.where(lost > 0, float("nan"), tl.max(x, axis=1, keep_dims=True))
''',
    "row_amin": '''
@triton.jit
def row_amin(x):
    """The least number of each row; NaN where there is one."""
    lost = tl.max((x != x).to(tl.int32), axis=1, keep_dims=True)
    return tl.where(lost > 0, float("nan"), tl.min(x, axis=1, keep_dims=True))
''',
    "random_bits": '''
@triton.jit
def random_bits(index, k0, k1):
    """32 bits of a counter-based generator; the upper half is good."""
    x = index.to(tl.uint32, bitcast=True) * 0x9E3779B1 + k0.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D + k1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x.to(tl.int32, bitcast=True)
''',
}
"""Functions that formulas call, printed above the kernel that needs them."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """formula: applied to the tensors and numbers at these places of the op's arguments. compares: its arguments have
    a kind of their own, not the result's. alpha: the second argument is first multiplied by that keyword."""

    formula: str
    args: tuple[int, ...] = (0,)
    compares: bool = False
    alpha: bool = False


def _unary(*names: str) -> dict[str, Pointwise]:
    return {name: Pointwise(name) for name in names}


POINTWISE: Mapping[str, Pointwise] = {
    **_unary("abs", "neg", "reciprocal", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor"),
    **_unary("ceil", "tanh", "sigmoid", "relu", "silu", "square", "sign", "log1p", "expm1"),
    "clone": Pointwise("same"),
    "_to_copy": Pointwise("same"),
    "add": Pointwise("add", (0, 1), alpha=True),
    "sub": Pointwise("sub", (0, 1), alpha=True),
    "rsub": Pointwise("sub", (1, 0), alpha=True),
    "mul": Pointwise("mul", (0, 1)),
    "div": Pointwise("div", (0, 1)),
    "maximum": Pointwise("maximum", (0, 1)),
    "minimum": Pointwise("minimum", (0, 1)),
    "where": Pointwise("where", (0, 1, 2)),
    "masked_fill": Pointwise("where", (1, 2, 0)),
    "bitwise_and": Pointwise("and", (0, 1)),
    "bitwise_or": Pointwise("or", (0, 1)),
    "bitwise_xor": Pointwise("xor", (0, 1)),
    "logical_and": Pointwise("and", (0, 1)),
    "logical_or": Pointwise("or", (0, 1)),
    "logical_not": Pointwise("not"),
    "bitwise_not": Pointwise("not"),
    **{name: Pointwise(name, (0, 1), compares=True) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
"""By ATen op (the overload packet's name)."""

SLOPES: Mapping[str, tuple[str, int]] = {
    "silu_backward": ("silu_slope", 1),
    "sigmoid_backward": ("sigmoid_slope", 1),
    "tanh_backward": ("tanh_slope", 1),
    "gelu_backward": ("gelu_slope", 1),
}
"""Backwards of the form gradient x slope(value): the slope's formula, and which argument the value is."""

POWERS: Mapping[float, str] = {1: "same", 2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
"""Exponents that have a formula; a general power of a negative number has none."""


def helpers_of(text: str) -> list[str]:
    """The helper functions that a printed kernel calls; none calls another."""
    return [body.strip("\n") for name, body in HELPERS.items() if re.search(rf"\b{name}\(", text)]


def reduction(how: str, value: str, kind: str) -> str:
    """The text of a reduction of each row of a tile. A softmax's maximum may lose a NaN, which its sum keeps."""
    if how in ("amax", "amin") and kind[0] == "f":
        return f"row_{how}({value})"
    return f"tl.{how.removeprefix('a')}({value}, axis=1, keep_dims=True)"


def literal(value: Any, kind: str) -> str:
    """A number as Triton text."""
    if kind == "i1":
        return str(bool(value))
    if kind[0] == "i":
        return str(int(value))
    number = float(value)
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    # beside a tensor a plain number would take its kind; alone it would be float32
    return f"tl.full((), {text}, tl.float64)" if kind == "f64" else text
