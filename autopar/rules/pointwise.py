"""Pointwise ops: every output element depends on the input elements at its place. One rule for nearly all of them.

Which ops are pointwise is said by torch's own tag and, for those it does not tag, by `EXTRA`. Ops that draw random
numbers, dropout too, are not among them: a shard would draw others than the whole. Our own random ops are in random.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import FIRST, letters, wrap
from autopar.rules.rule import Dim, Rule, parse

IDENTITY = frozenset(
    "alias clone contiguous lift_fresh lift_fresh_copy detach positive resolve_conj resolve_neg".split()
)
"""Copies and renames of one tensor."""

CASTS = frozenset("to _to_copy float half double bfloat16 type_as".split())

EXTRA = (
    IDENTITY
    | CASTS
    | frozenset(
        "zeros_like ones_like full_like empty_like fill copy masked_fill complex polar real imag conj _conj"
        " __and__ __or__ __xor__ __lshift__ __rshift__ where isclose isfinite isinf isreal square rsub hardswish"
        " log_sigmoid"
        " floor_divide absolute negative fix add subtract multiply divide true_divide clip arccos arccosh arcsin"
        " arcsinh arctan"
        " arctanh arctan2 greater greater_equal less less_equal not_equal special_digamma special_erf special_erfc"
        " special_erfinv"
        " special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0"
        " special_log1p"
        " special_logit special_multigammaln special_ndtr special_polygamma special_psi special_round special_sinc"
        " special_xlogy".split()
    )
)
"""Pointwise ops that torch does not tag as such (those made of other ops, mostly)."""

NOT_POINTWISE = frozenset({"equal"})
"""Tagged, but not: `equal` compares whole tensors."""

DTYPE_ONLY = frozenset({("type_as", "other"), ("to", "other")})
"""(op, argument) of tensors read for their dtype alone: they need not have the output's shape."""

LINEAR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (*IDENTITY, *CASTS, *"neg negative real imag conj _conj conj_physical deg2rad rad2deg".split()), ("self",)
    ),
    **dict.fromkeys(("add", "sub", "subtract", "rsub", "where"), ("self other",)),
    **dict.fromkeys(("mul", "multiply"), ("self", "other")),
    **dict.fromkeys(("div", "divide", "true_divide", "ldexp"), ("self",)),
    "lerp": ("self end",),
    "addcmul": ("self tensor1", "self tensor2"),
    "addcdiv": ("self tensor1",),
    "complex": ("real imag",),
    "masked_fill": ("self",),
    "copy": ("src",),
}
"""Sets of arguments in which an op is linear together; a number in place of one is an offset and breaks the set."""

NEEDS_NOTHING = (
    IDENTITY
    | CASTS
    | frozenset(
        "neg negative add sub subtract rsub copy fill real imag complex"
        " zeros_like ones_like full_like empty_like".split()
    )
)
NEEDS_OUTPUT = frozenset(
    "exp exp2 expm1 tanh sigmoid relu rsqrt sqrt reciprocal tan elu selu celu special_expit".split()
)
SCALES = frozenset("mul multiply div divide true_divide".split())
"""By a number: nothing is saved."""


def packet(call: Call) -> str:
    """`aten.add.Tensor` -> `add`."""
    return str(call.target._schema.name).split("::")[-1]


def is_pointwise(call: Call) -> bool:
    name = packet(call)
    if name in EXTRA:
        return True
    tags = call.target.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and name not in NOT_POINTWISE


def pointwise(call: Call) -> Rule | None:
    """`..., ... -> ...`, broadcasting."""
    name, outs = packet(call), call.out_shapes
    if not outs or not call.inputs or any(o != outs[0] for o in outs):
        return None
    if name == "where" and "self" not in (a.name for a in call.target._schema.arguments):
        return None  # where(condition) alone is nonzero
    arguments = list(call.named_inputs())
    looked_at = [(name, a) in DTYPE_ONLY for a in arguments]
    shapes = [(1,) * len(s) if skip else s for s, skip in zip(call.in_shapes, looked_at, strict=True)]
    notation = f"{', '.join('...' for _ in shapes)} -> {', '.join('...' for _ in outs)}"
    ins, out_dims, sizes = parse(notation, shapes, outs)
    if any(looked_at):
        ins = tuple(((),) * len(dims) if skip else dims for dims, skip in zip(ins, looked_at, strict=True))
    n = len(arguments)
    saves: tuple[int, ...] = (
        () if name in NEEDS_NOTHING | NEEDS_OUTPUT or (name in SCALES and n == 1) else tuple(range(n))
    )
    return Rule(
        ins, out_dims, sizes, linear=_linear(call, name, arguments), saves=saves, saves_output=name in NEEDS_OUTPUT
    )


def _linear(call: Call, name: str, arguments: list[str]) -> tuple[frozenset[int], ...]:
    if call.arg("rounding_mode") is not None:
        return ()
    if name == "masked_fill" and (isinstance(call.arg("value"), Node) or call.arg("value") != 0):
        return ()
    found = []
    for together in LINEAR.get(name, ()):
        names = together.split()
        if all(a in arguments for a in names):
            found.append(frozenset(i for i, a in enumerate(arguments) if a in names))
    return tuple(found)


def prelu(call: Call) -> Rule:
    """`b c ..., c -> b c ...`; one slope for all channels is replicated."""
    dims, sizes = letters(call.in_shapes[0])
    slope = call.in_shapes[1]
    channels: tuple[Dim, ...] = ((),) * len(slope)
    if len(slope) == 1 and slope[0] != 1:
        channels = (dims[1],)
    return Rule((tuple(dims), channels), (tuple(dims),), sizes, saves=(0, 1))


def glu(call: Call) -> Rule:
    """`(n h) -> h` with n = 2: the two halves of a shard are the shards of the two halves."""
    dims, sizes = letters(call.out_shapes[0])
    at = wrap(call.arg("dim", -1), len(dims))
    halves: list[Dim] = [("n", *d) if i == at else d for i, d in enumerate(dims)]
    return Rule((tuple(halves),), (tuple(dims),), {**sizes, "n": 2}, whole=frozenset("n"), saves=(0,))


def view_as_real(call: Call) -> Rule:
    """Filled: torch refuses the gradient of no elements where it does not lie as it wants."""
    dims, sizes = letters(call.in_shapes[0])
    return Rule((tuple(dims),), ((*dims, ()),), sizes, linear=FIRST, filled=frozenset(sizes), view=True)


def view_as_complex(call: Call) -> Rule:
    """Filled, as view_as_real."""
    dims, sizes = letters(call.out_shapes[0])
    return Rule(((*dims, ()),), (tuple(dims),), sizes, linear=FIRST, filled=frozenset(sizes), view=True)


def isin(call: Call) -> Rule | None:
    """Elements pass, the set is whole."""
    if list(call.named_inputs()) != ["elements", "test_elements"]:
        return None
    dims, sizes = letters(call.in_shapes[0])
    return Rule((tuple(dims), ((),) * len(call.in_shapes[1])), (tuple(dims),), sizes)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "prelu": prelu,
    "glu": glu,
    "view_as_real": view_as_real,
    "view_as_complex": view_as_complex,
    "isin": isin,
}
