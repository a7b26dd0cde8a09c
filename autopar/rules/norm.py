"""Normalisations: the statistics of a group of elements need the whole group."""

from __future__ import annotations

from collections.abc import Callable

from autopar.rules.call import Call
from autopar.rules.rule import Dim, Rule


def layer_norm(call: Call) -> Rule:
    """The normalised dims are whole."""
    shape = call.in_shapes[0]
    n = len(call.arg("normalized_shape"))
    dims: list[Dim] = [(f"d{i}",) for i in range(len(shape))]
    tail = tuple(dims[len(shape) - n :])
    sizes = {f"d{i}": s for i, s in enumerate(shape)}
    whole = frozenset(f"d{i}" for i in range(len(shape) - n, len(shape)))
    return Rule((tuple(dims), *(tail for _ in call.inputs[1:])), (tuple(dims),), sizes, whole=whole, saves=(0,))


RULES: dict[str, Callable[[Call], Rule | None]] = {"layer_norm": layer_norm, "rms_norm": layer_norm}
