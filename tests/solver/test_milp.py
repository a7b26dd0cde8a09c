"""The program alone, without bounds and dropped options, equals brute force."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from autopar.solver import Choice, Edge, Problem, evaluate
from autopar.solver.milp import program_size, solve_program
from autopar.solver.reduce import NoOptionError, simplify
from tests.solver.random_problems import brute_force, layered_problem, random_problem

ROOT = Path(__file__).parents[2]


def test_program_equals_brute_force() -> None:
    ways = set()
    for seed in range(3000, 3120):
        try:
            problem = simplify(random_problem(seed)).problem
        except NoOptionError:
            continue
        best = brute_force(problem)
        result = solve_program(problem, time.monotonic() + 20, relative_gap=1e-9)
        ways.add(result.solver)
        if best is None:
            assert (result.options, result.bound_s) == (None, math.inf)
            continue
        assert result.options is not None
        tolerance = 1e-8 * (abs(best[0]) + sum(float(c.cost_s.max()) for c in problem.choices))
        assert evaluate(problem, result.options)[0] == pytest.approx(best[0], abs=tolerance)
        assert result.bound_s == pytest.approx(best[0], abs=tolerance)
    assert ways == {"highs-lp", "highs-mip"}


def test_edge_variables_are_layout_pairs_without_the_forbidden() -> None:
    layout = np.arange(100) % 3
    choices = tuple(Choice(f"c{i}", np.zeros(100), np.zeros(100)) for i in range(2))
    cost = np.ones((3, 3))
    cost[0, 1] = math.inf
    assert program_size(Problem(choices, (Edge(0, 1, layout, layout, cost),))) == 200 + 8


def test_limit_met_exactly_at_gigabytes_is_kept() -> None:
    unit = 2.0**33
    choices = tuple(Choice(f"c{i}", np.array([0.0, 1.0]), np.array([unit + 1, unit])) for i in range(4))
    result = solve_program(Problem(choices, (), 4 * unit + 100.5), time.monotonic() + 10)
    assert result.options == (0, 0, 0, 0)
    result = solve_program(Problem(choices, (), 4 * unit - 100), time.monotonic() + 10)
    assert result.options is None


def test_prints_of_the_solver_stay_off_standard_output() -> None:
    code = (
        "import ctypes; from autopar.solver.milp import stdout_to_stderr\n"
        "print('before')\n"
        "with stdout_to_stderr(): ctypes.CDLL(None).puts(b'noise')\n"
        "print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "before\nafter\n"
    assert "noise" in done.stderr


def test_a_start_and_a_past_deadline_are_taken() -> None:
    free = layered_problem(choices=10, options=6, seed=8)
    problem = Problem(free.choices, free.edges, sum(float(np.median(c.memory_bytes)) for c in free.choices))
    plain = solve_program(problem, time.monotonic() + 20)
    assert plain.options is not None
    begun = solve_program(problem, time.monotonic() + 20, start=plain.options)
    assert begun.options is not None
    assert evaluate(problem, begun.options)[0] == pytest.approx(evaluate(problem, plain.options)[0], rel=1e-6)
    late = solve_program(problem, time.monotonic() - 1)
    assert (late.options, late.bound_s) == (None, -math.inf)
