"""A short run of the fuzzer, and that it can fail: wrong rules are found, shrunk and printed as files that run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.rules import TABLE, pointwise
from autopar.rules.rule import rule
from tests.fuzz.campaign import run
from tests.fuzz.plans import FuzzPlan
from tests.fuzz.shrink import Failure, failure_file, shrink
from tests.fuzz.steps import FAMILIES, draw_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_random_models_under_random_plans_equal_one_device():
    counts = run(seed=0, pairs=5 * len(FAMILIES), plans=5)
    assert not counts.failures, [str(f[-1]) for f in counts.failures]
    assert counts.pairs == 5 * len(FAMILIES)
    assert 2 * counts.contractions_split >= counts.pairs, counts.report()
    assert min(counts.families.values()) >= 1, counts.report()


def test_a_seed_draws_the_same_models():
    for index in range(len(FAMILIES)):
        one, two = draw_recipe(3, index)[0], draw_recipe(3, index)[0]
        assert one.source() == two.source()
    assert draw_recipe(3, 0)[0].source() != draw_recipe(4, 0)[0].source()


def _sum_without_partial(call):
    """A wrong rule: the summed dim is cut as if its sum were whole on every rank."""
    made = TABLE_SUM(call)
    assert made is not None
    from dataclasses import replace

    from autopar.rules.rule import Distributed

    lost = {f for dims in made.ins for dim in dims for f in dim} - {
        f for dims in made.outs for dim in dims for f in dim
    }
    return replace(made, distributed={f: Distributed(output="I") for f in lost})


TABLE_SUM = TABLE["mean"]

WRONG = {
    "softmax": ("softmax", lambda call: pointwise.pointwise(call)),
    "mean": ("reduction", _sum_without_partial),
    "cumsum": ("scan", lambda call: rule("... -> ...", call.in_shapes, call.out_shapes)),
}
"""Op -> (its family, a wrong rule of it)."""


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_rule_is_found(op, monkeypatch):
    family, wrong = WRONG[op]
    monkeypatch.setitem(TABLE, op, wrong)
    counts = run(seed=0, pairs=200, plans=10, first=FAMILIES.index(family), step=len(FAMILIES), most_failures=1)
    assert counts.failures, counts.report()


def test_a_failure_is_shrunk_to_a_file_that_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(TABLE, "softmax", WRONG["softmax"][1])
    found: list[Failure] = []

    def keep(subject, plan, mismatch):
        found.append(shrink(subject, plan, mismatch, seconds=30))

    run(seed=0, pairs=200, plans=10, first=FAMILIES.index("softmax"), step=len(FAMILIES), most_failures=1, found=keep)
    (failure,) = found
    assert isinstance(failure.plan, FuzzPlan)
    assert "softmax" in failure.recipe.source()
    assert len(failure.recipe.steps) <= 4, failure.recipe.source()
    path = tmp_path / "failure.py"
    path.write_text(failure_file(failure, "test"))
    ran = subprocess.run(
        [sys.executable, str(path)], env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True
    )
    # the file runs against the right rules, which hold
    assert (ran.returncode, ran.stdout.strip()) == (0, "equal"), ran.stderr
