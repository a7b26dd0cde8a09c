"""Products that sum over common factors: linear layers, matrix products, einsum.

A factor that the inputs have and the output lacks is summed, so cutting it leaves a partial output; what is added to
the product (a bias, `addmm`'s first input) is then partial, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from autopar.errors import RuleError
from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule


def _product(
    call: Call,
    notation: str,
    flop: float,
    *,
    addends: Sequence[int] = (),
    saves: Sequence[int] = (0, 1),
    filled: str = "",
) -> Rule:
    return rule(
        notation,
        call.in_shapes,
        call.out_shapes,
        flop=flop,
        saves=tuple(saves),
        addends=frozenset(addends),
        filled=frozenset(filled),
    )


def linear(call: Call) -> Rule:
    weight = call.in_shapes[1]
    notation = "... i, o i, o -> ... o" if len(call.inputs) == 3 else "... i, o i -> ... o"
    if len(weight) == 1:
        notation = "... i, i -> ..."
    flop = 2.0 * math.prod(call.in_shapes[0]) * (weight[0] if len(weight) == 2 else 1)
    return _product(call, notation, flop, addends=(2,))


def matmul(call: Call) -> Rule:
    a, b = call.in_shapes[:2]
    lead = "... " if max(len(a), len(b)) > 2 else ""
    left = "k" if len(a) == 1 else f"{lead}m k"
    right = "k" if len(b) == 1 else f"{lead}k n"
    out = f"{lead}{'m ' * (len(a) > 1)}{'n' * (len(b) > 1)}"
    return _product(call, f"{left}, {right} -> {out}", 2.0 * math.prod(call.out_shapes[0]) * a[-1])


def _added(spec: str, bias: str) -> Callable[[Call], Rule | None]:
    """`beta * bias + alpha * product`: `bias` names the output's dims, of which the given one may lack leading ones."""

    def build(call: Call) -> Rule | None:
        rank = len(call.in_shapes[0])
        names = bias.split()
        if rank > len(names):
            return None
        left = " ".join(names[len(names) - rank :])
        sizes = {
            f: n
            for names, shape in zip(spec.split(", "), call.in_shapes[1:], strict=True)
            for f, n in zip(names.split(), shape, strict=True)
        }
        return rule(
            f"{left}, {spec} -> {bias}",
            call.in_shapes,
            call.out_shapes,
            filled=frozenset("k"),  # addmv of no columns returns its first input unbroadcast
            flop=2.0 * math.prod(sizes.values()),
            saves=(1, 2),
            addends=frozenset({0}),
        )

    return build


def outer(call: Call) -> Rule:
    return _product(call, "m, n -> m n", float(math.prod(call.out_shapes[0])))


def inner(call: Call) -> Rule | None:
    """`a.. k, b.. k -> a.. b..`; with a scalar it is a plain product."""
    a, b = call.in_shapes
    if not a or not b:
        return None
    left, right = [f"a{i}" for i in range(len(a) - 1)], [f"b{i}" for i in range(len(b) - 1)]
    notation = f"{' '.join([*left, 'k'])}, {' '.join([*right, 'k'])} -> {' '.join(left + right)}"
    return _product(call, notation, 2.0 * math.prod(call.out_shapes[0]) * a[-1])


def tensordot(call: Call) -> Rule | None:
    a, b = call.in_shapes
    left, right = [f"a{i}" for i in range(len(a))], [f"b{i}" for i in range(len(b))]
    pairs = [(i % len(a), j % len(b)) for i, j in zip(call.arg("dims_self"), call.arg("dims_other"), strict=True)]
    if any(a[i] != b[j] for i, j in pairs):
        return None  # torch sums the longer of a broadcast pair first
    for k, (i, j) in enumerate(pairs):
        left[i] = right[j] = f"k{k}"
    out = [f for f in left + right if not f.startswith("k")]
    flop = 2.0 * math.prod(call.out_shapes[0]) * math.prod(a[i] for i, _ in pairs)
    return _product(call, f"{' '.join(left)}, {' '.join(right)} -> {' '.join(out)}", flop)


def bilinear(call: Call) -> Rule:
    """`y[..., o] = sum_ij x1[..., i] w[o, i, j] x2[..., j] + b[o]`."""
    bias = ", o" if len(call.inputs) == 4 else ""
    flop = 2.0 * math.prod(call.in_shapes[0]) * math.prod(call.in_shapes[2][::2])
    return _product(call, f"... i, ... j, o i j{bias} -> ... o", flop, addends=(3,), saves=(0, 1, 2), filled="ij")


def einsum(call: Call) -> Rule | None:
    """The rule is the equation itself; a letter twice in one operand (a diagonal) stays whole."""
    try:
        left, right = explicit(str(call.arg("equation")))
    except RuleError:
        return None
    notation = ", ".join(map(_spaced, left)) + " -> " + _spaced(right)
    return _product(call, notation, contraction_flop(left, right, call.in_shapes), saves=range(len(left)))


def explicit(equation: str) -> tuple[list[str], str]:
    """("bij,jk", "bik") of an equation; without "->" the output has, sorted, the letters that appear once.

    Raises:
        RuleError: something other than letters, commas, one arrow and ellipses.
    """
    text = equation.replace(" ", "")
    if not re.fullmatch(r"[A-Za-z.,]*(->[A-Za-z.]*)?", text):
        raise RuleError(f'einsum equation "{equation}" is not one of letters')
    before, arrow, after = text.partition("->")
    operands = before.split(",")
    if not arrow:
        letters = before.replace(".", "").replace(",", "")
        after = "..." * ("..." in before) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return operands, after


def _spaced(operand: str) -> str:
    return " ".join(re.findall(r"\.\.\.|[A-Za-z]", operand))


def contraction_flop(operands: Sequence[str], out: str, shapes: Sequence[Sequence[int]]) -> float:
    """2 x every index combination of a contraction, pair by pair from the left; an ellipsis counts as one index."""
    sizes: dict[str, int] = {}
    for operand, shape in zip(operands, shapes, strict=True):
        names = operand.replace("...", "")
        rest = len(shape) - len(names)
        at = operand.find("...") if "..." in operand else 0
        named = [*shape[:at], *shape[at + rest :]]
        sizes |= {f: max(n, sizes.get(f, 1)) for f, n in zip(names, named, strict=True)}
        sizes["."] = max(sizes.get(".", 1), math.prod(shape[at : at + rest]))
    flop, held = 0.0, set(operands[0].replace("...", "."))
    for k, operand in enumerate(operands[1:], 1):
        held |= set(operand.replace("...", "."))
        flop += 2.0 * math.prod(sizes[f] for f in held)
        held &= set("".join(operands[k + 1 :]) + out)
    return flop or float(math.prod(sizes.values()))


def multi_dot(call: Call) -> Rule:
    """`i0 i1, i1 i2, i2 i3 -> i0 i3`; the first and the last may be vectors."""
    specs = [f"i{k} i{k + 1}" for k in range(len(call.inputs))]
    first, last = len(call.in_shapes[0]) == 1, len(call.in_shapes[-1]) == 1
    out = [] if first else ["i0"]
    if first:
        specs[0] = "i1"
    if last:
        specs[-1] = f"i{len(specs) - 1}"
    else:
        out.append(f"i{len(specs)}")
    shapes = call.in_shapes
    flop = sum(2.0 * math.prod(shapes[0][:-1]) * math.prod(s) for s in shapes[1:])
    return _product(call, f"{', '.join(specs)} -> {' '.join(out)}", flop, saves=range(len(specs)))


def vecdot(call: Call) -> Rule | None:
    a, b = call.in_shapes
    rank = max(len(a), len(b))
    at = int(call.arg("dim", -1)) % rank
    if len(a) != len(b):
        return None
    names = " ".join("k" if d == at else f"d{d}" for d in range(rank))
    if a[at] != b[at]:
        return None
    out = " ".join(f"d{d}" for d in range(rank) if d != at)
    return _product(call, f"{names}, {names} -> {out}", 2.0 * math.prod(call.out_shapes[0]) * a[at])


def cross(call: Call) -> Rule | None:
    """Each output element needs all three along `dim`."""
    a, b = call.in_shapes
    dim = call.arg("dim")
    if len(a) != len(b) or dim is None:
        return None
    at = int(dim) % len(a)
    names = " ".join("k" if d == at else f"d{d}" for d in range(len(a)))
    return rule(f"{names}, {names} -> {names}", call.in_shapes, call.out_shapes, whole="k", saves=(0, 1))


def cdist(call: Call) -> Rule:
    """Distances of all pairs of rows; the coordinates are whole, since a root is taken of their sum."""
    return rule(
        "... m k, ... n k -> ... m n", call.in_shapes, call.out_shapes, whole="k", saves=(0, 1), saves_output=True
    )


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "linear": linear,
    **dict.fromkeys("matmul linalg_matmul mm bmm mv dot vdot".split(), matmul),
    "addmm": _added("m k, k n", "m n"),
    "addmv": _added("m k, k", "m"),
    "baddbmm": _added("b m k, b k n", "b m n"),
    "addbmm": _added("b m k, b k n", "m n"),
    "addr": _added("m, n", "m n"),
    "outer": outer,
    "ger": outer,
    "inner": inner,
    "tensordot": tensordot,
    "bilinear": bilinear,
    "einsum": einsum,
    "linalg_multi_dot": multi_dot,
    "chain_matmul": multi_dot,
    "linalg_vecdot": vecdot,
    "linalg_cross": cross,
    "cross": cross,
    "cdist": cdist,
}
