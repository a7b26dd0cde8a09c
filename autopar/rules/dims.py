"""Small helpers for rules that are written from shapes rather than in notation: `d0 d1 d2` with some dims whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from autopar.rules.call import Call
from autopar.rules.rule import Dim, Rule

FIRST = (frozenset({0}),)
"""Linear in the first input."""


def letters(shape: Sequence[int], whole: Collection[int] = ()) -> tuple[list[Dim], dict[str, int]]:
    """Dims `(d0,), (d1,), ...` and their sizes; dims in `whole` get no factor."""
    dims: list[Dim] = [() if i in whole else (f"d{i}",) for i in range(len(shape))]
    return dims, {f"d{i}": int(n) for i, n in enumerate(shape) if i not in whole}


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front; a scalar has the dims 0 and -1, as in torch."""
    return int(dim) % max(rank, 1)


def dim_list(call: Call, name: str = "dim") -> list[int]:
    """The dims that an argument names, counted from the front; none and an empty list mean all."""
    rank = len(call.in_shapes[0])
    given = call.arg(name)
    if given is None or given == []:
        return list(range(rank))
    return sorted({wrap(d, rank) for d in ([given] if isinstance(given, int) else given)})


def passing(call: Call, whole: Collection[int], *, linear: bool = False, outputs: int | None = None) -> Rule:
    """The same dims in the input and in every output, those in `whole` without a factor."""
    dims, sizes = letters(call.in_shapes[0], whole)
    count = len(call.out_shapes) if outputs is None else outputs
    return Rule((tuple(dims),), (tuple(dims),) * count, sizes, linear=FIRST if linear else ())


def arguments(call: Call) -> frozenset[str]:
    """Names of the arguments in the schema of this overload."""
    return frozenset(a.name for a in call.target._schema.arguments)


def sums_survive(call: Call, partial: Collection[int]) -> bool:
    """May the inputs `partial` be partial, as far as types go? Booleans have no sum; a float must not be rounded."""
    ins = [call.inputs[i].dtype for i in partial]
    value = call.node.meta["val"]
    outs = [t.dtype for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, torch.Tensor)]
    if torch.bool in ins or torch.bool in outs:
        return False
    return not (any(map(_real, ins)) and not all(map(_real, outs)))


def _real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
