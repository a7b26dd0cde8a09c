"""When the weight gradients of a stage are computed: with the input gradients, or later (zero-bubble schedules).

Enters: a lowered backward graph as two functions. Leaves: one function for AOTAutograd. Inside `inputs_only()` it gives
the input gradients alone and leaves the rest of the work as `Later` objects; outside it does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False)
class Later:
    """The weight gradients of one backward, not computed yet. positions: of the gradients among the graph's inputs."""

    run: Boxed
    held: list[Any]
    positions: tuple[int, ...]

    def gradients(self) -> dict[int, torch.Tensor]:
        """Gradient by position of the forward's input. Frees what was held for it."""
        held, self.held = self.held, []
        with torch.no_grad():  # as in a backward: parameters may be among what it reads
            return dict(zip(self.positions, self.run(held), strict=True))


_WAITING: list[list[Later]] = []
"""The innermost `inputs_only()`."""


@contextmanager
def inputs_only() -> Iterator[list[Later]]:
    """Backwards made inside leave their weight gradients for later: in the list, in the order in which they ran."""
    later: list[Later] = []
    _WAITING.append(later)
    try:
        yield later
    finally:
        _WAITING.pop()


def splittable(whole: Boxed, first: Boxed, second: Boxed, shape: Split) -> Boxed:
    """whole: all gradients. first: input gradients, then what `second` needs of the way to them. second: the others."""

    def call(values: list[Any]) -> Sequence[Any]:
        if not _WAITING:
            return whole(values)
        kept = [values[i] for i in shape.kept]
        outs = list(first(values))
        given = dict(zip(shape.inputs, outs, strict=False))
        _WAITING[-1].append(Later(second, [*kept, *outs[len(shape.inputs) :]], shape.weights))
        return tuple(given.get(i) for i in range(shape.outputs))

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True, slots=True)
class Split:
    """How the two halves fit together.

    Fields:  outputs: of the whole graph. inputs, weights: positions of either kind of gradient among them. kept:
             positions of the whole graph's placeholders that the second half reads itself.
    """

    outputs: int
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    kept: tuple[int, ...]


"""Gradients that do not exist (None) are in neither."""
