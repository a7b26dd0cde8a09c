"""Ops that only regroup, reorder or repeat dims. All are linear, so partial stays partial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.dims import FIRST, arguments, dim_list, letters, wrap
from autopar.rules.rule import Dim, Dims, Rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

aten = torch.ops.aten


def common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors shared by the two shapes of a reshape: the finest ones that neither shape cuts across.

    `(4, 8, 32) -> (32, 4, 8)` gives `(a)(b)(c d) -> (a b)(c)(d)`. Where the shapes do not nest (6, 4 -> 8, 3) the
    dims have no factor.
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
            if (
                a == b
                and (left or right)
                and not (i < len(source) and source[i] == 1)
                and not (j < len(target) and target[j] == 1)
            ):
                break
        bounds = sorted(_inner(source, left) | _inner(target, right) | {1, a}, reverse=True)
        if any(big % small for big, small in itertools.pairwise(bounds)):
            continue
        names = []
        for outer, inner in itertools.pairwise(bounds):
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


def reshape(call: Call) -> Rule | None:
    """view, reshape, flatten, unflatten: parts of the dims stay, their grouping changes."""
    if "dtype" in arguments(call):
        return None  # view.dtype reads the same bits as another type
    source, target = call.in_shapes[0], call.out_shapes[0]
    if len(call.out_shapes) != 1:
        return None
    ins, outs, sizes = common_factors(source, target)
    return Rule((ins, *_unread(call)), (outs,), sizes, linear=FIRST, local=_reshape_local, view=True)


def _unread(call: Call) -> list[Dims]:
    """Dims of further inputs, of which only the shape is read."""
    return [((),) * len(s) for s in call.in_shapes[1:]]


def _reshape_local(ctx: Local) -> Node:
    # reshape, not view: a shard cut inside a dim may not be contiguous where the whole tensor was
    return ctx.emit(aten.reshape.default, ctx.ins[0], ctx.out_shape())


def permuted(order: Callable[[Call], Sequence[int]]) -> Callable[[Call], Rule]:
    def build(call: Call) -> Rule:
        dims, sizes = letters(call.in_shapes[0])
        return Rule((tuple(dims),), (tuple(dims[d] for d in order(call)),), sizes, linear=FIRST, view=True)

    return build


def _swapped(first: str, second: str) -> Callable[[Call], list[int]]:
    def order(call: Call) -> list[int]:
        n = len(call.in_shapes[0])
        places = list(range(n))
        if n:
            a, b = (wrap(call.arg(name), n) for name in (first, second))
            places[a], places[b] = places[b], places[a]
        return places

    return order


def _reversed(call: Call) -> list[int]:
    return list(range(len(call.in_shapes[0])))[::-1]


def _last_two(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    return [*range(n - 2), n - 1, n - 2] if n > 1 else list(range(n))


def _permuted(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    return [wrap(d, n) for d in call.arg("dims")]


def _moved(call: Call) -> list[int]:
    n = len(call.in_shapes[0])
    source, target = ([call.arg(k)] if isinstance(call.arg(k), int) else call.arg(k) for k in ("source", "destination"))
    places = {wrap(t, n): wrap(s, n) for s, t in zip(source, target, strict=True)}
    rest = iter(d for d in range(n) if d not in places.values())
    return [places[d] if d in places else next(rest) for d in range(n)]


def _rotated(call: Call) -> list[int]:
    """rot90 exchanges its two dims when it turns an odd number of times."""
    order = list(range(len(call.in_shapes[0])))
    a, b = (wrap(d, len(order)) for d in call.arg("dims"))
    if int(call.arg("k", 1)) % 2:
        order[a], order[b] = order[b], order[a]
    return order


def rot90(call: Call) -> Rule:
    """The two dims of the turn are whole."""
    dims, sizes = letters(call.in_shapes[0], {wrap(d, len(call.in_shapes[0])) for d in call.arg("dims")})
    return Rule((tuple(dims),), (tuple(dims[d] for d in _rotated(call)),), sizes, linear=FIRST)


def _aligned(source: Sequence[int], out: Sequence[Dim], target: Sequence[int]) -> Dims:
    """The output's dims that a broadcast input has, from the right."""
    lead = len(target) - len(source)
    return tuple(() if n == 1 and target[lead + i] != 1 else out[lead + i] for i, n in enumerate(source))


def expand(call: Call) -> Rule:
    """Dims of size one become larger: the new factor is only in the output."""
    out, sizes = letters(call.out_shapes[0])
    ins = _aligned(call.in_shapes[0], out, call.out_shapes[0])
    return Rule((ins, *_unread(call)), (tuple(out),), sizes, linear=FIRST, local=_expand_local, view=True)


def _expand_local(ctx: Local) -> Node:
    return ctx.emit(aten.expand.default, ctx.ins[0], ctx.out_shape())


def broadcast_tensors(call: Call) -> Rule:
    """Every output has all dims; a shard of one input expands to the shards of the others."""
    out, sizes = letters(call.out_shapes[0])
    every = frozenset(range(len(call.inputs)))
    ins = tuple(_aligned(s, out, call.out_shapes[0]) for s in call.in_shapes)
    return Rule(ins, (tuple(out),) * len(call.out_shapes), sizes, linear=(every,), view=True)


def meshgrid(call: Call) -> Rule:
    """`a, b, c -> a b c` three times; "xy" exchanges the first two."""
    sizes = {f"d{i}": math.prod(s) for i, s in enumerate(call.in_shapes)}
    out: list[Dim] = [(letter,) for letter in sizes]
    if call.arg("indexing", "ij") == "xy" and len(out) > 1:
        out[:2] = out[1::-1]
    ins = tuple(((f"d{i}",),) if s else () for i, s in enumerate(call.in_shapes))
    return Rule(ins, (tuple(out),) * len(ins), sizes, linear=(frozenset(range(len(ins))),))


def repeat(call: Call) -> Rule:
    """repeat, tile: `d -> (r d)`; both the copies and what is copied can be cut."""
    source, target = call.in_shapes[0], call.out_shapes[0]
    lead = len(target) - len(source)
    dims, sizes = letters((1,) * lead + tuple(source))
    out: list[Dim] = []
    for i, (n, dim) in enumerate(zip((1,) * lead + tuple(source), dims, strict=True)):
        sizes[f"r{i}"] = target[i] // n if n else 1
        out.append((f"r{i}", *dim))
    if 0 in target:
        return Rule((((),) * len(source),), (((),) * len(target),), {}, linear=FIRST)
    return Rule((tuple(dims[lead:]),), (tuple(out),), sizes, linear=FIRST, local=_repeat_local)


def _repeat_local(ctx: Local) -> Node:
    return ctx.emit(
        aten.repeat.default, ctx.ins[0], [ctx.local_size(f"r{i}") for i in range(len(ctx.call.out_shapes[0]))]
    )


def repeat_interleave(call: Call) -> Rule | None:
    """`d -> (d r)`, or `a b -> (a b r)` without a dim; a count for each element is data, and has no rule."""
    repeats = call.arg("repeats")
    if not isinstance(repeats, int) or len(call.inputs) != 1:
        return None
    dims, sizes = letters(call.in_shapes[0])
    sizes["r"] = repeats
    if call.arg("dim") is None:
        flat: Dim = (*(d[0] for d in dims), "r")
        return Rule((tuple(dims),), ((flat,),), sizes, linear=FIRST, local=_interleave_local)
    at = wrap(call.arg("dim"), len(dims))
    out = tuple((*d, "r") if i == at else d for i, d in enumerate(dims))
    return Rule((tuple(dims),), (out,), sizes, linear=FIRST, local=_interleave_local)


def _interleave_local(ctx: Local) -> Node:
    return ctx.emit(aten.repeat_interleave.self_int, ctx.ins[0], ctx.local_size("r"), ctx.call.arg("dim"))


def unsqueeze(call: Call) -> Rule:
    dims, sizes = letters(call.in_shapes[0])
    at = int(call.arg("dim")) % (len(dims) + 1)
    return Rule((tuple(dims),), ((*dims[:at], (), *dims[at:]),), sizes, linear=FIRST, view=True)


def squeeze(call: Call) -> Rule:
    """Dims of size one go; those kept keep their factors. A kept dim may have local size one, so the shape is given."""
    source = call.in_shapes[0]
    dims, sizes = letters(source)
    gone = set(dim_list(call)) if "dim" in arguments(call) else set(range(len(source)))
    if call.arg("dim") == []:
        gone = set()  # squeeze of no dims, unlike a reduction over no dims, does nothing
    outs = tuple(d for i, d in enumerate(dims) if not (i in gone and source[i] == 1))
    assert len(outs) == len(call.out_shapes[0])
    return Rule((tuple(dims),), (outs,), sizes, linear=FIRST, local=_reshape_local, view=True)


def pixel_shuffle(call: Call) -> Rule:
    """`... (c p q) h w -> ... c (h p) (w q)`; p and q are whole."""
    return _pixels(call, call.out_shapes[0], call.in_shapes[0], int(call.arg("upscale_factor")), down=False)


def pixel_unshuffle(call: Call) -> Rule:
    """`... c (h p) (w q) -> ... (c p q) h w`; p and q are whole."""
    return _pixels(call, call.in_shapes[0], call.out_shapes[0], int(call.arg("downscale_factor")), down=True)


def _pixels(call: Call, fine: Sequence[int], coarse: Sequence[int], factor: int, *, down: bool) -> Rule:
    lead, sizes = letters(fine[:-3])
    sizes.update({"c": fine[-3], "h": coarse[-2], "w": coarse[-1], "p": factor, "q": factor})
    few: Dims = (*lead, ("c",), ("h", "p"), ("w", "q"))
    many: Dims = (*lead, ("c", "p", "q"), ("h",), ("w",))
    ins, outs = (few, many) if down else (many, few)
    return Rule((ins,), (outs,), sizes, whole=frozenset("pq"), filled=_every(sizes), linear=FIRST)


def _every(sizes: dict[str, int]) -> frozenset[str]:
    return frozenset(sizes)


def channel_shuffle(call: Call) -> Rule:
    """`b (g c) ... -> b (c g) ...`; groups are whole."""
    dims, sizes = letters(call.in_shapes[0])
    groups = int(call.arg("groups"))
    del sizes["d1"]
    sizes.update(g=groups, c=call.in_shapes[0][1] // groups)
    ins, outs = ((dims[0], pair, *dims[2:]) for pair in (("g", "c"), ("c", "g")))
    return Rule((ins,), (outs,), sizes, whole=frozenset("g"), filled=_every(sizes), linear=FIRST)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys(
        "view reshape _unsafe_view flatten unflatten view_as reshape_as ravel atleast_1d atleast_2d atleast_3d".split(),
        reshape,
    ),
    "transpose": permuted(_swapped("dim0", "dim1")),
    "swapdims": permuted(_swapped("dim0", "dim1")),
    "swapaxes": permuted(_swapped("axis0", "axis1")),
    **dict.fromkeys(("t", "numpy_T", "matrix_H"), permuted(_reversed)),
    **dict.fromkeys(("mT", "mH", "adjoint"), permuted(_last_two)),
    "permute": permuted(_permuted),
    **dict.fromkeys(("movedim", "moveaxis"), permuted(_moved)),
    "rot90": rot90,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    "broadcast_tensors": broadcast_tensors,
    "meshgrid": meshgrid,
    "repeat": repeat,
    "tile": repeat,
    "repeat_interleave": repeat_interleave,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), channel_shuffle),
}
