"""The cheapest chain of one-axis transitions between two layouts of one value, and its price.

What enters: a value's parts, element size, whether it takes a gradient, the mesh and its profile. What leaves: a
    `Routes` with the
cost of every pair of layouts and the chain itself. The planner pays these prices and the shard pass walks these
chains, so
that what was priced is what runs.

A transition on one axis may not gather an axis whose part a later axis cuts further (axes cut in mesh order), so such a
chain first gathers the inner one; the shortest path finds that by itself.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost.collective import collective_s
from autopar.cost.compute import memory_bound_s
from autopar.cost.hardware import Profile
from autopar.layout import FREE, TRANSITIONS, I, Layout, P, Parts, Placement, R, S
from autopar.mesh import Axis, LogicalMesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEP_S = 1e-8
"""Least price of a transition, so that chains have no loops and ties go to the shorter one."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How collectives of one kind of value run.

    sync_s: what one costs besides its time on the wire. share: of its time that is felt where it runs beside compute.
    shown: share of one gather and one reduction that nothing hides, since they are the first and the last.
    together: one sends so many times this value, the others of its block; not on a tensor axis. copied: and what it
    takes to put them together and apart again is not part of `share`. reduced: width of a gradient over that of the
    value. pieces: parts that the value is sent in, one for each micro-batch. again: it is sent whole so many times,
    once for each micro-batch. after: what costs nothing forward has its backward once, after all of them, beside
    nothing. alone: so does everything, forwards before and backwards after the step's programs.
    """

    sync_s: float = 0.0
    share: float = 1.0
    shown: float = 0.0
    together: float = 1.0
    copied: bool = False
    reduced: float = 1.0
    pieces: int = 1
    again: int = 1
    after: bool = False
    alone: bool = False


IN_LINE = Wire()


@dataclass(frozen=True, eq=False)
class Routes:
    """All layouts of one kind of value and the prices between them."""

    states: tuple[Layout, ...]
    index: dict[Layout, int]
    step_s: Floats
    """[from, to] seconds of a single transition, forward and backward; inf where none joins the two."""
    cost_s: Floats
    """[from, to] seconds of the cheapest chain."""
    ahead_s: Floats
    """[from, to] seconds of the forward's share of a single transition, made once."""
    wire: Wire

    def between(self, source: Layout, target: Layout) -> float:
        return float(self.cost_s[self.index[source], self.index[target]])

    def forward_s(self, source: Layout, target: Layout) -> float:
        """The forward's share of `between`, made once."""
        total, at = 0.0, self.index[source]
        for layout in self.path(source, target):
            total += float(self.ahead_s[at, self.index[layout]])
            at = self.index[layout]
        return total

    def path(self, source: Layout, target: Layout) -> tuple[Layout, ...]:
        """The layouts after each transition, the last one being `target`; empty when nothing is to do."""
        at, goal = self.index[source], self.index[target]
        out = []
        while at != goal:
            at = int(np.argmin(self.step_s[at] + self.cost_s[:, goal] + 1e9 * (np.arange(len(self.states)) == at)))
            out.append(self.states[at])
        return tuple(out)


@functools.lru_cache(maxsize=4096)
def routes(
    parts: Parts,
    element_bytes: int,
    takes_gradient: bool,
    cut: tuple[int, ...],
    mesh: LogicalMesh,
    profile: Profile,
    forwards: int = 1,
    wire: Wire = IN_LINE,
) -> Routes:
    """Routes of a value. cut: the flat parts that some layout cuts; others stay whole. forwards: 2 where the backward
    makes the transition again.
    """
    kinds = [I, P, *([R] if takes_gradient else []), *(S(part) for part in cut)]
    states = tuple(itertools.product(kinds, repeat=len(mesh.axes)))
    codes = np.array(list(itertools.product(range(len(kinds)), repeat=len(mesh.axes))), dtype=np.int64).reshape(
        len(states), len(mesh.axes)
    )
    step = np.full((len(states), len(states)), np.inf)
    ahead = np.zeros_like(step)
    np.fill_diagonal(step, 0.0)
    for axis, logical in enumerate(mesh.axes):
        uncut_bytes = _uncut_bytes(parts, kinds, codes, axis, mesh) * element_bytes
        inner = [np.any(codes[:, axis + 1 :] == k, axis=1) for k in range(len(kinds))]
        price = _Prices(logical, profile, wire, uncut_bytes)
        stride = len(kinds) ** (len(mesh.axes) - 1 - axis)
        for (i, source), (j, target) in itertools.permutations(enumerate(kinds), 2):
            rows = codes[:, axis] == i
            if source.kind == "S":
                rows &= ~inner[i]  # a later axis cuts my part further
            if target.kind == "S":
                rows &= ~inner[j]
            at = np.flatnonzero(rows)
            strided = any(p.kind == "S" and math.prod(parts.flat[: p.part]) > 1 for p in (source, target))
            forward_s, backward_s = (every[at] for every in price.transition_s(source, target, strided))
            ahead[at, at + (j - i) * stride] = forward_s
            backward_s = backward_s if takes_gradient else 0.0 * backward_s
            shown_s = (forward_s + backward_s) * wire.shown / wire.share if gathers(source, target) else 0.0
            step[at, at + (j - i) * stride] = forwards * forward_s + backward_s + shown_s
    cost = step.copy()
    for k in range(len(states)):  # Floyd-Warshall, a row of pairs at a time
        np.minimum(cost, cost[:, k, None] + cost[None, k, :], out=cost)
    return Routes(states, {s: i for i, s in enumerate(states)}, step, cost, ahead, wire)


def gathers(source: Placement, target: Placement) -> bool:
    """Does this transition make a whole value of shards?"""
    return TRANSITIONS[source.kind, target.kind].forward == "all_gather"


def _uncut_bytes(parts: Parts, kinds: list[Placement], codes: Ints, axis: int, mesh: LogicalMesh) -> Floats:
    """For each state the elements of the largest local tensor as if `axis` did not cut."""
    flat = np.tile(np.array(parts.flat, dtype=np.int64), (len(codes), 1))
    for other, logical in enumerate(mesh.axes):
        for k, kind in enumerate(kinds):
            if other != axis and kind.kind == "S":
                rows = codes[:, other] == k
                flat[rows, kind.part] = -(-flat[rows, kind.part] // logical.size)
    return np.asarray(flat.prod(axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Prices:
    """Seconds of transitions on one axis, for every state; few primitives make up all transitions."""

    axis: Axis
    profile: Profile
    wire: Wire
    uncut_bytes: Floats
    """Of the buffers, when the axis does not cut them."""
    known: dict[tuple[str, bool, bool, bool], Floats] = field(default_factory=dict)

    def transition_s(self, source: Placement, target: Placement, strided: bool) -> tuple[Floats, Floats]:
        """Forward and backward. strided: a shard lies in pieces, so that a collective needs a copy into or out of
        rows.
        """
        row = TRANSITIONS[source.kind, target.kind]
        after = self.wire.after and row.forward == "nothing"
        return self._known(row.forward, strided, False, after), self._known(row.backward, strided, True, after)

    def _known(self, primitive: str, strided: bool, backward: bool, after: bool) -> Floats:
        key = primitive, strided, backward, after
        if key not in self.known:
            size = self.uncut_bytes * self.wire.reduced if backward else self.uncut_bytes
            self.known[key] = self._primitive_s(primitive, strided, size, after)
        return self.known[key]

    def _primitive_s(self, primitive: str, strided: bool, uncut_bytes: Floats, after: bool) -> Floats:
        if after:
            return self._piece_s(primitive, strided, uncut_bytes, 1.0)
        wire = self.wire
        return wire.again * wire.pieces * self._piece_s(primitive, strided, uncut_bytes / wire.pieces, wire.share)

    def _piece_s(self, primitive: str, strided: bool, uncut_bytes: Floats, share: float) -> Floats:
        if primitive == "nothing":
            return np.full(len(uncut_bytes), STEP_S)
        if primitive in FREE:
            moved = uncut_bytes / self.axis.size if primitive == "slice" else uncut_bytes
            return STEP_S + np.asarray(memory_bound_s(2 * moved, self.profile))
        size = uncut_bytes / self.axis.size if primitive == "all_to_all" else uncut_bytes
        rows = strided and primitive != "all_reduce"
        wire = self.wire
        # a tensor axis cuts most parameters of a block: the few that it leaves whole have nothing to be sent with
        together = 1.0 if self.axis.role == "tp" else wire.together
        moved = 2 * size if rows else 0.0 * size
        if wire.copied and together > 1 and primitive in ("all_gather", "reduce_scatter"):
            moved = 2 * size * (1 + 1 / self.axis.size)
        copy_s = np.asarray(memory_bound_s(moved, self.profile))
        wire_s = np.asarray(collective_s(primitive, size * together, self.axis, self.profile)) / together
        return STEP_S + copy_s + wire.sync_s + share * wire_s
