"""Exact min-sum by eliminating one choice after the other, when the graph is thin enough.

Enters: `Priced` costs (no memory row: a price of memory is already inside) and limits on the work.
Leaves: the cheapest assignment, exactly, or None when a table would pass the limits. Refuses: nothing.

    eliminate v:   T(neighbours) = min_o [ cost_v(o) + sum of tables and edges that hold v ]     (`_eliminate`)
    back:          o_v = argmin of the same sum at the neighbours' options, in reverse order
    order          the choice whose new table is smallest goes next (`elimination_order`): degrees 1 and 2 first, so
                   chains, trees and residual joins fold without growing
Source: Bertele & Brioschi 1972, "Nonserial dynamic programming".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.problem import Edge, Floats, Ints, Problem

TABLE_ENTRIES = 2_000_000  # the largest table
ALL_ENTRIES = 40_000_000  # all tables together, 320 MB
WORK = 4e8  # additions, about a second
CHUNK = 1 << 17  # entries handled at once: 1 MB stays in cache


@dataclass(frozen=True, slots=True, eq=False)
class PricedEdge:
    """`cost[source_layout[o_source], target_layout[o_target]]`, finite."""

    source: int
    target: int
    source_layout: Ints
    target_layout: Ints
    cost: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """One finite cost for everything: seconds + price x bytes. costs: float64 [k] for each choice."""

    costs: tuple[Floats, ...]
    edges: tuple[PricedEdge, ...]

    def value(self, options: Sequence[int]) -> float:
        """The cost of an assignment."""
        total = sum(float(cost[o]) for cost, o in zip(self.costs, options, strict=True))
        for e in self.edges:
            total += float(e.cost[e.source_layout[options[e.source]], e.target_layout[options[e.target]]])
        return total


def price(problem: Problem, price_s_per_byte: float, *, weight_s: float = 1.0) -> Priced:
    """weight_s x seconds + price x bytes; a forbidden pair costs more than all else together can.

    The problem must be reduced (`reduce.restrict`): no edge of a choice with itself, every layout of an edge in use.
    """

    def mixed(cost: Floats, memory: Floats | None) -> Floats:
        with np.errstate(invalid="ignore"):
            out = cost * weight_s if weight_s else np.where(np.isinf(cost), math.inf, 0.0)
        return out if memory is None or not price_s_per_byte else out + price_s_per_byte * memory

    costs = tuple(mixed(choice.cost_s, choice.memory_bytes) for choice in problem.choices)
    tables = [mixed(edge.cost_s, edge.memory_bytes) for edge in problem.edges]
    spread = sum(float(np.ptp(cost)) for cost in costs)
    allowed = [table[np.isfinite(table)] for table in tables]
    spread += sum(float(np.ptp(entries)) for entries in allowed if entries.size)
    spread = 1.001 * spread or 1.0
    for table, entries in zip(tables, allowed, strict=True):
        if entries.size != table.size:
            table[~np.isfinite(table)] = (float(entries.min()) if entries.size else 0.0) + spread
    return Priced(costs, tuple(_with_table(e, t) for e, t in zip(problem.edges, tables, strict=True)))


def elimination_order(priced: Priced, *, work: float = WORK) -> list[int] | None:
    """An order that keeps to the limits on tables and work, or None."""
    size = [cost.size for cost in priced.costs]
    near: list[set[int]] = [set() for _ in size]
    for e in priced.edges:
        near[e.source].add(e.target)
        near[e.target].add(e.source)
    left, order = set(range(len(size))), []
    entries, done = 0.0, 0.0
    while left:
        best = min(left, key=lambda v: (math.prod(size[u] for u in near[v]), v))
        table = math.prod(size[u] for u in near[best])
        entries, done = entries + table, done + table * size[best]
        if table > TABLE_ENTRIES or entries > ALL_ENTRIES or done > work:
            return None
        for u in near[best]:
            near[u] |= near[best]
            near[u] -= {u, best}
        left.remove(best)
        order.append(best)
    return order


def eliminate(priced: Priced, order: Sequence[int]) -> tuple[int, ...]:
    """The cheapest assignment, by min-sum along an order of `elimination_order`."""
    position = {v: i for i, v in enumerate(order)}
    buckets: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in order]  # tables by their first choice to go
    for v, cost in enumerate(priced.costs):
        buckets[position[v]].append(((v,), cost))
    for e in priced.edges:
        table = e.cost[np.ix_(e.source_layout, e.target_layout)]
        buckets[min(position[e.source], position[e.target])].append(((e.source, e.target), table))
    scopes = []
    for i, v in enumerate(order):
        scope = tuple(sorted({u for held, _ in buckets[i] for u in held if u != v}, key=position.__getitem__))
        buckets[i] = [_aligned(held, table, (v, *scope)) for held, table in buckets[i]]
        scopes.append(scope)
        if scope:
            sizes = [priced.costs[u].size for u in scope]
            message = _least(buckets[i], priced.costs[v].size, sizes)
            buckets[position[scope[0]]].append((scope, message))
    options = [0] * len(order)
    for i in reversed(range(len(order))):
        at = tuple(options[u] for u in scopes[i])
        total: Floats = np.zeros(1)
        for _, table in buckets[i]:
            place = tuple(o if n > 1 else 0 for o, n in zip(at, table.shape[1:], strict=True))
            total = total + np.moveaxis(table, 0, -1)[place]
        options[order[i]] = int(np.argmin(total))
    return tuple(options)


def _aligned(held: tuple[int, ...], table: Floats, scope: tuple[int, ...]) -> tuple[tuple[int, ...], Floats]:
    """The table with one dim for each choice of `scope`, of size 1 where it does not hold the choice."""
    table = table.transpose(sorted(range(len(held)), key=lambda i: scope.index(held[i])))
    sizes = iter(table.shape)
    return scope, table.reshape([next(sizes) if v in held else 1 for v in scope])


def _least(tables: Sequence[tuple[tuple[int, ...], Floats]], options: int, sizes: Sequence[int]) -> Floats:
    """min over dim 0 of the broadcast sum, a few options at a time so that the sum is never held whole."""
    step = max(1, CHUNK // math.prod(sizes))
    out = np.full(sizes, math.inf)
    ordered = sorted((table for _, table in tables), key=lambda t: t.size)
    for start in range(0, options, step):
        total: Floats = np.zeros((1,) * (1 + len(sizes)))
        for table in ordered:
            total = total + (table[start : start + step] if table.shape[0] > 1 else table)
        np.minimum(out, total.min(axis=0), out=out)
    return out


def _with_table(edge: Edge, table: Floats) -> PricedEdge:
    return PricedEdge(edge.source, edge.target, edge.source_layout, edge.target_layout, table)
