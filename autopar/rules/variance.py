"""Variance, standard deviation and 2-norm across the shards of a cut dim: sums are reduced over the axis.

mean = sum(x) / n ;  var = sum((x - mean)^2) / (n - correction), with n global ;  norm = sqrt(sum(x^2)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import arguments
from autopar.rules.reduction import reduced, reduced_dims, reduced_letters
from autopar.rules.rule import Collective, Distributed, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def _distributed(call: Call, collectives: Sequence[tuple[str, str]], local: Callable[[Local], object]) -> Rule:
    """A reduction whose reduced dims may be cut; collectives: (forward, backward), on buffers of the kept dims."""
    gone = reduced_dims(call)
    letters = frozenset(f"r{d}" for d in gone)
    if not call.inputs[0].dtype.is_floating_point or call.arg("dtype") is not None:
        return reduced(call, whole=letters, saves=(0,))
    rest = tuple(f"d{d}" for d in range(len(call.in_shapes[0])) if d not in gone)
    costs = Distributed(tuple(Collective(forward, backward, rest) for forward, backward in collectives), output="I")
    return reduced(call, distributed=dict.fromkeys(letters, costs), local=local, saves=(0,))


def _sum(ctx: Local, x: Node, kind: str) -> Node:
    """Sum over the reduced dims, kept, of all shards."""
    gone = reduced_dims(ctx.call)
    out = ctx.emit(aten.sum.dim_IntList, x, gone, True) if gone else x
    for letter in reduced_letters(ctx.rule):
        out = ctx.reduce(out, letter, kind)
    return out


def _shaped(ctx: Local, x: Node, index: int = 0) -> Node:
    return ctx.emit(aten.reshape.default, x, ctx.out_shape(index))


def _is_cut(ctx: Local) -> bool:
    return any(ctx.cut(letter) for letter in reduced_letters(ctx.rule))


def variance(call: Call) -> Rule:
    """var, std, var_mean, std_mean."""
    mean = [("all_reduce", "all_reduce")] + [("all_reduce", "nothing")] * len(call.out_shapes)
    found = _distributed(call, mean, _variance_local)
    return replace(found, filled=frozenset(k for k in found.sizes if k.startswith("d")))  # torch warns of no rows


def _correction(call: Call) -> float:
    if "correction" in arguments(call):
        given = call.arg("correction")
        return 1.0 if given is None else float(given)
    return float(bool(call.arg("unbiased", True)))


def _variance_local(ctx: Local) -> object:
    if not _is_cut(ctx):
        return ctx.same()
    x, count = ctx.ins[0], math.prod(ctx.rule.sizes[letter] for letter in reduced_letters(ctx.rule))
    # used against sharded values, so its gradient is a part on each rank: R; an output of the op is I
    mean = ctx.emit(aten.div.Tensor, _sum(ctx, x, "R"), count)
    centred = ctx.emit(aten.sub.Tensor, x, mean)
    squares = _sum(ctx, ctx.emit(aten.mul.Tensor, centred, centred), "I")
    out = ctx.emit(aten.div.Tensor, squares, max(count - _correction(ctx.call), 0.0))
    if "std" in ctx.call.target._schema.name:
        out = _root(ctx, out)
    if len(ctx.out_parts) == 1:
        return _shaped(ctx, out)
    return _shaped(ctx, out), _shaped(ctx, ctx.emit(aten.div.Tensor, _sum(ctx, x, "I"), count), 1)


def vector_norm(call: Call) -> Rule | None:
    """linalg_vector_norm, norm: of order 2 across shards; other orders keep their dims whole."""
    order = call.arg("ord", call.arg("p", 2))
    return _norm(call, order is None or order == 2)


def matrix_norm(call: Call) -> Rule | None:
    """linalg_norm, linalg_matrix_norm, frobenius_norm: order 2 of two dims is the spectral norm, and they are whole."""
    order = call.arg("ord", "fro")
    vector = "matrix" not in call.target._schema.name and len(reduced_dims(call)) == 1
    return _norm(call, order is None or order == "fro" or (vector and order == 2))


def _norm(call: Call, euclidean: bool) -> Rule:
    if euclidean:
        return _distributed(call, [("all_reduce", "nothing")], _norm_local)
    whole = frozenset(f"r{d}" for d in reduced_dims(call))
    found = reduced(call, whole=whole, saves=(0,), saves_output=True)
    return replace(found, filled=frozenset(found.sizes))


def _norm_local(ctx: Local) -> Node:
    if not _is_cut(ctx):
        return ctx.same()
    x = ctx.ins[0]
    return _shaped(ctx, _root(ctx, _sum(ctx, ctx.emit(aten.mul.Tensor, x, x), "I")))


def _root(ctx: Local, squares: Node) -> Node:
    """Square root whose gradient at zero is zero, as that of torch's norm and std."""
    zero = ctx.emit(aten.eq.Scalar, squares, 0)
    root = ctx.emit(aten.sqrt.default, ctx.emit(aten.masked_fill.Scalar, squares, zero, 1.0))
    return ctx.emit(aten.masked_fill.Scalar, root, zero, 0.0)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys("var std var_mean std_mean".split(), variance),
    **dict.fromkeys("linalg_vector_norm norm".split(), vector_norm),
    **dict.fromkeys("linalg_norm linalg_matrix_norm frobenius_norm".split(), matrix_norm),
}
