"""What the data refuse, and what an assignment costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.solver import Choice, Edge, Problem, evaluate

TWO = Choice("two", [1.0, 2.0], [10.0, 20.0])
ID2 = [0, 1]


@pytest.mark.parametrize(
    ("cost", "memory", "message"),
    [
        ([], [], "at least 1"),
        ([1.0], [1.0, 2.0], "one length"),
        ([math.nan], [0.0], "NaN"),
        ([1.0], [-math.inf], "-inf"),
    ],
)
def test_choice_refuses(cost: list[float], memory: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=f"'bad'.*{message}"):
        Choice("bad", np.array(cost), np.array(memory))


@pytest.mark.parametrize(
    ("layout", "cost", "memory", "message"),
    [
        ([0, 2], np.zeros((2, 2)), None, "indices below 2"),
        ([0, -1], np.zeros((2, 2)), None, "indices below 2"),
        (ID2, np.full((2, 2), -1.0), None, "negative"),
        (ID2, np.full((2, 2), math.nan), None, "NaN"),
        (ID2, np.zeros(2), None, "matrix"),
        (ID2, np.zeros((2, 2)), np.zeros((2, 1)), "shape"),
        (ID2, np.zeros((2, 2)), np.full((2, 2), math.inf), "finite"),
    ],
)
def test_edge_refuses(layout: list[int], cost: np.ndarray, memory: np.ndarray | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"edge 0 -> 1.*{message}"):
        Edge(0, 1, layout, ID2, cost, memory)


def test_problem_refuses_indices_without_their_choice_or_option() -> None:
    zeros = np.zeros((2, 2))
    with pytest.raises(ValueError, match="1 choices"):
        Problem((TWO,), (Edge(0, 1, ID2, ID2, zeros),))
    with pytest.raises(ValueError, match="3 layouts for the 2 options of 'two'"):
        Problem((TWO, TWO), (Edge(0, 1, [0, 1, 1], ID2, zeros),))
    with pytest.raises(ValueError, match=r"cover \(0, 2\)"):
        Problem((TWO,), (), covers=(((0, 2),),))
    with pytest.raises(ValueError, match="NaN"):
        Problem((TWO,), (), memory_limit_bytes=math.nan)


def test_evaluate_adds_choices_edges_and_their_memory() -> None:
    edge = Edge(0, 1, [1, 0], ID2, [[0.0, 0.5], [math.inf, 0.25]], [[1.0, 2.0], [3.0, 4.0]])
    problem = Problem((TWO, TWO), (edge, Edge(0, 0, ID2, ID2, np.diag([7.0, 8.0]))))
    assert evaluate(problem, (0, 1)) == (1.0 + 2.0 + 0.25 + 7.0, 10.0 + 20.0 + 4.0)
    assert evaluate(problem, (0, 0))[0] == math.inf
    with pytest.raises(ValueError, match="zip"):
        evaluate(problem, (0,))
