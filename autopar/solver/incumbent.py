"""The cheapest valid assignment so far, and a local search that makes a better one of any assignment.

Enters: a reduced `Problem` and assignments of it. Leaves: an `Incumbent`. Refuses: assignments that break a row; they
are only remembered, as starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.bound import conditional
from autopar.solver.eliminate import PricedEdge, price
from autopar.solver.problem import Floats, Problem, evaluate, fits, uncovered


@dataclass(slots=True)
class Incumbent:
    """The cheapest assignment of `problem` that meets every row; `source` says what found it; `seen` all offered."""

    problem: Problem
    options: tuple[int, ...] | None = None
    cost_s: float = math.inf
    memory_bytes: float = math.inf
    source: str = "lagrangian"
    seen: dict[tuple[int, ...], None] = field(default_factory=dict)

    def offer(self, options: Sequence[int], source: str) -> bool:
        """Keep the assignment when it is valid and cheaper."""
        options = tuple(int(o) for o in options)
        self.seen[options] = None
        cost_s, memory_bytes = evaluate(self.problem, options)
        if not (cost_s < self.cost_s and fits(self.problem, memory_bytes)) or uncovered(self.problem, options):
            return False
        self.options, self.cost_s, self.memory_bytes, self.source = options, cost_s, memory_bytes, source
        return True

    def gap(self, bound_s: float) -> float:
        """(cost - bound) / |cost|, at least 0; inf without an assignment."""
        if self.options is None:
            return math.inf
        excess = max(0.0, self.cost_s - bound_s)
        return excess / abs(self.cost_s) if excess else 0.0


def repair(incumbent: Incumbent, start: Sequence[int], source: str) -> None:
    """Change one choice at a time: over the limit the move with the fewest seconds for a byte saved, under it the move
    that saves the most seconds and still fits."""
    problem = incumbent.problem
    if not problem.choices:
        return
    limit = problem.memory_limit_bytes
    cost, memory = price(problem, 0.0), price(problem, 1.0, weight_s=0.0)
    around: list[list[tuple[PricedEdge, PricedEdge]]] = [[] for _ in start]
    for pair in zip(cost.edges, memory.edges, strict=True):
        for end in (pair[0].source, pair[0].target):
            around[end].append(pair)
    options = list(start)
    changes: dict[int, tuple[Floats, Floats]] = {}
    memory_bytes = evaluate(problem, options)[1]
    for _ in range(4 * len(options)):
        for s in range(len(options)):
            if s not in changes:
                seconds = conditional(cost, [e for e, _ in around[s]], s, options)
                size = conditional(memory, [e for _, e in around[s]], s, options)
                changes[s] = seconds - seconds[options[s]], size - size[options[s]]
        best = (math.inf, -1, -1)
        for s, (seconds, size) in changes.items():
            if fits(problem, memory_bytes):
                score = np.where(memory_bytes + size <= limit, seconds, math.inf)
                score[score >= -1e-15 * abs(incumbent.cost_s if incumbent.options else 0.0)] = math.inf
            else:  # what is saved below the limit is worth nothing
                saved = np.minimum(-size, memory_bytes - limit)
                score = np.full(size.size, math.inf)
                np.divide(seconds, saved, out=score, where=saved > 0)
            at = int(np.argmin(score))
            best = min(best, (float(score[at]), s, at))
        if not math.isfinite(best[0]):
            break
        _, s, at = best
        memory_bytes += float(changes[s][1][at])
        options[s] = at
        for end in (s, *(e.target if e.source == s else e.source for e, _ in around[s])):
            changes.pop(end, None)
        incumbent.offer(options, source)
