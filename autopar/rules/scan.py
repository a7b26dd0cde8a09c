"""Scans, sorts and searches along a dim, which is whole; the other dims pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.rules.call import Call
from autopar.rules.dims import dim_list, letters, passing, wrap
from autopar.rules.rule import Dim, Rule


def scan(*, linear: bool = False) -> Callable[[Call], Rule]:
    """cumsum, sort, ...: outputs have the input's dims, `dim` whole."""

    def build(call: Call) -> Rule:
        return replace(passing(call, dim_list(call), linear=linear), saves=() if linear else (0,))

    return build


def msort(call: Call) -> Rule:
    """Sorts along the first dim."""
    return passing(call, {0})


def diff(call: Call) -> Rule:
    """Differences along `dim`, which is whole in all inputs."""
    rank = len(call.in_shapes[0])
    one = passing(call, {wrap(call.arg("dim", -1), rank)})
    n = len(call.inputs)
    return replace(one, ins=one.ins * n, linear=(frozenset(range(n)),))


def searchsorted(call: Call) -> Rule | None:
    """`... n, ... m -> ... m` with n whole; one sorted row for all values leaves every dim of the values free."""
    names = list(call.named_inputs())
    if "self" not in names:
        return None  # a number to look for
    values, sequence = call.shape("self") or (), call.shape("sorted_sequence") or ()
    dims, sizes = letters(values)
    row: tuple[Dim, ...] = (*dims[:-1], ()) if len(sequence) > 1 else ((),)
    ins = tuple(tuple(dims) if name == "self" else row for name in names)
    return Rule(ins, (tuple(dims),), sizes)


def bucketize(call: Call) -> Rule | None:
    """Values pass, boundaries are whole."""
    if list(call.named_inputs()) != ["self", "boundaries"]:
        return None
    dims, sizes = letters(call.in_shapes[0])
    return Rule((tuple(dims), ((),)), (tuple(dims),), sizes)


RULES: dict[str, Callable[[Call], Rule | None]] = {
    "cumsum": scan(linear=True),
    **dict.fromkeys("cumprod cummax cummin logcumsumexp sort argsort topk".split(), scan()),
    "msort": msort,
    "diff": diff,
    "searchsorted": searchsorted,
    "bucketize": bucketize,
}
