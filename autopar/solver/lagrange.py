"""The memory row turned into a price: an excellent assignment and bound from a few min-sums.

Enters: a reduced `Problem` with a memory row, one assignment that is cheap and one that fits.
Leaves: `MemoryPrice`: the best price, a proven bound, lower bounds for every option; and, in the caller's `Incumbent`,
the cheapest assignment met that fits. Refuses: nothing.

    D(p) = min_x [ cost(x) + p (memory(x) - limit) ] <= optimum                 for every price p >= 0
    D is concave and piecewise linear: each x gives a line. Between one x that fits and one that does not, the price
    where their lines cross is tried next; when no line lies below the crossing, D is at its maximum.
Source: Handler & Zang 1980, "A dual algorithm for the constrained shortest path problem", the same rule on paths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.bound import ROUNDING, Messages, minimise
from autopar.solver.eliminate import price
from autopar.solver.incumbent import Incumbent, repair
from autopar.solver.problem import Floats, Problem, evaluate, fits

CROSSINGS = 30


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPrice:
    """price_s_per_byte; bound_s of the whole; lower: [k] for each choice, no valid assignment with it costs less."""

    price_s_per_byte: float
    bound_s: float
    lower: tuple[Floats, ...]


def price_memory(
    problem: Problem,
    incumbent: Incumbent,
    free: Sequence[int],
    least: Sequence[int],
    deadline_s: float,
    *,
    relative_gap: float,
    messages: Messages | None = None,
) -> MemoryPrice:
    """Maximise D.

    Args:    free: an assignment that does not fit, as cheap as can be. least: one that fits.
             messages: where `minimise` may start; overwritten.
    """
    limit = problem.memory_limit_bytes
    messages = blank_messages(problem) if messages is None else messages
    over, under = evaluate(problem, free), evaluate(problem, least)
    bound_s, at = -math.inf, 0.0
    ends = {True: tuple(least), False: tuple(free)}  # the last assignment that fits, and that does not
    for _ in range(CROSSINGS):
        if over[1] <= under[1] or under[0] <= over[0] or time.monotonic() > deadline_s:
            break
        crossing = (under[0] - over[0]) / (over[1] - under[1])
        found = minimise(price(problem, crossing), deadline_s, messages=messages)
        bound_s, at = max((bound_s, at), (found.bound - crossing * limit, crossing))
        incumbent.offer(found.options, "lagrangian")
        point = evaluate(problem, found.options)
        line = under[0] + crossing * under[1]
        if not found.value < line - 1e-12 * abs(line) or not math.isfinite(point[0]):
            break
        inside = fits(problem, point[1])
        ends[inside] = found.options
        over, under = (over, point) if inside else (point, under)
        if incumbent.gap(bound_s) <= relative_gap:
            break
    for start in ends.values():
        if time.monotonic() < deadline_s:
            repair(incumbent, start, "lagrangian")
    found = minimise(price(problem, at), deadline_s, messages=messages, bounds=True)
    assert found.lower is not None
    bound_s = max(bound_s, found.bound - at * limit)
    shift = at * limit + ROUNDING * abs(found.value)  # the second part: what the sums may have rounded away
    return MemoryPrice(at, bound_s, tuple(low - shift for low in found.lower))


def blank_messages(problem: Problem) -> Messages:
    """Messages of a first ascent."""
    return [[np.zeros(n) for n in edge.cost_s.shape] for edge in problem.edges]
