"""Reductions that keep the optimum: fewer options, fewer edges, smaller tables.

Enters: a `Problem`. Leaves: a `Reduction`: an equivalent `Problem` with the same choices, in the same order, and for
each the original index of every option kept, so that `expand` turns its assignments back.
Refuses: nothing; a choice that loses all its options raises `NoOptionError` (the driver makes the report of it).

    simplify         forbidden options go; edges of a choice with itself and edges that split into a row part and a
                     column part become costs of the choices; edges of one pair are added up over joint layouts;
                     rows and columns of a table that nobody uses, or that are equal, are joined
    restrict         keeps the given options
    drop_dominated   Goldstein's rule: option s goes when some s' has, in cost and in memory,
                         f(s) - f(s') + sum_edges min_t (E(s, t) - E(s', t)) >= 0      for every t of the neighbour
                     and stands in every cover in which s stands
                     (Goldstein 1994, "Efficient rotamer elimination", eq. 2; memory as a second criterion is ours)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.problem import Choice, Edge, Floats, Ints, Problem

DOMINANCE_WORK = 5e7  # entries compared for one choice; beyond it the rule costs more than it saves


class NoOptionError(Exception):
    """No option of a choice, or of a cover row, is left: there is no assignment. Carries a sentence that says which."""


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A smaller problem and, for each choice, the original index of each option it kept."""

    problem: Problem
    kept: tuple[Ints, ...]

    def expand(self, options: Sequence[int]) -> tuple[int, ...]:
        """The assignment in original option indices."""
        return tuple(int(kept[o]) for kept, o in zip(self.kept, options, strict=True))

    def inner(self, options: Sequence[int] | None) -> tuple[int, ...] | None:
        """The assignment in this problem's indices; None when an option of it is gone."""
        if options is None:
            return None
        out = []
        for kept, option in zip(self.kept, options, strict=True):
            at = int(np.searchsorted(kept, option))
            if at == kept.size or kept[at] != option:
                return None
            out.append(at)
        return tuple(out)

    def then(self, keep: Sequence[Ints]) -> Reduction:
        """This reduction followed by `restrict`."""
        after = restrict(self.problem, keep)
        return Reduction(after.problem, tuple(old[new] for old, new in zip(self.kept, after.kept, strict=True)))


def simplify(problem: Problem) -> Reduction:
    """Drop forbidden options and bring the edges into the smallest form. Exact."""
    return restrict(
        problem, [np.flatnonzero(np.isfinite(c.cost_s) & np.isfinite(c.memory_bytes)) for c in problem.choices]
    )


def restrict(problem: Problem, keep: Sequence[Ints]) -> Reduction:
    """The problem over the options in `keep` (indices, ascending, for each choice), in its smallest form.

    Raises:  NoOptionError: a choice or a cover row keeps no option.
    """
    for choice, kept in zip(problem.choices, keep, strict=True):
        if not kept.size:
            raise NoOptionError(f"no option of {choice.name!r} is allowed")
    cost = [choice.cost_s[kept].copy() for choice, kept in zip(problem.choices, keep, strict=True)]
    memory = [choice.memory_bytes[kept].copy() for choice, kept in zip(problem.choices, keep, strict=True)]

    by_pair: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in problem.edges:
        rows, columns = edge.source_layout[keep[edge.source]], edge.target_layout[keep[edge.target]]
        if edge.source == edge.target:
            cost[edge.source] += edge.cost_s[rows, columns]
            if edge.memory_bytes is not None:
                memory[edge.source] += edge.memory_bytes[rows, columns]
            continue
        edge = _joined_rows(replace(edge, source_layout=rows, target_layout=columns))
        by_pair[min(edge.source, edge.target), max(edge.source, edge.target)].append(edge)

    edges = []
    for pair in sorted(by_pair):
        edge = _joined_rows(_summed(*pair, by_pair[pair])) if len(by_pair[pair]) > 1 else by_pair[pair][0]
        if _splits(edge):
            for table, sums in ((edge.cost_s, cost), (edge.memory_bytes, memory)):
                if table is not None:
                    row, column = _parts(table)
                    sums[edge.source] += row[edge.source_layout]
                    sums[edge.target] += column[edge.target_layout]
        else:
            edges.append(edge)

    choices = tuple(Choice(c.name, cost[i], memory[i]) for i, c in enumerate(problem.choices))
    if any(not np.isfinite(c).all() for c in cost):  # a forbidden pair of a choice with itself forbids the option
        finite = [np.flatnonzero(np.isfinite(c)) for c in cost]
        inner = restrict(Problem(choices, tuple(edges), problem.memory_limit_bytes), finite)
        keep = [old[new] for old, new in zip(keep, inner.kept, strict=True)]
        choices, edges = inner.problem.choices, list(inner.problem.edges)
    reduced = Problem(choices, tuple(edges), problem.memory_limit_bytes, _remaining_covers(problem, keep))
    return Reduction(reduced, tuple(keep))


def drop_dominated(problem: Problem, *, work: float = DOMINANCE_WORK) -> list[Ints]:
    """Options of each choice that remain under Goldstein's rule; one of several equal options stays.

    A choice whose comparison takes more than `work` entries keeps all its options.
    """
    around: list[list[Edge]] = [[] for _ in problem.choices]
    for edge in problem.edges:
        around[edge.source].append(edge)
        around[edge.target].append(edge)
    memory_counts = math.isfinite(problem.memory_limit_bytes)
    keep = [np.arange(choice.cost_s.size) for choice in problem.choices]
    for index, choice in enumerate(problem.choices):
        size = choice.cost_s.size
        tables = [_seen_from(edge, index, keep) for edge in around[index]]
        if size == 1 or sum(cost.shape[0] * cost.size for _, cost, _ in tables) + size * size > work:
            continue
        worse = choice.cost_s[:, None] - choice.cost_s[None, :]  # [s, s']: what s costs beyond s', at least
        larger = choice.memory_bytes[:, None] - choice.memory_bytes[None, :]
        for layout, cost, memory in tables:
            with np.errstate(invalid="ignore"):  # inf - inf, no pair is left for either: NaN, which beats nothing
                worse += _least_difference(cost)[np.ix_(layout, layout)]
            if memory is not None:
                larger += _least_difference(memory)[np.ix_(layout, layout)]
        beaten = (worse >= 0) & ((larger >= 0) | (not memory_counts))
        for cover in problem.covers:
            inside = np.zeros(size, dtype=bool)
            inside[[o for c, o in cover if c == index]] = True
            beaten &= ~inside[:, None] | inside[None, :]
        np.fill_diagonal(beaten, False)
        alive = np.ones(size, dtype=bool)
        for option in np.argsort(-choice.cost_s, kind="stable"):
            if (beaten[option] & alive).any():
                alive[option] = False
        keep[index] = np.flatnonzero(alive)
    return keep


def _seen_from(edge: Edge, index: int, keep: Sequence[Ints]) -> tuple[Ints, Floats, Floats | None]:
    """(layout of each option of choice `index`, cost [own layout, neighbour's layout], memory the same or None)."""
    if edge.source == index:
        columns = np.unique(edge.target_layout[keep[edge.target]])
        memory = None if edge.memory_bytes is None else edge.memory_bytes[:, columns]
        return edge.source_layout, edge.cost_s[:, columns], memory
    rows = np.unique(edge.source_layout[keep[edge.source]])
    memory = None if edge.memory_bytes is None else edge.memory_bytes[rows].T
    return edge.target_layout, edge.cost_s[rows].T, memory


def _least_difference(table: Floats) -> Floats:
    """[r, r'] -> min over columns of table[r] - table[r']; where row r is forbidden the column says nothing."""
    forbidden = np.isinf(table)
    with np.errstate(invalid="ignore"):
        return np.stack(
            [np.where(gone, math.inf, row - table).min(axis=1) for row, gone in zip(table, forbidden, strict=True)]
        )


def _joined_rows(edge: Edge) -> Edge:
    """The edge with unused rows and columns left out and equal ones joined."""
    rows, source_layout = np.unique(edge.source_layout, return_inverse=True)
    columns, target_layout = np.unique(edge.target_layout, return_inverse=True)
    cost = edge.cost_s[np.ix_(rows, columns)]
    memory = None if edge.memory_bytes is None else edge.memory_bytes[np.ix_(rows, columns)]
    if memory is not None and not memory.any():
        memory = None
    both = cost if memory is None else np.concatenate([cost, memory], axis=1)
    _, first_row, row_of = np.unique(both, axis=0, return_index=True, return_inverse=True)
    both = cost if memory is None else np.concatenate([cost, memory], axis=0)
    _, first_column, column_of = np.unique(both, axis=1, return_index=True, return_inverse=True)
    at = np.ix_(first_row, first_column)
    return Edge(
        edge.source,
        edge.target,
        row_of.reshape(-1)[source_layout],
        column_of.reshape(-1)[target_layout],
        cost[at],
        None if memory is None else memory[at],
    )


def _summed(source: int, target: int, edges: Sequence[Edge]) -> Edge:
    """One edge for several between the same two choices; its layouts are the joint layouts that options have."""
    turned = [
        e
        if e.source == source
        else Edge(
            source,
            target,
            e.target_layout,
            e.source_layout,
            e.cost_s.T,
            None if e.memory_bytes is None else e.memory_bytes.T,
        )
        for e in edges
    ]
    rows, source_layout = np.unique(np.stack([e.source_layout for e in turned]), axis=1, return_inverse=True)
    columns, target_layout = np.unique(np.stack([e.target_layout for e in turned]), axis=1, return_inverse=True)
    cost = sum(e.cost_s[np.ix_(r, c)] for e, r, c in zip(turned, rows, columns, strict=True))
    memories = [
        e.memory_bytes[np.ix_(r, c)]
        for e, r, c in zip(turned, rows, columns, strict=True)
        if e.memory_bytes is not None
    ]
    memory = np.sum(memories, axis=0) if memories else None
    return Edge(source, target, source_layout.reshape(-1), target_layout.reshape(-1), np.asarray(cost), memory)


def _splits(edge: Edge) -> bool:
    """Whether every entry is a part of its row plus a part of its column: then the edge couples nothing."""
    for table in (edge.cost_s, edge.memory_bytes):
        if table is None or 1 in table.shape:
            continue
        if not np.isfinite(table).all():
            return False
        rest = table - table[:, :1] - table[:1] + table[0, 0]
        if np.abs(rest).max() > 1e-15 * np.abs(table).max():
            return False
    return True


def _parts(table: Floats) -> tuple[Floats, Floats]:
    """(row part, column part) of a table that splits; a single row or column may hold forbidden entries."""
    if table.shape[0] == 1:
        return np.zeros(1), table[0]
    if table.shape[1] == 1:
        return table[:, 0], np.zeros(1)
    return table[:, 0], table[0] - table[0, 0]


def _remaining_covers(problem: Problem, keep: Sequence[Ints]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The cover rows over the options kept; rows that every assignment meets are left out."""
    covers = []
    new = [{int(old): i for i, old in enumerate(kept)} for kept in keep]
    for cover in problem.covers:
        left = sorted({(c, new[c][o]) for c, o in cover if o in new[c]})
        if not left:
            raise NoOptionError("no option of a cover row is allowed")
        count = np.bincount([c for c, _ in left], minlength=len(keep))
        if not any(n == kept.size for n, kept in zip(count, keep, strict=True)):
            covers.append(tuple(left))
    return tuple(dict.fromkeys(covers))
