"""backend="aot" on real gloo ranks: equal to one device in float64, with the collectives that the plan means."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.ahead import Ahead
from tests.end_to_end.aot import run_cases

BOUND, PARAMETERS = {"hf-gpt2": 1e-6}, {"hf-gpt2": 1e-4}
"""Bounds of models that compute their loss in float32; others are held to 1e-9."""
DP, TP, ZERO, SP = {"dp": 2, "zero": 0}, {"tp": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "sp": True}
TWO = {
    "dp": ["gpt", "2", {"pin": DP}],
    "tp": ["llama", "2", {"pin": TP}],
    "zero": ["gpt", "2", {"pin": ZERO}],
    "sp": ["gpt-tied", "2", {"pin": SP}],
    "zero, selective": ["gpt", "2", {"pin": {**ZERO, "recompute": "selective"}}],
    "zero, full": ["gpt", "2", {"pin": {**ZERO, "recompute": "full"}}],
    "dropout": ["dropout", "2", {"pin": {**DP, "recompute": "full"}}],
}
TIED = ["hf-gpt2", "2", {"pin": {**ZERO, "recompute": "selective"}}]
BOTH = {"dp": 2, "tp": 2}
FOUR = [["gpt", "2x2", {"pin": {**BOTH, "recompute": r}}] for r in ("none", "full")]
FOUR += [["llama", "2x2", {"pin": {**BOTH, "zero": 3, "recompute": "full"}}], ["dropout", "4", {"pin": {"dp": 4}}]]


def check(case, results):
    """results: one a rank."""
    for rank, result in enumerate(results):
        for what, error in result["errors"].items():
            bound = (PARAMETERS if what == "parameters" else BOUND).get(case[0], 1e-9)
            assert error <= bound, f"{case}, rank {rank}: {what}: {error:.1e}"


def ranks(world, cases, timeout_s):
    preload = (*CAPTURE, "functorch.compile")
    return run_ranks_local("tests.end_to_end.aot:run_cases", world, {"cases": cases}, timeout_s, preload=preload)


RUN = Ahead("tests.end_to_end.aot:run_cases", 2, {"cases": list(TWO.values())}, 500, (*CAPTURE, "functorch.compile"))


def two(name):
    """What each rank gave."""
    return [rank[list(TWO).index(name)] for rank in RUN.results()]


@pytest.mark.reads(RUN)
@pytest.mark.parametrize("name", TWO)
def test_equal_to_one_device(name):
    check(TWO[name], two(name))


@pytest.mark.reads(RUN)
def test_data_parallel_gradients_are_one_bucket():
    assert two("dp")[0]["backward"]["all_reduce"] == 1
    assert "reduce_scatter_tensor" not in two("dp")[0]["backward"]


@pytest.mark.reads(RUN)
def test_zero_gathers_each_block_in_both_graphs_and_scatters_gradients_in_one_bucket():
    """Of 27 parameters; two layers, what stands before and after them, and some activations."""
    found = two("zero")[0]
    assert found["zero"] == 3
    assert 4 <= found["forward"]["all_gather_into_tensor"] <= 10
    assert 3 <= found["backward"]["all_gather_into_tensor"] <= 10
    assert 1 <= found["backward"]["reduce_scatter_tensor"] <= 6


@pytest.mark.reads(RUN)
def test_recomputing_saves_less():
    saved = [two(name)[0]["saved_bytes"] for name in ("zero", "zero, selective", "zero, full")]
    assert saved[0] > 1.3 * saved[1] > 1.3 * saved[2] > 0


def test_one_device():
    cases = [["gpt", "1", {}], ["dropout", "1", {"pin": {"recompute": "full"}}]]
    for case, found in zip(cases, run_cases({"cases": cases}), strict=True):
        check(case, [found])
        assert not found["forward"]
        assert not found["backward"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "cases"), [(2, [TIED]), (4, FOUR)])
def test_larger(world, cases):
    for case, *found in zip(cases, *ranks(world, cases, 1100), strict=True):
        check(case, found)
