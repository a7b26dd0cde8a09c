"""`solve` against brute force, its promises on bound, gap, time and repeatability, and its infeasibility report."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar.solver.bound as bound_module
import autopar.solver.optimise as optimise_module
from autopar.errors import InfeasibleError
from autopar.solver import Choice, Edge, Problem, Solution, evaluate, solve
from autopar.solver.problem import fits, uncovered
from tests.solver.random_problems import brute_force, layered_problem, random_problem


def check(problem: Problem) -> str:
    """Solve, compare with brute force, and return what settled it."""
    best = brute_force(problem)
    if best is None:
        with pytest.raises(InfeasibleError) as caught:
            solve(problem, relative_gap=0)
        assert caught.value.proven
        return "infeasible"
    solution = solve(problem, relative_gap=0)
    assert solution.objective_s == pytest.approx(best[0], rel=1e-9, abs=0)
    assert_sound(problem, solution)
    assert solution.optimal
    assert solution.bound_s >= best[0] * (1 - 2e-9)
    return solution.solver


def assert_sound(problem: Problem, solution: Solution) -> None:
    cost_s, memory_bytes = evaluate(problem, solution.options)
    assert (cost_s, memory_bytes) == (solution.objective_s, solution.memory_bytes)
    assert fits(problem, memory_bytes)
    assert not uncovered(problem, solution.options)
    assert solution.bound_s <= solution.objective_s
    assert solution.gap == pytest.approx((cost_s - solution.bound_s) / abs(cost_s) if cost_s else 0.0)


def test_equals_brute_force_on_hundreds_of_graphs() -> None:
    settled = Counter(check(random_problem(seed)) for seed in range(400))
    for way in ("elimination", "lagrangian", "highs-lp", "highs-mip", "infeasible"):
        assert settled[way] >= 5, settled  # else the random problems miss a path


@pytest.mark.parametrize("path", ["message passing", "never elimination", "partial program"])
def test_large_problem_paths_equal_brute_force(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_module, "EASY_WORK", -1.0)
    if path == "never elimination":
        monkeypatch.setattr(bound_module, "elimination_order", lambda priced, work=0.0: None)
    if path == "partial program":
        monkeypatch.setattr(optimise_module, "SMALL_PROGRAM", 3)
    for seed in range(1000, 1150):
        check(random_problem(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=10_000, max_value=2**31))
def test_equals_brute_force_on_any_graph(seed: int) -> None:
    check(random_problem(seed))


def test_memory_row_that_does_not_bind_needs_no_program() -> None:
    problem = layered_problem(choices=30, options=12, seed=1)
    solution = solve(problem)
    assert solution.solver == "elimination"
    assert (solution.gap, solution.optimal) == (0.0, True)
    roomy = Problem(problem.choices, problem.edges, solution.memory_bytes)
    assert solve(roomy).options == solution.options


def test_binding_memory_is_solved_to_the_gap_and_repeats_exactly() -> None:
    free = layered_problem(choices=40, options=16, seed=2)
    most = solve(free).memory_bytes
    problem = Problem(free.choices, free.edges, 0.6 * most)
    first, second = (solve(problem, relative_gap=1e-3) for _ in range(2))
    assert_sound(problem, first)
    assert first.optimal
    assert first.gap <= 1e-3
    assert (first.options, first.bound_s, first.solver) == (second.options, second.bound_s, second.solver)
    exact = solve(problem, relative_gap=0)
    assert first.bound_s <= exact.objective_s * (1 + 1e-9)
    assert exact.objective_s <= first.objective_s <= exact.objective_s * 1.001


def test_time_limit_gives_an_assignment_with_an_honest_gap() -> None:
    rng = np.random.default_rng(3)
    n, k = 40, 20  # dense random costs: no proof in this time
    choices = tuple(Choice(f"c{i}", rng.random(k), rng.random(k)) for i in range(n))
    layout = np.arange(k)
    edges = tuple(
        Edge(i, j, layout, layout, rng.random((k, k))) for i in range(n) for j in range(i) if rng.random() < 0.3
    )
    problem = Problem(choices, edges, 0.35 * n)
    begun = time.monotonic()
    solution = solve(problem, time_limit_s=2.0, relative_gap=0)
    assert time.monotonic() - begun < 8.0  # generous: other processes share the machine
    assert_sound(problem, solution)
    assert not solution.optimal
    assert solution.gap > 1e-3
    assert solution.bound_s > 0


def test_start_is_kept_when_nothing_better_is_found() -> None:
    problem = random_problem(5)
    best = brute_force(problem)
    assert best is not None
    solution = solve(problem, start=best[1], time_limit_s=0.0)
    assert solution.objective_s == pytest.approx(best[0])


def test_infeasible_memory_says_how_much_is_missing_and_who_holds_it() -> None:
    choices = (
        Choice("embed", np.array([1.0, 2.0]), np.array([100.0, 60.0])),
        Choice("head", np.array([1.0, 2.0]), np.array([90.0, 10.0])),
    )
    gather = np.array([[0.0, 0.0], [0.0, 5.0]])
    edges = (Edge(0, 1, np.array([0, 1]), np.array([0, 1]), np.zeros((2, 2)), gather),)
    with pytest.raises(InfeasibleError, match=r"25 bytes are missing.*75.*50.*embed 60, head 15") as caught:
        solve(Problem(choices, edges, memory_limit_bytes=50.0))
    error = caught.value
    assert (error.proven, error.least_bytes, error.missing_bytes) == (True, 75.0, 25.0)
    assert error.consumers == (("embed", 60.0), ("head", 15.0))


def test_least_memory_of_the_report_equals_brute_force() -> None:
    reported = 0
    for seed in range(2000, 2100):
        problem = random_problem(seed)
        on_bytes = Problem(problem.choices, problem.edges, covers=problem.covers)
        if brute_force(on_bytes) is None:
            continue
        tight = Problem(problem.choices, problem.edges, -1.0, problem.covers)
        least = min(
            evaluate(problem, options)[1]
            for options in np.ndindex(*(c.cost_s.size for c in problem.choices))
            if math.isfinite(evaluate(problem, options)[0]) and not uncovered(problem, options)
        )
        with pytest.raises(InfeasibleError) as caught:
            solve(tight)
        assert caught.value.least_bytes == pytest.approx(least)
        reported += 1
    assert reported > 50


def test_no_allowed_pair_is_infeasible_without_figures() -> None:
    one = np.zeros(1)
    choices = (Choice("a", one, one), Choice("b", one, one))
    edges = (Edge(0, 1, np.array([0]), np.array([0]), np.array([[math.inf]])),)
    with pytest.raises(InfeasibleError) as caught:
        solve(Problem(choices, edges))
    assert (caught.value.proven, caught.value.least_bytes, caught.value.consumers) == (True, math.inf, ())


def test_cover_row_forces_a_dearer_option() -> None:
    choices = tuple(Choice(f"c{i}", np.array([0.0, 3.0 - i]), np.zeros(2)) for i in range(3))
    solution = solve(Problem(choices, (), covers=(((0, 1), (1, 1), (2, 1)),)), relative_gap=0)
    assert solution.options == (0, 0, 1)
    assert solution.objective_s == 1.0


def test_no_choices_is_the_empty_assignment() -> None:
    solution = solve(Problem((), ()))
    assert (solution.options, solution.objective_s, solution.optimal) == ((), 0.0, True)


def test_what_costs_no_less_than_a_plan_at_hand_is_not_searched() -> None:
    """A higher price at hand changes nothing; at that of the best without memory and covers nothing is looked for."""
    stopped = 0
    for seed in range(20):
        problem = random_problem(seed)
        if brute_force(problem) is None:
            continue
        best = brute_force(replace(problem, memory_limit_bytes=math.inf, covers=()))
        assert best is not None
        expected = solve(problem, relative_gap=0)
        assert solve(problem, relative_gap=0, beaten_s=2 * expected.objective_s + 1).options == expected.options
        with pytest.raises(optimise_module.Beaten):
            solve(problem, relative_gap=0, beaten_s=best[0] * (1 - 1e-9))
        stopped += 1
    assert stopped >= 5
