"""Reductions keep the optimum, and each does what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import Choice, Edge, Problem, evaluate
from autopar.solver.reduce import NoOptionError, Reduction, drop_dominated, simplify
from tests.solver.random_problems import brute_force, random_problem

ID2 = np.arange(2)


def assert_same_optimum(problem: Problem, reduction: Reduction) -> None:
    before, after = brute_force(problem), brute_force(reduction.problem)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after[0] == pytest.approx(before[0], rel=1e-9, abs=0)
        cost_s, memory_bytes = evaluate(problem, reduction.expand(after[1]))
        assert cost_s == pytest.approx(before[0], rel=1e-9, abs=0)
        assert memory_bytes == pytest.approx(evaluate(reduction.problem, after[1])[1])


@settings(max_examples=150, deadline=None)
@given(st.integers(min_value=0, max_value=2**31))
def test_reductions_keep_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    try:
        reduction = simplify(problem)
        assert_same_optimum(problem, reduction)
        for _ in range(2):
            reduction = reduction.then(drop_dominated(reduction.problem))
            assert_same_optimum(problem, reduction)
    except NoOptionError:
        assert brute_force(problem) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0, max_value=2**31))
def test_simplify_keeps_the_cost_of_every_assignment(seed: int) -> None:
    problem = random_problem(seed)
    try:
        reduction = simplify(problem)
    except NoOptionError:
        return
    for options in np.ndindex(*(k.size for k in reduction.kept)):
        inside, outside = evaluate(reduction.problem, options), evaluate(problem, reduction.expand(options))
        assert inside == pytest.approx(outside, rel=1e-9)
        assert reduction.inner(reduction.expand(options)) == options


def test_simplify_folds_self_edges_sums_parallel_ones_and_frees_what_splits() -> None:
    choices = tuple(Choice(f"c{i}", np.zeros(2), np.zeros(2)) for i in range(3))
    swap = np.array([[0.0, 1.0], [2.0, 0.0]])
    reduced = simplify(
        Problem(
            choices,
            (
                Edge(0, 0, ID2, ID2, np.diag([4.0, 5.0])),
                Edge(0, 1, ID2, ID2, swap),
                Edge(1, 0, ID2, ID2, swap),
                Edge(1, 2, ID2, ID2, np.array([[1.0, 2.0], [3.0, 4.0]])),
            ),
        )
    ).problem
    assert [(e.source, e.target) for e in reduced.edges] == [(0, 1)]
    assert [float(reduced.edges[0].cost_s.max()), float(reduced.edges[0].cost_s.min())] == [3.0, 0.0]
    assert reduced.choices[0].cost_s.tolist() == [4.0, 5.0]
    assert evaluate(reduced, (0, 1, 1))[0] == 4.0 + 3.0 + 4.0


def test_simplify_joins_equal_and_unused_layouts() -> None:
    cost = np.array([[0.0, 1.0, 9.0], [0.0, 1.0, 9.0], [2.0, 0.0, 9.0], [7.0, 7.0, 7.0]])
    edge = Edge(0, 1, np.array([0, 1, 2]), ID2, cost)
    choices = (Choice("a", np.zeros(3), np.zeros(3)), Choice("b", np.zeros(2), np.zeros(2)))
    assert simplify(Problem(choices, (edge,))).problem.edges[0].cost_s.shape == (2, 2)


def test_forbidden_options_go_and_none_left_is_said() -> None:
    choice = Choice("a", np.array([1.0, math.inf]), np.zeros(2))
    assert simplify(Problem((choice,), ())).kept[0].tolist() == [0]
    with pytest.raises(NoOptionError, match="'b'"):
        simplify(Problem((Choice("b", np.array([math.inf]), np.zeros(1)),), ()))


@pytest.mark.parametrize(
    ("memory", "limit", "left"),
    [([0.0, 0.0], math.inf, [0]), ([5.0, 0.0], math.inf, [0]), ([5.0, 0.0], 5.0, [0, 1]), ([0.0, 5.0], 5.0, [0])],
)
def test_dominance_counts_memory_only_under_a_limit(memory: list[float], limit: float, left: list[int]) -> None:
    problem = Problem((Choice("a", np.array([1.0, 2.0]), np.array(memory)),), (), limit)
    assert drop_dominated(problem)[0].tolist() == left


def test_dominance_keeps_one_of_equal_options_and_what_a_cover_needs() -> None:
    choice = Choice("a", np.array([1.0, 1.0, 3.0]), np.zeros(3))
    assert drop_dominated(Problem((choice,), ()))[0].size == 1
    other = Choice("b", np.zeros(2), np.zeros(2))
    covered = Problem((choice, other), (), covers=(((0, 2), (1, 0)),))
    assert 2 in drop_dominated(covered)[0].tolist()


def test_dominance_looks_across_edges() -> None:
    choices = (Choice("a", np.array([0.0, 1.0]), np.zeros(2)), Choice("b", np.zeros(2), np.zeros(2)))
    cheap, dear = (Edge(0, 1, ID2, ID2, np.array([[0.0, x], [0.0, 0.0]])) for x in (0.9, 1.1))
    assert drop_dominated(Problem(choices, (cheap,)))[0].tolist() == [0]
    assert drop_dominated(Problem(choices, (dear,)))[0].tolist() == [0, 1]
