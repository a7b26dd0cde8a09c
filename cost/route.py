"""The cheapest chain of one-axis transitions between two layouts of one value, and its price.

What enters: a value's parts, element size, whether it takes a gradient, the mesh and its profile. What leaves: a `Routes` with the
cost of every pair of layouts and the chain itself. The planner pays these prices and the shard pass walks these chains, so
that what was priced is what runs.

A transition on one axis may not gather an axis whose part a later axis cuts further (axes cut in mesh order), so such a
chain first gathers the inner one; the shortest path finds that by itself.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from autopar.cost.collective import collective_s
from autopar.cost.compute import memory_bound_s
from autopar.cost.hardware import Profile
from autopar.layout import GRADIENT, TRANSITIONS, I, Layout, P, Parts, Placement, R, S, chunk
from autopar.mesh import LogicalMesh

STEP_S = 1e-8
"""Least price of a transition, so that chains have no loops and ties go to the shorter one."""


@dataclass(frozen=True, eq=False)
class Routes:
    """All layouts of one kind of value and the prices between them."""

    states: tuple[Layout, ...]
    index: dict[Layout, int]
    step_s: np.ndarray
    """[from, to] seconds of a single transition, forward and backward; inf where none joins the two."""
    cost_s: np.ndarray
    """[from, to] seconds of the cheapest chain."""

    def between(self, source: Layout, target: Layout) -> float:
        return float(self.cost_s[self.index[source], self.index[target]])

    def path(self, source: Layout, target: Layout) -> tuple[Layout, ...]:
        """The layouts after each transition, the last one being `target`; empty when nothing is to do."""
        at, goal = self.index[source], self.index[target]
        out = []
        while at != goal:
            at = int(np.argmin(self.step_s[at] + self.cost_s[:, goal] + 1e9 * (np.arange(len(self.states)) == at)))
            out.append(self.states[at])
        return tuple(out)


@functools.lru_cache(maxsize=4096)
def routes(parts: Parts, element_bytes: int, takes_gradient: bool, cut: tuple[int, ...], mesh: LogicalMesh, profile: Profile) -> Routes:
    """Routes of a value. cut: the flat parts that some layout cuts; others stay whole."""
    kinds = [I, P, *([R] if takes_gradient else []), *(S(part) for part in cut)]
    states = tuple(s for s in itertools.product(kinds, repeat=len(mesh.axes)))
    index = {s: i for i, s in enumerate(states)}
    step = np.full((len(states), len(states)), np.inf)
    np.fill_diagonal(step, 0.0)
    pricer = _Pricer(parts, element_bytes, takes_gradient, mesh, profile)
    for i, state in enumerate(states):
        for axis in range(len(mesh.axes)):
            if any(later == state[axis] and later.kind == "S" for later in state[axis + 1 :]):
                continue  # a later axis cuts my part further
            for target in kinds:
                if target == state[axis] or (target.kind == "S" and target in state[axis + 1 :]):
                    continue
                step[i, index[(*state[:axis], target, *state[axis + 1 :])]] = pricer.price(state, axis, target)
    cost = step.copy()
    for k in range(len(states)):  # Floyd-Warshall, a row of pairs at a time
        np.minimum(cost, cost[:, k, None] + cost[None, k, :], out=cost)
    return Routes(states, index, step, cost)


@dataclass(frozen=True, slots=True, eq=False)
class _Pricer:
    parts: Parts
    element_bytes: int
    takes_gradient: bool
    mesh: LogicalMesh
    profile: Profile

    def price(self, state: Layout, axis: int, target: Placement) -> float:
        """Seconds of one transition on one axis, forward and backward."""
        uncut = self.uncut_bytes(state, axis)
        forward = self.primitive_s(TRANSITIONS[state[axis].kind, target.kind].forward, uncut, axis)
        if not self.takes_gradient:
            return forward
        back_from, back_to = (GRADIENT[target.kind], GRADIENT[state[axis].kind])
        same = back_from == back_to and back_from != "S"
        backward = "nothing" if same else TRANSITIONS[back_from, back_to].forward
        return forward + self.primitive_s(backward, uncut, axis)

    def uncut_bytes(self, state: Layout, axis: int) -> float:
        """Bytes of the largest local tensor as if `axis` did not cut."""
        flat = list(self.parts.flat)
        for other, placement in enumerate(state):
            if other != axis and placement.kind == "S":
                flat[placement.part] = chunk(flat[placement.part], self.mesh.axes[other].size, 0)[1]
        return float(np.prod(flat)) * self.element_bytes

    def primitive_s(self, primitive: str, uncut_bytes: float, axis: int) -> float:
        ranks = self.mesh.axes[axis].size
        if primitive == "nothing":
            return STEP_S
        if primitive in ("slice", "pad", "keep"):
            moved = uncut_bytes / ranks if primitive == "slice" else uncut_bytes
            return STEP_S + float(memory_bound_s(2 * moved, self.profile))
        size = uncut_bytes / ranks if primitive == "all_to_all" else uncut_bytes
        return STEP_S + float(collective_s(primitive, size, self.mesh.axes[axis], self.profile))
