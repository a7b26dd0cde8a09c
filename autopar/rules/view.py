"""Ops that only rearrange: views, transposes, slices, joins. All are linear, so partial stays partial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Dim, Dims, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _same_dims(shape: Sequence[int], prefix: str = "d") -> tuple[list[Dim], dict[str, int]]:
    return [(f"{prefix}{i}",) for i in range(len(shape))], {f"{prefix}{i}": n for i, n in enumerate(shape)}


def common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors shared by the two shapes of a reshape: the finest ones that neither shape cuts across.

    `(4, 8, 32) -> (32, 4, 8)` gives `(a)(b)(c d) -> (a b)(c)(d)`. Where the shapes do not nest (6, 4 -> 8, 3) the dims have
    no factor.
    """
    ins: list[list[str]] = [[] for _ in source]
    outs: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    if 0 in source:
        return tuple(map(tuple, ins)), tuple(map(tuple, outs)), {}
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [], []  # a smallest run of dims with equal products
        a = b = 1
        while True:
            if a <= b and i < len(source):
                left.append(i)
                a *= source[i]
                i += 1
            elif j < len(target):
                right.append(j)
                b *= target[j]
                j += 1
            if a == b and (left or right) and not (i < len(source) and source[i] == 1) and not (j < len(target) and target[j] == 1):
                break
        bounds = sorted(_inner(source, left) | _inner(target, right) | {1, a}, reverse=True)
        if any(big % small for big, small in zip(bounds, bounds[1:], strict=False)):
            continue
        names = []
        for outer, inner in zip(bounds, bounds[1:], strict=False):
            name = f"f{len(sizes)}"
            sizes[name] = outer // inner
            names.append((name, outer, inner))
        for dims, shape, run in ((ins, source, left), (outs, target, right)):
            inside = math.prod(shape[d] for d in run)
            for d in run:
                outside, inside = inside, inside // shape[d]
                dims[d] = [n for n, outer, inner in names if outer <= outside and inner >= inside]
    return tuple(map(tuple, ins)), tuple(map(tuple, outs)), sizes


def _inner(shape: Sequence[int], run: Sequence[int]) -> set[int]:
    found, inside = set(), 1
    for d in reversed(run):
        found.add(inside)
        inside *= shape[d]
    return found


def reshape(call: Call) -> Rule:
    """view, reshape, flatten, unflatten: parts of the dims stay, their grouping changes."""
    ins, outs, sizes = common_factors(call.in_shapes[0], call.out_shapes[0])
    return Rule((ins,), (outs,), sizes, linear=_FIRST, local=_reshape_local, view=True)


def _reshape_local(ctx: Local) -> Node:
    # reshape, not view: a shard cut inside a dim may not be contiguous where the whole tensor was
    return ctx.emit(aten.reshape.default, ctx.ins[0], ctx.out_shape())


def permuted(order: Callable[[Call], Sequence[int]]) -> Callable[[Call], Rule]:
    def build(call: Call) -> Rule:
        dims, sizes = _same_dims(call.in_shapes[0])
        return Rule((tuple(dims),), (tuple(dims[d] for d in order(call)),), sizes, linear=_FIRST, view=True)

    return build


def _transposed(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    order = list(range(n))
    a, b = (int(call.arg(name)) % n for name in ("dim0", "dim1"))
    order[a], order[b] = order[b], order[a]
    return order


def _t(call: Call) -> list[int]:
    return list(range(len(call.in_shapes[0])))[::-1]


def _last_two(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    return [*range(n - 2), n - 1, n - 2]


def _permuted(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    return [int(d) % n for d in call.arg("dims")]


def _moved(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    source, target = ([call.arg(k)] if isinstance(call.arg(k), int) else call.arg(k) for k in ("source", "destination"))
    places = {t % n: s % n for s, t in zip(source, target, strict=True)}
    rest = iter(d for d in range(n) if d not in places.values())
    return [places[d] if d in places else next(rest) for d in range(n)]


def expand(call: Call) -> Rule:
    """Dims of size one become larger: the new factor is only in the output."""
    source, target = call.in_shapes[0], call.out_shapes[0]
    out, sizes = _same_dims(target)
    lead = len(target) - len(source)
    ins = tuple(() if n == 1 and target[lead + i] != 1 else out[lead + i] for i, n in enumerate(source))
    return Rule((ins,), (tuple(out),), sizes, linear=_FIRST, local=_expand_local, view=True)


def _expand_local(ctx: Local) -> Node:
    return ctx.emit(aten.expand.default, ctx.ins[0], ctx.out_shape())


def repeat(call: Call) -> Rule:
    """Tiled dims are kept whole, the others pass."""
    source, target = call.in_shapes[0], call.out_shapes[0]
    out, sizes = _same_dims(target)
    lead = len(target) - len(source)
    same = [lead <= d and target[d] == source[d - lead] for d in range(len(target))]
    ins = tuple(out[lead + i] if same[lead + i] else () for i in range(len(source)))
    outs = tuple(out[d] if same[d] else () for d in range(len(target)))
    return Rule((ins,), (outs,), sizes, linear=_FIRST)


def one_dim_whole(call: Call) -> Rule:
    """slice, narrow, flip, roll, cumsum-like views along `dim`: that dim is whole (free when the slice takes all of it)."""
    source, target = call.in_shapes[0], call.out_shapes[0]
    dims, sizes = _same_dims(source)
    at = _dim(call, len(source))
    full = source[at] == target[at] and call.arg("step", 1) == 1
    kept = tuple(d if i != at or full else () for i, d in enumerate(dims))
    return Rule((kept,), (kept,), sizes, linear=_FIRST, local=_alias if full else None, view=True)


def _alias(ctx: Local) -> Node:
    return ctx.emit(aten.alias.default, ctx.ins[0])


def _dim(call: Call, rank: int) -> int:
    return int(call.arg("dim", 0)) % max(rank, 1)


def select(call: Call) -> Rule:
    dims, sizes = _same_dims(call.in_shapes[0])
    at = _dim(call, len(dims))
    kept = [d if i != at else () for i, d in enumerate(dims)]
    return Rule((tuple(kept),), (tuple(d for i, d in enumerate(kept) if i != at),), sizes, linear=_FIRST, view=True)


def unbind(call: Call) -> Rule:
    one = select(call)
    return Rule(one.ins, one.outs * len(call.out_shapes), one.sizes, linear=_FIRST, view=True)


def unsqueeze(call: Call) -> Rule:
    dims, sizes = _same_dims(call.in_shapes[0])
    at = int(call.arg("dim")) % (len(dims) + 1)
    return Rule((tuple(dims),), ((*dims[:at], (), *dims[at:]),), sizes, linear=_FIRST, view=True)


def squeeze(call: Call) -> Rule:
    """Dims of size one go; those kept keep their factors. A kept dim may have local size one, so the shape is given."""
    source, target = call.in_shapes[0], call.out_shapes[0]
    dims, sizes = _same_dims(source)
    names = [a.name for a in call.target._schema.arguments]
    wanted = call.arg("dim") if "dim" in names else range(len(source))
    gone = {int(d) % max(len(source), 1) for d in ([wanted] if isinstance(wanted, int) else wanted)}
    outs = tuple(d for i, d in enumerate(dims) if not (i in gone and source[i] == 1))
    assert len(outs) == len(target)
    return Rule((tuple(dims),), (outs,), sizes, linear=_FIRST, local=_reshape_local, view=True)


def split(call: Call) -> Rule:
    """Equal pieces of a dim: `(n x) -> x, x, ...`, so that each piece can be cut; unequal pieces keep the dim whole."""
    dims, sizes = _same_dims(call.in_shapes[0])
    at, outs = _dim(call, len(dims)), call.out_shapes
    if len({o[at] for o in outs}) == 1 and outs[0][at] * len(outs) == call.in_shapes[0][at]:
        sizes = {**sizes, "n": len(outs), "x": outs[0][at]}
        source = tuple(("n", "x") if i == at else d for i, d in enumerate(dims))
        piece = tuple(("x",) if i == at else d for i, d in enumerate(dims))
        return Rule((source,), (piece,) * len(outs), sizes, whole=frozenset("n"), linear=_FIRST, local=_split_local, view=True)
    kept = tuple(d if i != at else () for i, d in enumerate(dims))
    return Rule((kept,), (kept,) * len(outs), sizes, linear=_FIRST, view=True)


def _split_local(ctx: Local) -> Node:
    at = _dim(ctx.call, len(ctx.call.in_shapes[0]))
    return ctx.emit(aten.split_with_sizes.default, ctx.ins[0], [ctx.out_shape()[at]] * len(ctx.out_parts), at)


def cat(call: Call) -> Rule | None:
    """The joined dim is whole; partial pieces give a partial whole."""
    shapes, out = call.in_shapes, call.out_shapes[0]
    if any(len(s) != len(out) for s in shapes):
        return None  # old-style empty tensors among the pieces
    dims, sizes = _same_dims(out)
    at = _dim(call, len(out))
    kept = tuple(d if i != at else () for i, d in enumerate(dims))
    return Rule((kept,) * len(shapes), (kept,), sizes, linear=(frozenset(range(len(shapes))),))


def stack(call: Call) -> Rule:
    dims, sizes = _same_dims(call.in_shapes[0])
    at = int(call.arg("dim", 0)) % (len(dims) + 1)
    n = len(call.in_shapes)
    return Rule((tuple(dims),) * n, ((*dims[:at], (), *dims[at:]),), sizes, linear=(frozenset(range(n)),))


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), permuted(_transposed)),
    "t": permuted(_t),
    "numpy_T": permuted(_t),
    **dict.fromkeys(("mT", "adjoint", "matrix_H"), permuted(_last_two)),
    "permute": permuted(_permuted),
    **dict.fromkeys(("movedim", "moveaxis"), permuted(_moved)),
    "expand": expand,
    "expand_as": expand,
    "broadcast_to": expand,
    "repeat": repeat,
    "slice": one_dim_whole,
    "narrow": one_dim_whole,
    "select": select,
    "unbind": unbind,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk"), split),
    "cat": cat,
    "concat": cat,
    "concatenate": cat,
    "stack": stack,
}
