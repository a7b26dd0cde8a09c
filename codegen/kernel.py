"""A kernel as data: loops, loads, computed values, reductions and stores. `build` makes it, `triton_text` prints it.

A kernel runs over row axes and column axes. A value is one number for each (row, column), for each row, for each
column, or one for all: as the steps it is made of say. `Reduce` makes a row's number of its columns, within a tile;
a column sum leaves a column's number of all rows, in two deterministic steps. Without row axes the columns are one
flat range.

Values are numbers of one kind: "f32" (half precision too: loaded, computed with, and rounded once when stored), "f64",
"i32", "i64" or "i1".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from autopar.codegen.index import Index, make

KINDS = {
    torch.float32: "f32",
    torch.bfloat16: "f32",
    torch.float16: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
"""Kind of a value by the dtype of its tensor. Other dtypes are left to ATen."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a kernel reads or writes. shape, strides: in elements, as known when the program was lowered."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its distinct elements: a broadcast dim counts once."""
        return math.prod(n for n, s in zip(self.shape, self.strides, strict=True) if s) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Condition:
    """low <= index < high."""

    index: Index
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Load:
    """The element of `buffer` at `at`, plus value x stride for each of `gather`: (value, stride, places); 0 where a
    condition fails."""

    buffer: int
    at: Index
    where: tuple[Condition, ...] = ()
    gather: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Literal:
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class Position:
    """The index itself as a number (what `arange` gives)."""

    at: Index


@dataclass(frozen=True, slots=True)
class Inside:
    """Do all conditions hold?"""

    where: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """A formula of `formulas` applied to earlier steps."""

    formula: str
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Over the columns. how: "sum"; "max" of a softmax; "amax" or "amin", of which a NaN is not lost."""

    how: str
    arg: int


@dataclass(frozen=True, slots=True)
class Bits:
    """32 random bits of the element at `at` (see runtime/random.py). key: which of the kernel's keys."""

    key: int
    at: Index


Does = Load | Literal | Position | Inside | Apply | Reduce | Bits


@dataclass(frozen=True, slots=True)
class Step:
    """One value. kind: see the module docstring. name: of the op it belongs to. note: that op, and the user's line."""

    does: Does
    kind: str
    name: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """value: the step whose value is written to `buffer` at `at`."""

    value: int
    buffer: int
    at: Index


@dataclass(frozen=True, slots=True)
class ColumnSum:
    """The sum over all rows of the step `value`, to the dense `buffer` of a number for each column."""

    value: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """axes: sizes of the loops, the first `rows` of them rows. buffers: what is read, then what is written.
    keys: how many keys of random numbers it is handed."""

    axes: tuple[int, ...]
    rows: int
    buffers: tuple[Buffer, ...]
    inputs: int
    """How many of the buffers are read."""
    steps: tuple[Step, ...]
    stores: tuple[Store, ...]
    sums: tuple[ColumnSum, ...] = ()
    keys: int = 0
    names: tuple[str, ...] = field(default=())
    """Op names, for the name of the kernel."""

    @property
    def row_count(self) -> int:
        return math.prod(self.axes[: self.rows])

    @property
    def column_count(self) -> int:
        return math.prod(self.axes[self.rows :])

    @property
    def reduces(self) -> bool:
        return any(isinstance(s.does, Reduce) for s in self.steps)

    @property
    def written(self) -> tuple[int, ...]:
        """The steps that are stored or summed up."""
        return (*(s.value for s in self.stores), *(s.value for s in self.sums))

    @property
    def moves(self) -> tuple[tuple[bool, bool], ...]:
        """For each step: does its value change with the row, with the column?"""
        found: list[tuple[bool, bool]] = []
        for step in self.steps:
            row, column = False, False
            for index in indices(step.does):
                row |= index.on(range(self.rows))
                column |= index.on(range(self.rows, len(self.axes)))
            for arg in args_of(step.does):
                row, column = row | found[arg][0], column | found[arg][1]
            found.append((row, column and not isinstance(step.does, Reduce)))
        return tuple(found)


def args_of(does: Does) -> tuple[int, ...]:
    """The steps that a step reads."""
    if isinstance(does, Apply):
        return does.args
    if isinstance(does, Reduce):
        return (does.arg,)
    return tuple(v for v, _, _ in does.gather) if isinstance(does, Load) else ()


def indices(does: Does) -> tuple[Index, ...]:
    """The index forms of a step, those of its conditions among them."""
    if isinstance(does, Load):
        return (does.at, *(c.index for c in does.where))
    if isinstance(does, (Position, Bits)):
        return (does.at,)
    return tuple(c.index for c in does.where) if isinstance(does, Inside) else ()


def without_unread(kernel: Kernel) -> Kernel:
    """Without steps that nothing is made of."""
    kept: set[int] = set()
    stack = list(kernel.written)
    while stack:
        place = stack.pop()
        if place not in kept:
            kept.add(place)
            stack += args_of(kernel.steps[place].does)
    if len(kept) == len(kernel.steps):
        return kernel
    new = {old: i for i, old in enumerate(sorted(kept))}
    return replace(
        kernel,
        steps=tuple(replace(kernel.steps[old], does=_renumbered(kernel.steps[old].does, new)) for old in new),
        stores=tuple(replace(s, value=new[s.value]) for s in kernel.stores),
        sums=tuple(replace(s, value=new[s.value]) for s in kernel.sums),
    )


def _renumbered(does: Does, new: Mapping[int, int]) -> Does:
    if isinstance(does, Apply):
        return Apply(does.formula, tuple(new[a] for a in does.args))
    if isinstance(does, Reduce):
        return Reduce(does.how, new[does.arg])
    if isinstance(does, Load):
        return replace(does, gather=tuple((new[v], stride, places) for v, stride, places in does.gather))
    return does


def merge_axes(kernel: Kernel) -> Kernel:
    """Join neighbouring axes that every index passes through as one, so that fewer divisions are printed."""
    forms = [i for s in kernel.steps for i in indices(s.does)] + [s.at for s in kernel.stores]
    axes, rows, kept = list(kernel.axes), kernel.rows, list(range(len(kernel.axes)))
    coefficients = [dict(f.terms) for f in forms]
    for right in range(len(axes) - 1, 0, -1):
        left = right - 1
        if right == rows or left not in kept:
            continue
        if all(c.get(left, 0) == c.get(right, 0) * axes[right] for c in coefficients):
            axes[left] *= axes[right]
            for c in coefficients:
                c[left] = c.pop(right, 0)
            kept.remove(right)
    if len(kept) == len(kernel.axes):
        return kernel
    place = {axis: i for i, axis in enumerate(kept)}
    renamed = {f: make({place[a]: n for a, n in c.items()}, f.offset) for f, c in zip(forms, coefficients, strict=True)}
    return Kernel(
        tuple(axes[a] for a in kept),
        sum(a < rows for a in kept),
        kernel.buffers,
        kernel.inputs,
        tuple(Step(_moved(s.does, renamed), s.kind, s.name, s.note) for s in kernel.steps),
        tuple(Store(s.value, s.buffer, renamed[s.at]) for s in kernel.stores),
        kernel.sums,
        kernel.keys,
        kernel.names,
    )


def _moved(does: Does, renamed: dict[Index, Index]) -> Does:
    def conditions(where: tuple[Condition, ...]) -> tuple[Condition, ...]:
        return tuple(Condition(renamed[c.index], c.low, c.high) for c in where)

    if isinstance(does, Load):
        return Load(does.buffer, renamed[does.at], conditions(does.where), does.gather)
    if isinstance(does, Position):
        return Position(renamed[does.at])
    if isinstance(does, Bits):
        return Bits(does.key, renamed[does.at])
    return Inside(conditions(does.where)) if isinstance(does, Inside) else does
