"""Layouts that know their gradient, and the one table of moves between them.

For one tensor and one mesh axis of n ranks there are four placements:

    I      invariant: the same value on every rank; so is its gradient
    R      replicated: the same value on every rank; each rank holds a part of the gradient, the sum is the gradient
    S      sharded: split along one part of one dim; so is its gradient
    P      partial: each rank holds a part, the sum is the value; its gradient is the same on every rank

A dim is seen as a product of *parts*: the rows of a fused projection are `(3, heads, head_dim)`, a flattened batch is
`(batch, sequence)`. `S(j)` cuts part `j` (counted over all dims) in chunks of ceil(size / n), so a size that n does not
divide gives uneven, perhaps empty, shards. Several axes may cut one part: they cut in the order of the mesh's axes.

`TRANSITIONS` is the only place that says which collective a move needs, forward and backward. The cost model prices
its rows, the shard pass emits them and the runtime executes them.

The placements restate the local SPMD types of Meta's `spmd_types`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """How one tensor lies on one axis: `kind` is "I", "R", "S" or "P"; `part` is the part that S cuts, else -1."""

    kind: str
    part: int = -1

    def __post_init__(self) -> None:
        if self.kind not in "IRSP" or (self.kind == "S") != (self.part >= 0):
            raise ValueError(f"no such placement: {self.kind}({self.part})")

    def __repr__(self) -> str:
        return f"S({self.part})" if self.kind == "S" else self.kind


I = Placement("I")  # noqa: E741 - the field's own letter
R = Placement("R")
P = Placement("P")


def S(part: int) -> Placement:
    """The placement that cuts part `part`."""
    return Placement("S", part)


Layout = tuple[Placement, ...]
"""One placement for each axis of the logical mesh, in its order."""


@dataclass(frozen=True)
class Parts:
    """A shape whose dims are products of parts: `((4,), (3, 8, 64))` is a tensor of shape (4, 1536)."""

    dims: tuple[tuple[int, ...], ...]

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """The sizes of all parts, dims in order."""
        return tuple(size for dim in self.dims for size in dim)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(dim) for dim in self.dims)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of the first part of each dim."""
        return tuple(sum(map(len, self.dims[:d])) for d in range(len(self.dims)))

    def dim_of(self, part: int) -> int:
        return max(d for d, start in enumerate(self.starts) if start <= part and self.dims[d])

    def with_flat(self, flat: Sequence[int]) -> Parts:
        """The same dims with other part sizes."""
        taken = iter(flat)
        return Parts(tuple(tuple(next(taken) for _ in dim) for dim in self.dims))

    @property
    def numel(self) -> int:
        return math.prod(self.flat)

    def name(self, placement: Placement) -> str:
        """`S(dim)` or `S(dim, blocks)` as users write it; I, R and P as they are."""
        if placement.kind != "S":
            return placement.kind
        dim = self.dim_of(placement.part)
        outer = math.prod(self.flat[self.starts[dim] : placement.part])
        return f"S({dim})" if outer == 1 else f"S({dim},{outer})"


def whole(shape: Sequence[int]) -> Parts:
    """Parts of a shape whose dims are not divided."""
    return Parts(tuple((int(size),) for size in shape))


@lru_cache(maxsize=65536)
def chunk(size: int, ranks: int, index: int) -> tuple[int, int]:
    """(first, length) of shard `index` when `size` is cut in `ranks` chunks of ceil(size / ranks), the last ones
    shorter.
    """
    step = -(-size // ranks)
    first = min(index * step, size)
    return first, min(step, size - first)


@lru_cache(maxsize=65536)
def local_parts(parts: Parts, layout: Layout, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Parts:
    """Part sizes of the shard at `coordinate`. sizes: ranks of each axis."""
    flat = list(parts.flat)
    for placement, ranks, index in zip(layout, sizes, coordinate, strict=True):
        if placement.kind == "S":
            flat[placement.part] = chunk(flat[placement.part], ranks, index)[1]
    return parts.with_flat(flat)


def largest_local_parts(parts: Parts, layout: Layout, sizes: tuple[int, ...]) -> Parts:
    """Part sizes of the largest shard (that of the first rank)."""
    return local_parts(parts, layout, sizes, (0,) * len(sizes))


def part_offset(parts: Parts, layout: Layout, sizes: tuple[int, ...], coordinate: tuple[int, ...], part: int) -> int:
    """First global index along `part` that the shard at `coordinate` holds."""
    offset, size = 0, parts.flat[part]
    for placement, ranks, index in zip(layout, sizes, coordinate, strict=True):
        if placement.kind == "S" and placement.part == part:
            first, size = chunk(size, ranks, index)
            offset += first
    return offset


def shard_of(
    full: torch.Tensor, parts: Parts, layout: Layout, sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> torch.Tensor:
    """The shard of a full tensor that lies at `coordinate`; P keeps the value at index 0 and zeros elsewhere."""
    out = full.reshape(parts.flat)
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            out = out.narrow(placement.part, *chunk(out.shape[placement.part], sizes[axis], coordinate[axis]))
        elif placement.kind == "P" and coordinate[axis]:
            out = torch.zeros_like(out)
    return out.reshape(local_parts(parts, layout, sizes, coordinate).shape)


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table. Primitives: nothing, all_reduce, all_gather, reduce_scatter, all_to_all, slice, pad, keep."""

    forward: str
    backward: str


TRANSITIONS: dict[tuple[str, str], Transition] = {
    ("I", "R"): Transition("nothing", "all_reduce"),
    ("I", "S"): Transition("slice", "all_gather"),
    ("I", "P"): Transition("keep", "nothing"),
    ("R", "I"): Transition("nothing", "keep"),
    ("R", "S"): Transition("slice", "pad"),
    ("R", "P"): Transition("keep", "keep"),
    ("S", "I"): Transition("all_gather", "slice"),
    ("S", "R"): Transition("all_gather", "reduce_scatter"),
    ("S", "S"): Transition("all_to_all", "all_to_all"),
    ("S", "P"): Transition("pad", "slice"),
    ("P", "I"): Transition("all_reduce", "nothing"),
    ("P", "R"): Transition("all_reduce", "all_reduce"),
    ("P", "S"): Transition("reduce_scatter", "all_gather"),
}

GRADIENT = {"I": "I", "R": "P", "S": "S", "P": "I"}
"""Kind of a placement's gradient. The backward column above is the forward of the move GRADIENT[to] -> GRADIENT[from].
"""

FREE = frozenset({"nothing", "slice", "pad", "keep"})
"""Primitives that send nothing."""


def moved_bytes(primitive: str, full_bytes: float, ranks: int) -> float:
    """Bytes that one rank sends in a primitive, by the bandwidth-optimal (ring) algorithms.

    all_reduce 2(n-1)/n, all_gather and reduce_scatter (n-1)/n of the full buffer, all_to_all (n-1)/n of the local one
    (full_bytes is then the local buffer), the others nothing.
    """
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(
        primitive, 0.0
    ) * full_bytes
