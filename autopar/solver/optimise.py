"""Solve a choice problem: the straight line from `Problem` to `Solution`.

Enters: a `Problem`, a time limit, the gap asked for, maybe an assignment to start from.
Leaves: a `Solution` with its proven bound. Refuses: a problem that no assignment meets: `InfeasibleError`.

    simplify                 forbidden options, parallel edges, equal layouts                         reduce.py
    without the memory row   exact min-sum; when its answer fits, it is the optimum       bound.py, eliminate.py
    least memory             the same on bytes; above the limit there is no answer
    price of memory          bound, assignments that fit, a bound for each option                     lagrange.py
    drop options             whose bound is above the assignment at hand; dominated ones              reduce.py
    a small program          over the few best options of each choice: a better assignment           milp.py
    the program              over all that is left: relaxation, then integer search                   milp.py

After every step the search ends when the gap is met.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.bound import minimise, surviving
from autopar.solver.eliminate import price
from autopar.solver.incumbent import Incumbent, repair
from autopar.solver.infeasible import infeasible
from autopar.solver.lagrange import price_memory
from autopar.solver.milp import program_size, solve_program
from autopar.solver.problem import Floats, Problem, Solution, evaluate, fits, uncovered
from autopar.solver.reduce import NoOptionError, Reduction, drop_dominated, simplify

QUICK_DOMINANCE = 5e6  # entries compared a choice before any bound is known; two mesh axes stay below it
SMALL_PROGRAM = 3_000  # columns of the first, partial program
LARGE_PROGRAM = 400_000  # columns beyond which HiGHS does not finish its relaxation in useful time
PROOF_GAP = 1e-9  # a gap of the size of rounding: sums in another order differ by this much
QUICK_GAP = 0.01  # where problems are compared that differ by more
ROUNDS = 3  # of bound and drop; each makes the next one sharper


class Beaten(Exception):
    """Another problem's answer is at least as cheap as any of this one. whatever_memory: without a limit, too."""

    def __init__(self, whatever_memory: bool = True) -> None:
        super().__init__()
        self.whatever_memory = whatever_memory


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    relative_gap: float = 1e-4,
    start: Sequence[int] | None = None,
    beaten_s: float = math.inf,
    quick: bool = False,
) -> Solution:
    """The cheapest assignment that meets every row.

    Args:    time_limit_s: wall-clock seconds, kept to within about one message pass or one HiGHS check.
             relative_gap: stop when (objective - bound) / |objective| is at most this; 0 asks for a proof, up
             to rounding (1e-9).
             start: an assignment to begin with, one option a choice; a better one is looked for.
             beaten_s: what another problem's answer costs; nothing is looked for where this one's cannot be cheaper.
             quick: to a gap of `QUICK_GAP`, and without integer search, so that even that may be missed.
    Raises:  Beaten: even without the memory row no assignment is cheaper than `beaten_s`.
             InfeasibleError: no assignment meets the rows, or none was found in time. Its attributes: `proven` (bool),
             `least_bytes` (least memory of any assignment), `missing_bytes` (that less the limit, at least 0),
             `consumers` (tuple of (choice name, bytes) in the least-memory assignment, largest first).
    """
    begun_s = time.monotonic()
    deadline_s = begun_s + time_limit_s
    target = max(relative_gap, QUICK_GAP if quick else PROOF_GAP)
    try:
        reduction = simplify(problem)
    except NoOptionError as error:
        raise infeasible(problem, None, str(error)) from error
    reduced = reduction.problem
    largest = sum(float(c.memory_bytes.max()) for c in reduced.choices)
    largest += sum(float(e.memory_bytes.max()) for e in reduced.edges if e.memory_bytes is not None)
    if fits(reduced, largest):
        reduced = replace(reduced, memory_limit_bytes=math.inf)
        reduction = replace(reduction, problem=reduced)

    incumbent = Incumbent(reduced)
    if start is not None and (inner := reduction.inner(start)) is not None:
        incumbent.offer(inner, "start")
    bound_s = _search(incumbent, deadline_s, target, beaten_s, quick)

    if incumbent.options is None:
        proven = bound_s == math.inf
        why = "no assignment meets every row" if proven else f"none found in {time_limit_s:g} s"
        raise infeasible(problem, reduction, why, proven=proven)
    options = reduction.expand(incumbent.options)
    objective_s, memory_bytes = evaluate(problem, options)
    bound_s = min(bound_s, objective_s)
    gap = (objective_s - bound_s) / abs(objective_s) if objective_s > bound_s else 0.0
    return Solution(
        options=options,
        objective_s=objective_s,
        bound_s=bound_s,
        gap=gap,
        memory_bytes=memory_bytes,
        solver=incumbent.source,
        time_s=time.monotonic() - begun_s,
        optimal=gap <= target,
    )


def too_large(problem: Problem, time_limit_s: float = 60.0) -> bool:
    """Is it proven that even the assignment of the least memory is above the limit?"""
    try:
        reduced = simplify(problem).problem
    except NoOptionError:
        return True
    deadline_s = time.monotonic() + time_limit_s
    return not fits(reduced, minimise(price(reduced, 1.0, weight_s=0.0), deadline_s).bound)


def _search(incumbent: Incumbent, deadline_s: float, relative_gap: float, beaten_s: float, quick: bool) -> float:
    """Improve the incumbent until the gap or the deadline is met; a proven bound, inf when no assignment is valid."""
    whole = incumbent.problem
    current = Reduction(whole, tuple(np.arange(c.cost_s.size) for c in whole.choices))
    try:
        current = current.then(drop_dominated(whole, work=QUICK_DOMINANCE))
    except NoOptionError:  # folding forbidden pairs showed that there is no assignment
        return math.inf
    bound_s = -math.inf
    lower: Sequence[Floats] = ()
    for _ in range(ROUNDS):
        found = _bounds(current, incumbent, deadline_s, relative_gap, beaten_s)
        lower = found.lower
        bound_s = max(bound_s, min(found.bound_s, incumbent.cost_s))
        if incumbent.gap(bound_s) <= relative_gap or bound_s == math.inf or time.monotonic() > deadline_s:
            return bound_s
        before = _options(current)
        dropped = _drop(current, lower, incumbent)
        if dropped is None:
            return incumbent.cost_s
        current, lower = dropped
        if _options(current) > 0.8 * before:
            break

    if quick and incumbent.options is not None:
        return bound_s
    if program_size(current.problem) > SMALL_PROGRAM:
        few = _few(current, lower, incumbent)
        share_s = (deadline_s - time.monotonic()) / 3
        result = solve_program(
            few.problem, time.monotonic() + share_s, relative_gap=relative_gap, start=few.inner(incumbent.options)
        )
        if result.options is not None:
            incumbent.offer(few.expand(result.options), "highs-mip")
        dropped = _drop(current, lower, incumbent)
        if incumbent.gap(bound_s) <= relative_gap or dropped is None:
            return bound_s if dropped else incumbent.cost_s
        current, lower = dropped
    if program_size(current.problem) <= LARGE_PROGRAM:
        result = solve_program(
            current.problem, deadline_s, relative_gap=relative_gap, start=current.inner(incumbent.options)
        )
        if result.options is not None:
            incumbent.offer(current.expand(result.options), result.solver)
        if result.bound_s > bound_s:
            bound_s = min(result.bound_s, incumbent.cost_s)
            incumbent.source = result.solver
    return bound_s


@dataclass(frozen=True, slots=True, eq=False)
class _Bounds:
    """bound_s of a problem (inf: no valid assignment) and of each option of it, in the problem's own indices."""

    bound_s: float
    lower: Sequence[Floats]


def _bounds(
    current: Reduction, incumbent: Incumbent, deadline_s: float, relative_gap: float, beaten_s: float
) -> _Bounds:
    """Bounds by min-sum, with memory priced where it binds; what is found on the way is offered."""
    problem = current.problem
    inner = Incumbent(problem)
    if incumbent.options is not None and (start := current.inner(incumbent.options)) is not None:
        inner.offer(start, incumbent.source)

    def done(bound_s: float, lower: Sequence[Floats] | None, at: float = 0.0) -> _Bounds:
        for options in _covering(problem, inner, at, deadline_s) if inner.options is None else ():
            repair(inner, options, "lagrangian")
        if inner.options is not None:
            incumbent.offer(current.expand(inner.options), inner.source)
        return _Bounds(bound_s, lower or [np.full(c.cost_s.size, bound_s) for c in problem.choices])

    free = minimise(price(problem, 0.0), deadline_s, enough=beaten_s)
    cost_s, memory_bytes = evaluate(problem, free.options)
    if free.exact and not math.isfinite(cost_s):
        return _Bounds(math.inf, ())
    if free.bound >= beaten_s:
        raise Beaten
    inner.offer(free.options, "elimination")
    if inner.gap(free.bound) <= relative_gap:
        return done(free.bound, free.lower)
    if fits(problem, memory_bytes) or not math.isfinite(cost_s):
        free = minimise(price(problem, 0.0), deadline_s, bounds=True, start=free.options)
        return done(free.bound, free.lower)
    least = minimise(price(problem, 1.0, weight_s=0.0), deadline_s)
    if not fits(problem, least.bound):
        return _Bounds(math.inf, ())
    inner.offer(least.options, "lagrangian")
    if not fits(problem, evaluate(problem, least.options)[1]):
        return done(free.bound, free.lower)
    priced = price_memory(problem, inner, free.options, least.options, deadline_s, relative_gap=relative_gap)
    return done(max(priced.bound_s, free.bound), priced.lower, priced.price_s_per_byte)


def _covering(problem: Problem, incumbent: Incumbent, at: float, deadline_s: float) -> list[tuple[int, ...]]:
    """Assignments that meet the cover rows: for each row left unmet, the choice that meets it most cheaply does so."""
    keep = [np.arange(c.cost_s.size) for c in problem.choices]
    reduction = Reduction(problem, tuple(keep))
    for _ in range(len(problem.covers) + 1):
        inner = reduction.problem
        found = minimise(price(inner, at), deadline_s, bounds=True)
        missing = uncovered(inner, found.options)
        if not missing or found.lower is None:
            return [reduction.expand(found.options)]
        cover = inner.covers[missing[0]]
        _, choice = min((float(found.lower[c][o]), c) for c, o in cover)
        keep = [np.arange(c.cost_s.size) for c in inner.choices]
        keep[choice] = np.unique([o for c, o in cover if c == choice])
        try:
            reduction = reduction.then(keep)
        except NoOptionError:
            break
    return []


def _drop(
    current: Reduction, lower: Sequence[Floats], incumbent: Incumbent
) -> tuple[Reduction, Sequence[Floats]] | None:
    """Without the options that cannot beat the incumbent, and the dominated; None when nothing can beat it."""
    for rule in ("bound", "dominance"):
        keep = surviving(lower, incumbent.cost_s) if rule == "bound" else drop_dominated(current.problem)
        try:
            after = current.then(keep)
        except NoOptionError:
            return None
        position = [np.searchsorted(old, new) for old, new in zip(current.kept, after.kept, strict=True)]
        lower = [low[at] for low, at in zip(lower, position, strict=True)]
        current = after
    return current, lower


def _few(current: Reduction, lower: Sequence[Floats], incumbent: Incumbent) -> Reduction:
    """The most promising options of each choice, as many as a small program holds."""
    inner = current.inner(incumbent.options) if incumbent.options is not None else None
    few = current
    for width in (48, 32, 24, 16, 12, 8, 6, 4):
        keep = [np.sort(np.argsort(low, kind="stable")[:width]) for low in lower]
        if inner is not None:
            keep = [np.union1d(k, [o]) for k, o in zip(keep, inner, strict=True)]
        try:
            few = current.then(keep)
        except NoOptionError:  # a cover row lost all its options: a wider choice is all there is
            return few
        if program_size(few.problem) <= SMALL_PROGRAM:
            break
    return few


def _options(reduction: Reduction) -> int:
    return sum(kept.size for kept in reduction.kept)
