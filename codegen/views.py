"""Views as moves of an index: where an element of a view lies in the tensor that is viewed.

Enters: the fx node of a view and the index of an element of its result. Leaves: the index of that element in its input.
Refused (`NotLinear`): a reshape that cuts across the kernel's axes; a negative step of a slice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from autopar.codegen.index import ZERO, Index, NotLinear, dense_strides, flatten, split

At = tuple[Index, ...]


def packet(node: Node) -> str:
    """The ATen op's name without overload: "add"; for other nodes something that is no op's name."""
    target = node.target
    found = getattr(target, "_opname", None) or getattr(getattr(target, "overloadpacket", None), "__name__", None)
    namespace = getattr(target, "namespace", "")
    if found is None:
        return "getitem" if target is operator.getitem else ""
    return str(found) if namespace == "aten" else f"{namespace}.{found}"


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def given(node: Node) -> Any:
    """The arguments of a call by place: nodes, numbers, lists of them."""
    return node.args


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _input(node: Node) -> Node:
    source: Node = given(node)[0]
    return source


def _reshape(node: Node, at: At, sizes: Sequence[int]) -> At:
    before, after = shape_of(_input(node)), shape_of(node)
    long = [i for i, n in zip(at, after, strict=True) if n != 1]
    if [n for n in before if n != 1] == [n for n in after if n != 1]:
        rest = iter(long)
        return tuple(next(rest) if n != 1 else ZERO for n in before)
    return split(flatten(at, dense_strides(after)), before, sizes)


def _permute(node: Node, at: At, sizes: Sequence[int]) -> At:
    dims = argument(node, 1, "dims")
    found = [ZERO] * len(at)
    for place, dim in enumerate(dims):
        found[dim % len(at)] = at[place]
    return tuple(found)


def _transpose(node: Node, at: At, sizes: Sequence[int]) -> At:
    if packet(node) == "t":
        return at[::-1]
    a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    found = list(at)
    if at:
        found[a % len(at)], found[b % len(at)] = at[b % len(at)], at[a % len(at)]
    return tuple(found)


def _expand(node: Node, at: At, sizes: Sequence[int]) -> At:
    before = shape_of(_input(node))
    aligned = at[len(at) - len(before) :]
    return tuple(ZERO if n == 1 else i for i, n in zip(aligned, before, strict=True))


def _slice(node: Node, at: At, sizes: Sequence[int]) -> At:
    dim, step = argument(node, 1, "dim", 0), argument(node, 4, "step", 1)
    size = shape_of(_input(node))[dim % len(at)]
    start, _ = cut(size, argument(node, 2, "start"), argument(node, 3, "end"))
    return _shift(at, dim, start, step)


def cut(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Where a slice of a dim of this size begins and ends: negative places count from the end, all are clamped."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _shift(at: At, dim: int, start: int, step: int = 1) -> At:
    if step < 1:
        raise NotLinear("a slice with a step below 1")
    dim %= len(at)
    return (*at[:dim], at[dim] * step + start, *at[dim + 1 :])


def _select(node: Node, at: At, sizes: Sequence[int]) -> At:
    before = shape_of(_input(node))
    dim, place = argument(node, 1, "dim") % len(before), argument(node, 2, "index")
    return (*at[:dim], Index((), place % before[dim]), *at[dim:])


def _piece(node: Node, at: At, sizes: Sequence[int]) -> At:
    """An item of a split: `getitem(split(x, ...), i)` as a view of x."""
    whole, item = _input(node), given(node)[1]
    source = _input(whole)
    if packet(whole) == "unbind":
        dim = argument(whole, 1, "dim", 0) % len(shape_of(source))
        return (*at[:dim], Index((), item), *at[dim:])
    dim = argument(whole, 2, "dim", 0) % len(at)
    cuts = argument(whole, 1, "split_size")
    sizes_before = cuts[:item] if isinstance(cuts, (list, tuple)) else [cuts] * item
    return _shift(at, dim, sum(sizes_before))


View = Callable[[Node, At, Sequence[int]], At]

VIEWS: Mapping[str, View] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("t", "transpose"), _transpose),
    **dict.fromkeys(("alias", "detach", "lift_fresh"), lambda node, at, sizes: at),
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
}
"""By ATen op. Items of `SPLITS` are views, too."""

SPLITS = frozenset({"split", "split_with_sizes", "unbind"})


def view_of(node: Node) -> View | None:
    """The rule of a node that is a view of its first argument's memory, in the same dtype, or None."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and isinstance(node.args[0], Node) and packet(node.args[0]) in SPLITS:
        return _piece
    return VIEWS.get(packet(node)) if getattr(node.target, "_overloadname", "") != "dtype" else None


def viewed(node: Node) -> Node:
    """The tensor that a view looks at: through a split's tuple."""
    source = _input(node)
    return _input(source) if node.target is operator.getitem else source


def base_of(node: Node) -> Node:
    """What a view, or a view of a view, looks at in the end."""
    while view_of(node) is not None:
        node = viewed(node)
    return node
