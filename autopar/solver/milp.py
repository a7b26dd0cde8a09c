"""The integer program, solved by HiGHS through OR-Tools MathOpt.

Enters: a reduced `Problem` (no edge of a choice with itself) and a deadline. Leaves: `ProgramResult`: an assignment, a
proven bound, and whether the linear relaxation was integral already. Refuses: nothing.

Variables: x[c, o] in {0, 1}, option o of choice c; e[r, q] in [0, 1] for each edge, its LAYOUT pair (not its option
pair: a few dozen in place of thousands; integral x make e integral). Forbidden pairs have no variable.

    minimise   sum cost_c[o] x[c, o] + sum cost_e[r, q] e[r, q]                             `_objective`
    one        sum_o x[c, o] = 1                                        for each choice     `_one_option_rows`
    ends       sum_q e[r, q] = sum_{o in layout r} x[source, o]         for each edge, r    `_layout_rows`
               sum_r e[r, q] = sum_{o in layout q} x[target, o]         for each edge, q    `_layout_rows`
    memory     sum memory_c[o] x[c, o] + sum memory_e[r, q] e[r, q] <= limit                `_memory_row`
    cover      sum_{(c, o) in cover} x[c, o] >= 1                       for each cover      `_cover_rows`

The relaxation goes first: on planner graphs it is often integral, and much quicker than the integer search.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.solver.problem import Floats, Ints, Problem, evaluate, fits, uncovered

INTEGRAL = 1e-6  # a relaxation is taken as integral within this
OBJECTIVE_UNITS = 1e3  # the objective is scaled to about this, so that HiGHS's absolute tolerances mean 1e-9 of it
FEASIBILITY = 1e-9  # HiGHS's own 1e-7 of 80 GB would be 8 kB over the limit


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """options: the best assignment, or None; bound_s: no assignment costs less (inf: there is none).

    solver: "highs-lp" when the relaxation was integral, else "highs-mip".
    """

    options: tuple[int, ...] | None
    bound_s: float
    solver: str


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Matrix entries of a family of rows, numbered from 0, and the bounds of each row."""

    row: Ints
    column: Ints
    value: Floats
    lower: Floats
    upper: Floats


class _Columns:
    """Which column stands for which option or layout pair."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        sizes = [choice.cost_s.size for choice in problem.choices]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.options = int(self.first[-1])
        self.pairs = [_allowed(edge.cost_s) for edge in problem.edges]
        ends = self.options + np.cumsum([0, *(rows.size for rows, _ in self.pairs)])
        self.first_pair = ends[:-1].astype(np.int64)
        self.count = int(ends[-1])


def program_size(problem: Problem) -> int:
    """Columns of the program."""
    return sum(c.cost_s.size for c in problem.choices) + sum(int(np.isfinite(e.cost_s).sum()) for e in problem.edges)


def solve_program(
    problem: Problem,
    deadline_s: float,
    *,
    relative_gap: float = 1e-6,
    start: Sequence[int] | None = None,
) -> ProgramResult:
    """Solve the relaxation, and the integer program where that is fractional.

    Args:    deadline_s: on `time.monotonic`'s clock. start: an assignment that HiGHS may begin with.
    """
    columns = _Columns(problem)
    objective = _objective(columns)
    scale_s = _scale(problem, start)
    model, variables = _model(columns, objective / scale_s, problem.memory_limit_bytes)
    options_of = variables[: columns.options]

    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return ProgramResult(None, -math.inf, "highs-lp")
    for variable in options_of:
        variable.integer = False
    result = _run(model, left_s, relative_gap)
    if result.termination.reason in (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,  # every variable is in [0, 1]: unbounded it is not
    ):
        return ProgramResult(None, math.inf, "highs-lp")
    bound_s = -math.inf
    if result.termination.reason == mathopt.TerminationReason.OPTIMAL:
        bound_s = result.objective_value() * scale_s
        x = np.array(result.variable_values(options_of))
        if np.abs(x - np.round(x)).max() < INTEGRAL and _valid(problem, options := _decode(columns, x)):
            return ProgramResult(options, bound_s, "highs-lp")

    for variable in options_of:
        variable.integer = True
    limit = problem.memory_limit_bytes
    for _ in range(3):  # again with a tighter row when an answer uses the row's tolerance
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        result = _run(model, left_s, relative_gap, hint=_hint(columns, variables, start))
        if result.termination.reason in (
            mathopt.TerminationReason.INFEASIBLE,
            mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
        ):
            return ProgramResult(None, math.inf if limit == problem.memory_limit_bytes else bound_s, "highs-mip")
        if limit == problem.memory_limit_bytes and math.isfinite(dual := result.dual_bound()):
            bound_s = max(bound_s, dual * scale_s)
        if not result.has_primal_feasible_solution():
            break
        options = _decode(columns, np.array(result.variable_values(options_of)))
        if _valid(problem, options):
            return ProgramResult(options, bound_s, "highs-mip")
        limit -= 2 * max(evaluate(problem, options)[1] - problem.memory_limit_bytes, 1e-9 * abs(limit))
        row = next(r for r in model.linear_constraints() if r.name == "memory")
        row.upper_bound = limit / abs(problem.memory_limit_bytes or 1.0)
    return ProgramResult(None, bound_s, "highs-mip")


def _objective(columns: _Columns) -> Floats:
    pairs = zip(columns.problem.edges, columns.pairs, strict=True)
    return np.concatenate([*(c.cost_s for c in columns.problem.choices), *(e.cost_s[at] for e, at in pairs)])


def _one_option_rows(columns: _Columns) -> _Rows:
    sizes = np.diff(columns.first)
    ones = np.ones(sizes.size)
    return _Rows(
        np.repeat(np.arange(sizes.size), sizes), np.arange(columns.options), np.ones(columns.options), ones, ones
    )


def _layout_rows(columns: _Columns) -> _Rows:
    rows, cols, values, count = [], [], [], 0
    for edge, pairs, first in zip(columns.problem.edges, columns.pairs, columns.first_pair, strict=True):
        pair_columns = first + np.arange(pairs[0].size)
        for side, (end, layout) in enumerate(((edge.source, edge.source_layout), (edge.target, edge.target_layout))):
            rows += [count + pairs[side], count + layout]
            cols += [pair_columns, columns.first[end] + np.arange(layout.size)]
            values += [np.ones(pair_columns.size), -np.ones(layout.size)]
            count += edge.cost_s.shape[side]
    zeros = np.zeros(count)
    return _Rows(_joined(rows), _joined(cols), np.concatenate([np.zeros(0), *values]), zeros, zeros)


def _memory_row(columns: _Columns, limit_bytes: float) -> _Rows:
    """One row, in units of the limit; none without a limit."""
    if math.isinf(limit_bytes):
        empty = np.zeros(0)
        return _Rows(empty.astype(np.int64), empty.astype(np.int64), empty, empty, empty)
    parts = [choice.memory_bytes for choice in columns.problem.choices]
    for edge, at in zip(columns.problem.edges, columns.pairs, strict=True):
        parts.append(np.zeros(at[0].size) if edge.memory_bytes is None else edge.memory_bytes[at])
    unit = abs(limit_bytes) or 1.0
    memory = np.concatenate(parts) / unit
    used = np.flatnonzero(memory)
    return _Rows(
        np.zeros(used.size, dtype=np.int64), used, memory[used], np.array([-math.inf]), np.array([limit_bytes / unit])
    )


def _cover_rows(columns: _Columns) -> _Rows:
    covers = columns.problem.covers
    rows = [np.full(len(cover), i) for i, cover in enumerate(covers)]
    cols = [np.array([columns.first[c] + o for c, o in cover]) for cover in covers]
    count = sum(len(cover) for cover in covers)
    return _Rows(_joined(rows), _joined(cols), np.ones(count), np.ones(len(covers)), np.full(len(covers), math.inf))


def _model(columns: _Columns, objective: Floats, limit_bytes: float) -> tuple[mathopt.Model, list[mathopt.Variable]]:
    """The MathOpt model, filled from arrays: 0.4 s for 130,000 variables where expressions take 3 s."""
    families = [
        _memory_row(columns, limit_bytes),
        _one_option_rows(columns),
        _layout_rows(columns),
        _cover_rows(columns),
    ]
    offsets = np.cumsum([0, *(f.lower.size for f in families)])
    row = np.concatenate([f.row + at for f, at in zip(families, offsets, strict=False)])
    column = np.concatenate([f.column for f in families])
    value = np.concatenate([f.value for f in families])
    order = np.lexsort((column, row))

    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(columns.count))
    proto.variables.lower_bounds.extend([0.0] * columns.count)
    proto.variables.upper_bounds.extend([1.0] * columns.count)
    proto.variables.integers.extend([True] * columns.options + [False] * (columns.count - columns.options))
    paid = np.flatnonzero(objective)
    proto.objective.linear_coefficients.ids.extend(paid.tolist())
    proto.objective.linear_coefficients.values.extend(objective[paid].tolist())
    rows = int(offsets[-1])
    proto.linear_constraints.ids.extend(range(rows))
    proto.linear_constraints.lower_bounds.extend(np.concatenate([f.lower for f in families]).tolist())
    proto.linear_constraints.upper_bounds.extend(np.concatenate([f.upper for f in families]).tolist())
    if families[0].lower.size:
        proto.linear_constraints.names.extend(["memory"] + [""] * (rows - 1))
    proto.linear_constraint_matrix.row_ids.extend(row[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(column[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(value[order].tolist())
    model = mathopt.Model.from_model_proto(proto)
    return model, sorted(model.variables(), key=lambda v: v.id)


def _run(
    model: mathopt.Model, time_limit_s: float, relative_gap: float, hint: mathopt.SolutionHint | None = None
) -> mathopt.SolveResult:
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=time_limit_s),
        relative_gap_tolerance=relative_gap,
        absolute_gap_tolerance=0.0,
    )
    params.highs.string_options["parallel"] = "off"  # MathOpt refuses `threads` for HiGHS; one thread is repeatable
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance", "mip_feasibility_tolerance"):
        params.highs.double_options[name] = FEASIBILITY
    hints = mathopt.ModelSolveParameters(solution_hints=[hint] if hint else [])
    with stdout_to_stderr():
        return mathopt.solve(model, mathopt.SolverType.HIGHS, params=params, model_params=hints)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """HiGHS has a debugging print that no option silences; on standard output it would break `--json`."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        libc.fflush(None)  # what C has buffered meanwhile belongs to standard error
        os.dup2(saved, 1)
        os.close(saved)


def _hint(
    columns: _Columns, variables: Sequence[mathopt.Variable], start: Sequence[int] | None
) -> mathopt.SolutionHint | None:
    if start is None:
        return None
    x = np.zeros(columns.count)
    x[columns.first[:-1] + np.asarray(start)] = 1.0
    for edge, (rows, cols), first in zip(columns.problem.edges, columns.pairs, columns.first_pair, strict=True):
        taken = (rows == edge.source_layout[start[edge.source]]) & (cols == edge.target_layout[start[edge.target]])
        x[first + np.flatnonzero(taken)] = 1.0
    return mathopt.SolutionHint(variable_values=dict(zip(variables, x.tolist(), strict=True)))


def _decode(columns: _Columns, x: NDArray[np.float64]) -> tuple[int, ...]:
    return tuple(int(np.argmax(part)) for part in np.split(x, columns.first[1:-1]))


def _valid(problem: Problem, options: Sequence[int]) -> bool:
    cost_s, memory_bytes = evaluate(problem, options)
    return math.isfinite(cost_s) and fits(problem, memory_bytes) and not uncovered(problem, options)


def _scale(problem: Problem, start: Sequence[int] | None) -> float:
    """Seconds in a unit of the objective."""
    if start is not None and 0 < (cost_s := abs(evaluate(problem, start)[0])) < math.inf:
        return cost_s / OBJECTIVE_UNITS
    typical = sum(float(np.abs(choice.cost_s).mean()) for choice in problem.choices)
    typical += sum(float(e.cost_s[np.isfinite(e.cost_s)].mean()) for e in problem.edges if np.isfinite(e.cost_s).any())
    return typical / OBJECTIVE_UNITS or 1.0


def _allowed(cost: Floats) -> tuple[Ints, Ints]:
    rows, columns = np.nonzero(np.isfinite(cost))
    return rows.astype(np.int64), columns.astype(np.int64)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
