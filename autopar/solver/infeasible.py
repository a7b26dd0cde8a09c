"""The report of a problem that no assignment meets.

Enters: the problem and a sentence that says why. Leaves: an `InfeasibleError` with figures. Refuses: nothing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.bound import minimise
from autopar.solver.eliminate import price
from autopar.solver.milp import solve_program
from autopar.solver.problem import Choice, Edge, Problem, evaluate, uncovered
from autopar.solver.reduce import Reduction

REPORT_TIME_S = 10.0
NAMED = 5  # consumers in the message; the attribute has all


def infeasible(problem: Problem, reduction: Reduction | None, why: str, *, proven: bool = True) -> InfeasibleError:
    """The error, with `proven`, `least_bytes`, `missing_bytes` and `consumers` (see `solve`).

    `least_bytes` is inf and `consumers` empty where even without the memory row no assignment is allowed.
    """
    options = None if reduction is None else least_memory(reduction)
    least_bytes, missing_bytes = math.inf, 0.0
    consumers: tuple[tuple[str, float], ...] = ()
    if options is not None:
        least_bytes = evaluate(problem, options)[1]
        missing_bytes = max(0.0, least_bytes - problem.memory_limit_bytes)
        consumers = _consumers(problem, options)
    message = why
    if missing_bytes:
        message = (
            f"memory: {missing_bytes:.4g} bytes are missing: the least any assignment needs is {least_bytes:.4g}, the "
            f"limit is {problem.memory_limit_bytes:.4g}; largest: "
            + ", ".join(f"{name} {size:.4g}" for name, size in consumers[:NAMED])
        )
    error = InfeasibleError(message)
    figures = {"proven": proven, "least_bytes": least_bytes, "missing_bytes": missing_bytes, "consumers": consumers}
    for field, value in figures.items():
        setattr(error, field, value)
    return error


def least_memory(reduction: Reduction) -> tuple[int, ...] | None:
    """The allowed assignment of the least memory, in original indices; None when none is found."""
    problem = replace(reduction.problem, memory_limit_bytes=math.inf)
    deadline_s = time.monotonic() + REPORT_TIME_S
    found = minimise(price(problem, 1.0, weight_s=0.0), deadline_s)
    options: tuple[int, ...] | None = found.options
    if uncovered(problem, found.options) or not math.isfinite(evaluate(problem, found.options)[0]):
        options = solve_program(_on_bytes(problem), deadline_s).options
    return None if options is None else reduction.expand(options)


def _on_bytes(problem: Problem) -> Problem:
    """The problem with bytes as its cost; forbidden pairs stay forbidden."""
    edges = []
    for e in problem.edges:
        cost = np.zeros_like(e.cost_s) if e.memory_bytes is None else e.memory_bytes + 0.0
        cost[e.cost_s == math.inf] = math.inf
        edges.append(Edge(e.source, e.target, e.source_layout, e.target_layout, cost - min(0.0, cost.min())))
    choices = tuple(Choice(c.name, c.memory_bytes, c.memory_bytes) for c in problem.choices)
    return Problem(choices, tuple(edges), covers=problem.covers)


def _consumers(problem: Problem, options: tuple[int, ...]) -> tuple[tuple[str, float], ...]:
    """(choice name, bytes), largest first; what an edge holds is counted where it arrives."""
    held: dict[str, float] = defaultdict(float)
    for choice, option in zip(problem.choices, options, strict=True):
        held[choice.name] += float(choice.memory_bytes[option])
    for e in problem.edges:
        if e.memory_bytes is not None:
            at = e.source_layout[options[e.source]], e.target_layout[options[e.target]]
            held[problem.choices[e.target].name] += float(e.memory_bytes[at])
    return tuple(sorted(held.items(), key=lambda item: (-item[1], item[0])))
