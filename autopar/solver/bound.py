"""A lower bound, for the whole and for each option, on graphs of any width, and a cheap assignment.

Enters: `Priced` costs. Leaves: `Minimum`: an assignment, a proven bound, and lower bounds a choice and option, with
which the driver throws options out. Refuses: nothing; time that runs out leaves a weaker bound.

The bound is the dual of the linear relaxation over layouts, raised one choice at a time (sequential tree-reweighted
message passing). Costs move between a choice s and its edges e without changing any assignment's cost:

    f_s(o) = cost_s(o) + sum_e u_e,s[layout_e(o)]        E_e[r, c] = cost_e[r, c] - u_e,s[r] - u_e,t[c]
    collect   u_e,t[c] <- min_r (cost_e[r, c] - u_e,s[r])             from edges to choices already visited
    push      u_e,s[r] -= g_s min_{o in r} f_s(o),  g_s = 1 / max(edges ahead, edges behind)
    bound     sum_s min f_s after a whole pass: every edge was collected, so min E_e = 0            (`_Ascent.sweep`)
    option    bound of the pass before + f_s(o) - min f_s, where s is visited

Source: Kolmogorov 2006, "Convergent tree-reweighted message passing", section 4, with layouts in place of labels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.eliminate import WORK, Priced, PricedEdge, eliminate, elimination_order
from autopar.solver.problem import Floats, Ints

EASY_WORK = 5e7  # additions; below it elimination is quicker than any bound
SWEEPS = 60
ROUNDING = 1e-11  # relative error of a bound's sum; options are thrown out only beyond it

Messages = list[list[Floats]]  # for each edge: u to its source, u to its target


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """options: the cheapest assignment found; value: its cost; bound: no assignment costs less; exact: they agree.

    lower: float64 [k] for each choice, no assignment with that option costs less; None when elimination was enough.
    """

    options: tuple[int, ...]
    value: float
    bound: float
    exact: bool
    lower: tuple[Floats, ...] | None = None


class _Ascent:
    """Messages of one problem, raised sweep by sweep."""

    def __init__(self, priced: Priced, messages: Messages | None = None) -> None:
        self.priced = priced
        self.around: list[list[tuple[int, int]]] = [[] for _ in priced.costs]  # (edge, side the choice is on)
        for i, e in enumerate(priced.edges):
            self.around[e.source].append((i, 0))
            self.around[e.target].append((i, 1))
        self.tables = [(e.cost, np.ascontiguousarray(e.cost.T)) for e in priced.edges]  # [own layout, other's]
        self.layouts = [(e.source_layout, e.target_layout) for e in priced.edges]
        self.groups = [tuple(_groups(layout) for layout in pair) for pair in self.layouts]
        self.messages = messages or [[np.zeros(n) for n in e.cost.shape] for e in priced.edges]
        self.bound = -math.inf
        self.lower = [np.full(cost.size, -math.inf) for cost in priced.costs]

    def other(self, edge: int, side: int) -> int:
        e = self.priced.edges[edge]
        return e.source if side else e.target

    def sweep(self, *, forward: bool) -> list[int]:
        """One pass over the choices; raises `bound` and `lower`, returns the assignment read off on the way."""
        n = len(self.around)
        chosen = [-1] * n
        total = 0.0
        for s in range(n) if forward else reversed(range(n)):
            behind: list[tuple[int, int]] = []
            ahead: list[tuple[int, int]] = []
            for edge, side in self.around[s]:
                (ahead if (self.other(edge, side) > s) == forward else behind).append((edge, side))
            own = self.priced.costs[s].copy()
            for edge, side in ahead:
                own += self.messages[edge][side][self.layouts[edge][side]]
            reached = own.copy()
            for edge, side in behind:
                table, there = self.tables[edge][1 - side], self.messages[edge][1 - side]
                self.messages[edge][side] = (table - there[:, None]).min(axis=0)
                own += self.messages[edge][side][self.layouts[edge][side]]
                at = self.layouts[edge][1 - side][chosen[self.other(edge, side)]]
                reached += table[at][self.layouts[edge][side]]
            chosen[s] = int(np.argmin(reached))
            np.maximum(self.lower[s], self.bound + own - own.min(), out=self.lower[s])
            share = 1.0 / max(len(ahead), len(behind), 1)
            full = own.copy()
            for edge, side in ahead:
                least = share * _group_min(full, self.groups[edge][side])
                self.messages[edge][side] = self.messages[edge][side] - least
                own -= least[self.layouts[edge][side]]
            total += float(own.min())
        self.bound = max(self.bound, total)
        return chosen


def minimise(
    priced: Priced,
    deadline_s: float,
    *,
    messages: Messages | None = None,
    bounds: bool = False,
    start: Sequence[int] | None = None,
    enough: float = math.inf,
) -> Minimum:
    """The cheapest assignment and a bound.

    Args:    deadline_s: on `time.monotonic`'s clock. messages: of an earlier call on the same edges; overwritten in
             place, so that the next call starts from there. bounds: give `lower` even where elimination is enough.
             start: an assignment to begin with. enough: a bound of this much ends the search for a better one.
    """
    if not bounds:
        order = elimination_order(priced, work=EASY_WORK)
        if order is not None:
            options = eliminate(priced, order)
            value = priced.value(options)
            return Minimum(options, value, value, True)
    ascent = _Ascent(priced, messages)
    best = tuple(start) if start is not None else (0,) * len(priced.costs)
    value = priced.value(best)
    last = -math.inf
    for count in range(SWEEPS):
        decoded = descend(priced, ascent.sweep(forward=count % 2 == 0))
        if (found := priced.value(decoded)) < value:
            best, value = tuple(decoded), found
        if ascent.bound >= enough:
            return Minimum(best, value, ascent.bound, False, tuple(ascent.lower))
        if time.monotonic() > deadline_s:
            break
        if count % 4 == 3:
            if ascent.bound - last < 1e-3 * (value - ascent.bound) + ROUNDING * abs(value):
                break
            last = ascent.bound
    if messages is not None:
        messages[:] = ascent.messages
    best, value = _beam(priced, ascent.lower, best, value, deadline_s)
    keep = surviving(ascent.lower, value)
    bound, exact = min(ascent.bound, value), False
    if all(k.size for k in keep):  # else nothing beats `best`
        smaller = narrowed(priced, keep)
        order = elimination_order(smaller) if time.monotonic() < deadline_s else None
        if order is not None:
            options = tuple(int(k[o]) for k, o in zip(keep, eliminate(smaller, order), strict=True))
            if (found := priced.value(options)) < value:
                best, value = options, found
            bound, exact = value, True
    else:
        bound, exact = value, True
    return Minimum(best, value, bound, exact, tuple(ascent.lower))


def surviving(lower: Sequence[Floats], value: float) -> list[Ints]:
    """Options that could be part of an assignment cheaper than `value`."""
    slack = ROUNDING * abs(value)
    return [np.flatnonzero(low <= value + slack) for low in lower]


def narrowed(priced: Priced, keep: Sequence[Ints]) -> Priced:
    """The same costs over fewer options; unused rows and columns go."""
    edges = []
    for e in priced.edges:
        rows, source_layout = np.unique(e.source_layout[keep[e.source]], return_inverse=True)
        columns, target_layout = np.unique(e.target_layout[keep[e.target]], return_inverse=True)
        edges.append(PricedEdge(e.source, e.target, source_layout, target_layout, e.cost[np.ix_(rows, columns)]))
    return Priced(tuple(cost[k] for cost, k in zip(priced.costs, keep, strict=True)), tuple(edges))


def descend(priced: Priced, options: Sequence[int], *, rounds: int = 20) -> list[int]:
    """Change one choice at a time while that is cheaper."""
    out = list(options)
    around: list[list[PricedEdge]] = [[] for _ in out]
    for e in priced.edges:
        around[e.source].append(e)
        around[e.target].append(e)
    todo = set(range(len(out)))
    for _ in range(rounds * len(out)):
        if not todo:
            break
        s = min(todo)
        todo.discard(s)
        total = conditional(priced, around[s], s, out)
        best = int(np.argmin(total))
        if total[best] < total[out[s]]:
            out[s] = best
            todo |= {e.target if e.source == s else e.source for e in around[s]}
    return out


def conditional(priced: Priced, edges: Sequence[PricedEdge], s: int, options: Sequence[int]) -> Floats:
    """[k]: what each option of choice s costs with its edges, the neighbours held at `options`."""
    total = priced.costs[s].copy()
    for e in edges:
        if e.source == s:
            total += e.cost[:, e.target_layout[options[e.target]]][e.source_layout]
        else:
            total += e.cost[e.source_layout[options[e.source]]][e.target_layout]
    return total


def _beam(
    priced: Priced, lower: Sequence[Floats], best: tuple[int, ...], value: float, deadline_s: float
) -> tuple[tuple[int, ...], float]:
    """Exact elimination over the few most promising options of each choice: a good assignment, not a bound."""
    for width in (24, 12, 6, 3):
        keep = [
            np.unique(np.append(np.argsort(low, kind="stable")[:width], o)) for low, o in zip(lower, best, strict=True)
        ]
        few = narrowed(priced, keep)
        if time.monotonic() > deadline_s:
            break
        order = elimination_order(few, work=WORK / 4)
        if order is not None:
            options = tuple(int(k[o]) for k, o in zip(keep, eliminate(few, order), strict=True))
            found = priced.value(options)
            return (options, found) if found < value else (best, value)
    return best, value


def _groups(layout: Ints) -> tuple[Ints, Ints, Ints]:
    """(options sorted by layout, where each layout that occurs starts, those layouts)."""
    order = np.argsort(layout, kind="stable")
    present, starts = np.unique(layout[order], return_index=True)
    return order, starts, present


def _group_min(values: Floats, groups: tuple[Ints, Ints, Ints]) -> Floats:
    """[layouts]: the least value of the options with that layout; every layout of a reduced edge occurs."""
    order, starts, _ = groups
    return np.minimum.reduceat(values[order], starts)
