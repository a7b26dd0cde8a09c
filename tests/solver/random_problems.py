"""Random small problems of many shapes, and their optimum by trying every assignment."""

from __future__ import annotations

import itertools
import math

import numpy as np

from autopar.solver import Choice, Edge, Problem, evaluate
from autopar.solver.problem import fits, uncovered


def brute_force(problem: Problem) -> tuple[float, tuple[int, ...]] | None:
    """(cost, assignment) of the cheapest valid assignment, or None when there is none."""
    best: tuple[float, tuple[int, ...]] | None = None
    for options in itertools.product(*(range(c.cost_s.size) for c in problem.choices)):
        cost_s, memory_bytes = evaluate(problem, options)
        if not math.isfinite(cost_s) or not fits(problem, memory_bytes) or uncovered(problem, options):
            continue
        if best is None or cost_s < best[0]:
            best = cost_s, options
    return best


def random_problem(seed: int) -> Problem:
    """A tree, cycle, ladder or dense graph of up to 6 choices and 5 options with whatever can go with it."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    sizes = rng.integers(1, 6 if n < 6 else 4, size=n)
    whole = bool(rng.integers(2))  # whole numbers make ties
    scale_s = 10.0 ** rng.integers(-6, 3)

    def draw(*shape: int) -> np.ndarray:
        values = rng.integers(0, 6, size=shape).astype(float) if whole else rng.random(shape) * 5
        return values * scale_s

    def draw_bytes(*shape: int) -> np.ndarray:
        return np.round(rng.random(shape) * 10.0) * 2.0**30

    choices = tuple(Choice(f"c{i}", draw(k), draw_bytes(k)) for i, k in enumerate(sizes))
    match rng.integers(4):
        case 0:
            pairs = [(int(rng.integers(i)), i) for i in range(1, n)]
        case 1:
            pairs = [(i, (i + 1) % n) for i in range(n)]
        case 2:
            pairs = [(i, j) for i in range(n) for j in (i + 1, i + 2) if j < n]
        case _:
            pairs = [(int(a), int(b)) for a, b in rng.integers(n, size=(int(rng.integers(0, 2 * n + 1)), 2))]
    edges = []
    for pair in pairs:
        source, target = pair if rng.integers(2) else pair[::-1]
        rows, columns = (int(v) for v in rng.integers(1, 5, size=2))
        cost = draw(rows, columns)
        cost[rng.random(cost.shape) < 0.15 * rng.integers(3)] = math.inf
        edges.append(
            Edge(
                source,
                target,
                rng.integers(rows, size=sizes[source]),
                rng.integers(columns, size=sizes[target]),
                cost,
                draw_bytes(rows, columns) if rng.integers(3) == 0 else None,
            )
        )
    some = tuple(int(rng.integers(k)) for k in sizes)
    limit = math.inf if rng.integers(3) == 0 else evaluate(Problem(choices, tuple(edges)), some)[1]
    covers = []
    for _ in range(int(rng.integers(0, 3)) if rng.integers(2) else 0):
        members = rng.integers(n, size=int(rng.integers(1, 4)))
        covers.append(tuple((int(c), int(rng.integers(sizes[c]))) for c in members))
    return Problem(choices, tuple(edges), limit, tuple(covers))


def layered_problem(choices: int, options: int, seed: int) -> Problem:
    """A chain with residual joins, as a transformer block's: choice i feeds i + 1, and every third one i + 3 too."""
    rng = np.random.default_rng(seed)
    memory = rng.random((choices, options)) * 2.0**30
    cost = 0.3 / (0.1 + memory / 2.0**30) + 0.1 * rng.random((choices, options))  # less memory costs time
    layouts = rng.integers(6, size=(choices, options))
    edges = [
        Edge(i, j, layouts[i], layouts[j], rng.random((6, 6)) * (1 - np.eye(6)))
        for i in range(choices)
        for j in (i + 1, i + 3)
        if j < choices and (j == i + 1 or i % 3 == 0)
    ]
    return Problem(tuple(Choice(f"op{i}", cost[i], memory[i]) for i in range(choices)), tuple(edges))
