"""Where an element lies, as a linear form of the loops of a kernel.

    index = offset + sum of coefficient x position on an axis

Views inside a kernel are moves of these forms: nothing is computed for them at run time. A form that a view would turn
into a division is refused (`NotLinear`); the axes of a kernel are chosen so that this is rare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class NotLinear(Exception):
    """An index that is no linear form of the axes; the message says which view makes it."""


@dataclass(frozen=True, slots=True)
class Index:
    """terms: (axis, coefficient) by rising axis, no coefficient 0."""

    terms: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.offset + other)
        joined = dict(self.terms)
        for axis, coefficient in other.terms:
            joined[axis] = joined.get(axis, 0) + coefficient
        return make(joined, self.offset + other.offset)

    def __mul__(self, factor: int) -> Index:
        return make({a: c * factor for a, c in self.terms}, self.offset * factor)

    def span(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Least and largest value over axes of these sizes."""
        moves = [c * (sizes[a] - 1) for a, c in self.terms]
        return self.offset + sum(min(m, 0) for m in moves), self.offset + sum(max(m, 0) for m in moves)

    def on(self, axes: Iterable[int]) -> bool:
        """Does it move with one of these axes?"""
        wanted = set(axes)
        return any(a in wanted for a, _ in self.terms)


ZERO = Index()


def make(terms: dict[int, int], offset: int = 0) -> Index:
    return Index(tuple(sorted((a, c) for a, c in terms.items() if c)), offset)


def flatten(at: Sequence[Index], strides: Sequence[int]) -> Index:
    """The one index of an element at `at` in memory of these strides."""
    total = ZERO
    for index, stride in zip(at, strides, strict=True):
        total = total + index * stride
    return total


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def split(flat: Index, shape: Sequence[int], sizes: Sequence[int]) -> tuple[Index, ...]:
    """One index for each dim of `shape`, of a row-major flat index. sizes: of the axes.

    Raises:  NotLinear: a dim's share is no linear form.
    """
    found: list[Index] = []
    rest = flat
    for size in reversed(shape):
        if size == 1:
            found.append(ZERO)
            continue
        quotient = {a: c // size for a, c in rest.terms if c % size == 0}
        remainder = {a: c for a, c in rest.terms if c % size}
        offset_q, offset_r = divmod(rest.offset, size)
        part = make(remainder, offset_r)
        low, high = part.span(sizes)
        if low < 0 or high >= size:
            raise NotLinear(f"a dim of {size} is cut across the axes {tuple(sizes)}")
        found.append(part)
        rest = make(quotient, offset_q)
    if rest.terms or rest.offset:
        raise NotLinear(f"the index leaves the shape {tuple(shape)}")
    return tuple(reversed(found))


def common_axes(shapes: Iterable[Sequence[int]], wished: Iterable[Sequence[int]], total: int) -> tuple[int, ...]:
    """The coarsest axes of which the dims of all `shapes`, of `total` elements each, are products of neighbours; and
    of those of `wished`, too, that fit.

    Raises:  NotLinear: there are none (shapes 6 x 4 and 4 x 6 share no grid).
    """
    cuts = {1, total}
    for shape in shapes:
        cuts |= _cuts(shape)
        for small, large in itertools.pairwise(sorted(cuts)):
            if large % small:
                raise NotLinear(f"shapes cut {total} elements at both {small} and {large}")
    for shape in wished:
        more = sorted(cuts | _cuts(shape))
        if all(large % small == 0 for small, large in itertools.pairwise(more)):
            cuts |= set(more)
    return tuple(large // small for small, large in itertools.pairwise(sorted(cuts)))[::-1]


def _cuts(shape: Sequence[int]) -> set[int]:
    return set(dense_strides(shape)) | {math.prod(shape)}
