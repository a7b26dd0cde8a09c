"""The choice problem the planner asks the solver, as data.

Enters: groups that take exactly one option each (`Choice`), pairs that pay for the two layouts their ends chose
        (`Edge`), one memory row and cover rows (`Problem`). Nothing here knows a tensor.
Leaves: `Solution`, and `evaluate`, the one definition of what an assignment costs.
Refuses: arrays of unlike sizes, layouts outside their table, NaN: `ValueError` that names the choice.

    minimise    sum_c cost_c[o_c] + sum_(s,t) cost_st[row_s[o_s], column_t[o_t]]
    subject to  sum_c memory_c[o_c] + sum_(s,t) memory_st[...] <= memory_limit_bytes
                for each cover: some (c, o) in it has o_c = o
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEMORY_TOLERANCE = 1e-9  # relative: sums of float64 bytes in another order may differ by this much


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A group that takes exactly one of k options.

    Args:    cost_s: float64 [k], seconds of each option; +inf forbids it. memory_bytes: float64 [k].
    Raises:  ValueError: no option, sizes that differ, NaN or -inf.
    """

    name: str
    cost_s: Floats
    memory_bytes: Floats

    def __post_init__(self) -> None:
        _coerce(self, cost_s=np.float64, memory_bytes=np.float64)
        if self.cost_s.ndim != 1 or not self.cost_s.size or self.cost_s.shape != self.memory_bytes.shape:
            raise ValueError(
                f"choice {self.name!r}: cost_s {self.cost_s.shape} and memory_bytes {self.memory_bytes.shape} "
                "must be vectors of one length, at least 1"
            )
        for field in ("cost_s", "memory_bytes"):
            if not (getattr(self, field) > -math.inf).all():  # false for NaN too
                raise ValueError(f"choice {self.name!r}: {field} has a NaN or -inf")


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What two choices pay together: `cost_s[source_layout[o_source], target_layout[o_target]]`.

    Args:    source, target: indices of choices; equal ones make a cost of that choice alone.
             source_layout: int [k_source] -> row; target_layout: int [k_target] -> column.
             cost_s: float64 [rows, columns], seconds; +inf forbids the pair. memory_bytes: so too, or None for 0.
    Raises:  ValueError: a layout outside the table, shapes that differ, NaN, a negative or infinite entry.
    """

    source: int
    target: int
    source_layout: Ints
    target_layout: Ints
    cost_s: Floats
    memory_bytes: Floats | None = None

    def __post_init__(self) -> None:
        _coerce(self, source_layout=np.int64, target_layout=np.int64, cost_s=np.float64)
        where = f"edge {self.source} -> {self.target}"
        if self.cost_s.ndim != 2 or not (self.cost_s >= 0).all():
            raise ValueError(f"{where}: cost_s must be a matrix without NaN or negative entries")
        for side, layout, size in (
            ("source", self.source_layout, self.cost_s.shape[0]),
            ("target", self.target_layout, self.cost_s.shape[1]),
        ):
            if layout.ndim != 1 or (layout.size and not 0 <= layout.min() <= layout.max() < size):
                raise ValueError(f"{where}: {side}_layout must be a vector of indices below {size}")
        if self.memory_bytes is not None:
            _coerce(self, memory_bytes=np.float64)
            if self.memory_bytes.shape != self.cost_s.shape or not np.isfinite(self.memory_bytes).all():
                raise ValueError(f"{where}: memory_bytes must be finite and of the shape of cost_s")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Choices, edges, the memory row and the cover rows.

    Args:    memory_limit_bytes: inf leaves the memory row out.
             covers: each a tuple of (choice, option); at least one of them must be taken.
    Raises:  ValueError: an index without its choice or option, an edge whose layouts do not fit its choices.
    """

    choices: tuple[Choice, ...]
    edges: tuple[Edge, ...]
    memory_limit_bytes: float = math.inf
    covers: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __post_init__(self) -> None:
        sizes = [choice.cost_s.size for choice in self.choices]
        if math.isnan(self.memory_limit_bytes):
            raise ValueError("memory_limit_bytes is NaN")
        for edge in self.edges:
            for end, layout in ((edge.source, edge.source_layout), (edge.target, edge.target_layout)):
                if not 0 <= end < len(sizes):
                    raise ValueError(f"edge {edge.source} -> {edge.target}: there are {len(sizes)} choices")
                if layout.size != sizes[end]:
                    raise ValueError(
                        f"edge {edge.source} -> {edge.target}: {layout.size} layouts for the {sizes[end]} options "
                        f"of {self.choices[end].name!r}"
                    )
        for choice, option in (pair for cover in self.covers for pair in cover):
            if not (0 <= choice < len(sizes) and 0 <= option < sizes[choice]):
                raise ValueError(f"cover ({choice}, {option}): no such choice or option")


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment and what is proven about it.

    objective_s: its cost; bound_s: no assignment costs less; gap: (objective_s - bound_s) / |objective_s|;
    optimal: gap <= the gap asked for; solver: what settled it, one of "elimination" (exact min-sum, no memory price),
    "lagrangian" (bounds with memory priced, options dropped by them), "start" (nothing better than the given start was
    found), "highs-lp" (the relaxation was integral), "highs-mip"; time_s: seconds taken.
    """

    options: tuple[int, ...]
    objective_s: float
    bound_s: float
    gap: float
    memory_bytes: float
    solver: str
    time_s: float
    optimal: bool


def evaluate(problem: Problem, options: Sequence[int]) -> tuple[float, float]:
    """Cost in seconds (inf for a forbidden pair) and memory in bytes of an assignment, one option a choice."""
    cost_s = sum(float(choice.cost_s[o]) for choice, o in zip(problem.choices, options, strict=True))
    memory_bytes = sum(float(choice.memory_bytes[o]) for choice, o in zip(problem.choices, options, strict=True))
    for edge in problem.edges:
        at = edge.source_layout[options[edge.source]], edge.target_layout[options[edge.target]]
        cost_s += float(edge.cost_s[at])
        if edge.memory_bytes is not None:
            memory_bytes += float(edge.memory_bytes[at])
    return cost_s, memory_bytes


def fits(problem: Problem, memory_bytes: float) -> bool:
    """Whether so many bytes meet the memory row, up to the rounding of a sum."""
    return memory_bytes <= problem.memory_limit_bytes + MEMORY_TOLERANCE * abs(problem.memory_limit_bytes)


def uncovered(problem: Problem, options: Sequence[int]) -> list[int]:
    """Indices of the cover rows that an assignment leaves unmet."""
    return [i for i, cover in enumerate(problem.covers) if not any(options[c] == o for c, o in cover)]


def _coerce(record: object, **types: type) -> None:
    for field, dtype in types.items():
        object.__setattr__(record, field, np.ascontiguousarray(getattr(record, field), dtype=dtype))
