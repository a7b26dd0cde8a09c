"""Elimination is exact; message passing's bounds hold for the whole and for every option, and are tight on trees."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from autopar.solver import Problem
from autopar.solver.bound import _Ascent, descend, minimise, surviving
from autopar.solver.eliminate import eliminate, elimination_order, price
from autopar.solver.reduce import NoOptionError, simplify
from tests.solver.random_problems import layered_problem, random_problem


def reduced_problems(count: int) -> list[Problem]:
    out = []
    for seed in range(count):
        try:
            out.append(simplify(random_problem(seed)).problem)
        except NoOptionError:
            continue
    return out


@pytest.mark.parametrize(("weight_s", "price_s_per_byte"), [(1.0, 0.0), (1.0, 1e-9), (0.0, 1.0)])
def test_elimination_and_bounds_equal_brute_force(weight_s: float, price_s_per_byte: float) -> None:
    for problem in reduced_problems(120):
        priced = price(problem, price_s_per_byte, weight_s=weight_s)
        sizes = [cost.size for cost in priced.costs]
        values = {options: priced.value(options) for options in np.ndindex(*sizes)}
        best = min(values.values())
        slack = 1e-9 * max(abs(v) for v in values.values())
        order = elimination_order(priced)
        assert order is not None
        assert sorted(order) == list(range(len(sizes)))
        assert priced.value(eliminate(priced, order)) == pytest.approx(best, abs=slack)
        found = minimise(priced, time.monotonic() + 10, bounds=True)
        assert found.exact
        assert found.value == pytest.approx(best, abs=slack)
        assert found.lower is not None
        for choice, lower in enumerate(found.lower):
            for option, low in enumerate(lower):
                assert low <= min(v for o, v in values.items() if o[choice] == option) + slack


def test_forbidden_pairs_cost_more_than_any_allowed_assignment() -> None:
    seen = 0
    for problem in reduced_problems(200):
        priced = price(problem, 0.0)
        allowed, forbidden = [], []
        for options in np.ndindex(*(cost.size for cost in priced.costs)):
            raw = [
                e.cost_s[e.source_layout[options[e.source]], e.target_layout[options[e.target]]] for e in problem.edges
            ]
            (allowed if all(map(math.isfinite, raw)) else forbidden).append(priced.value(options))
        if allowed and forbidden:
            seen += 1
            assert max(allowed) < min(forbidden)
    assert seen > 20


def test_bound_is_tight_on_a_layered_graph_and_drops_most_options() -> None:
    priced = price(simplify(layered_problem(choices=30, options=20, seed=4)).problem, 0.0)
    order = elimination_order(priced)
    assert order is not None
    best = priced.value(eliminate(priced, order))
    found = minimise(priced, time.monotonic() + 30, bounds=True)
    assert found.value == pytest.approx(best)
    assert found.lower is not None
    left = surviving(found.lower, found.value)
    assert all(o in k for o, k in zip(found.options, left, strict=True))
    assert sum(k.size for k in left) < 0.3 * 30 * 20


def test_a_table_beyond_the_limits_has_no_order() -> None:
    priced = price(simplify(layered_problem(choices=30, options=20, seed=4)).problem, 0.0)
    assert elimination_order(priced, work=1e3) is None


def test_descend_never_gets_worse_and_ends_where_no_single_change_helps() -> None:
    priced = price(simplify(layered_problem(choices=12, options=8, seed=6)).problem, 0.0)
    start = [0] * 12
    end = descend(priced, start)
    assert priced.value(end) < priced.value(start)
    for choice in range(12):
        for option in range(8):
            changed = [*end[:choice], option, *end[choice + 1 :]]
            assert priced.value(changed) >= priced.value(end) - 1e-12


def test_a_bound_that_is_enough_ends_the_ascent(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = price(simplify(layered_problem(choices=30, options=20, seed=4)).problem, 0.0)
    best = minimise(priced, time.monotonic() + 30, bounds=True).value
    sweeps, sweep = [], _Ascent.sweep
    monkeypatch.setattr(_Ascent, "sweep", lambda *args, **kwargs: sweeps.append(1) or sweep(*args, **kwargs))
    found = minimise(priced, time.monotonic() + 30, bounds=True, enough=0.5 * best)
    assert 0.5 * best <= found.bound <= best
    assert not found.exact
    assert len(sweeps) < 3
