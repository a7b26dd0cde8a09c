"""Asynchronous pipelines train step for step as the same staleness written out on one device, in float64."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.ahead import Ahead

BOUND = 1e-12
CASES = "tests.end_to_end.asynchronous:run_cases"

TWO = [
    ["2", {"tied": True}, {"pp": 2, "microbatches": 3, "schedule": "async-1f1b"}, "aot"],
    ["2", {"skip": True}, {"pp": 2, "microbatches": 1, "schedule": "2bw"}, "eager"],
]
STAGES = {"pp": 4, "stages": [2, 2, 2, 2]}
FOUR = [
    ["4", {"skip": True}, {**STAGES, "microbatches": 1, "schedule": "async-1f1b"}, "eager"],
    ["4", {"skip": True}, {**STAGES, "microbatches": 2, "schedule": "async-1f1b"}, "aot"],
    ["4", {"tied": True}, {**STAGES, "microbatches": 1, "schedule": "async-1f1b"}, "aot"],
    ["4", {"tied": True}, {**STAGES, "microbatches": 3, "schedule": "2bw"}, "eager"],
    ["2x2", {}, {"pp": 2, "dp": 2, "zero": 0, "microbatches": 2, "schedule": "2bw"}, "aot"],
    ["2x2", {}, {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "schedule": "async-1f1b"}, "aot"],
    ["2x2", {}, {"pp": 2, "dp": 2, "zero": 2, "microbatches": 1, "schedule": "async-1f1b"}, "eager"],
    ["2x2", {}, {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2, "schedule": "2bw"}, "aot"],
    ["2x2", {}, {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "async-1f1b"}, "aot"],
]


def staleness(pin):
    """Of each stage, the most updates that a gradient is behind."""
    p, m = pin["pp"], pin["microbatches"]
    return [1 if pin["schedule"] == "2bw" else (m - 1 + p - 1 - s) // m for s in range(p)]


def run(cases, world, timeout_s):
    return Ahead(CASES, world, {"cases": cases}, timeout_s)


def check(cases, results):
    for case, *found in zip(cases, *results, strict=True):
        pin = case[2]
        for result in found:
            for what in ("losses", "params", "eval"):
                assert result[what] <= BOUND, f"{case}: {what} {result[what]:.2e}"
            assert result["handed"], f"{case}: other parameters got a gradient"
            assert result["moved"] > 0.1, f"{case}: nothing was trained"
            assert result["staleness"] == staleness(pin), case
        stages = sorted(result["in_flight"] for result in found)
        assert set(stages) == set(range(1, pin["pp"] + 1)), f"{case}: {stages}"  # p - s on stage s


RUN = run(TWO, 2, 500)


@pytest.mark.reads(RUN)
def test_two_ranks():
    check(TWO, RUN.results())


@pytest.mark.slow
def test_four_ranks():
    check(FOUR, run(FOUR, 4, 280).results())


@pytest.mark.slow
def test_what_a_loop_may_do():
    for found in run_ranks_local("tests.end_to_end.asynchronous:uses", 2, {}, 200, preload=CAPTURE):
        assert (
            "PlanError: schedule async-1f1b: an asynchronous pipeline trains on batches of one shape"
            in (found["smaller batch"])
        )
        assert "the loss is computed outside the model" in found["loss outside"]
        assert "does not equal one device" in found["verify"]
        assert found["masks"] == 0.0
        assert "at most 1, 0 updates behind, 2, 1 versions of the weights" in found["table"]
