"""ZeRO by lifetime on real gloo ranks: one device's numbers, a gather a step, gradients reduced as the level says."""

import pytest

from autopar.runtime.launch import CAPTURE
from tests.ahead import Ahead

PARAMETERS = 37
"""Of the small GPT."""
TWO = [
    ["gpt", "2", {"dp": 2, "zero": 2}, "eager", "plain"],
    ["gpt", "2", {"dp": 2, "zero": 2}, "aot", "accumulate"],
    ["gpt", "2", {"dp": 2, "zero": 1}, "eager", "plain"],
    ["gpt", "2", {"dp": 2, "zero": 1}, "aot", "accumulate"],
    ["gpt", "2", {"dp": 2, "zero": 1}, "eager", "no_sync"],
    ["gpt", "2", {"dp": 2, "zero": 1}, "eager", "never synced"],
    ["gpt-tied", "2", {"dp": 2, "zero": 1}, "aot", "no_sync"],
]
BOTH = {"dp": 2, "tp": 2}
FOUR = [["gpt", "2x2", {**BOTH, "zero": level}, "aot", "accumulate"] for level in (0, 1, 2, 3)]
FOUR += [["gpt", "4", {"dp": 4, "zero": level, "zero_ranks": 2}, "aot", "accumulate"] for level in (1, 2, 3)]
FOUR += [["llama", "4", {"dp": 4, "zero": 1, "recompute": "full"}, "aot", "no_sync"]]


def run(function, world, payload, timeout_s):
    preload = (*CAPTURE, "functorch.compile")
    return Ahead(f"tests.end_to_end.zero:{function}", world, payload, timeout_s, preload)


CASES = run("run_cases", 2, {"cases": TWO}, 500)
CHANGES = run("run_changes", 2, {}, 500)


def check(case, found):
    """found: one result a rank."""
    _, mesh, pin, _, how = case
    for result in found:
        assert max(result["errors"].values()) <= 1e-9, f"{case}: {result['errors']}"
        assert result["zero"] == pin["zero"], case
        if pin["zero"]:
            ranks = pin.get("zero_ranks", 4 if mesh in ("4", "2x2") else 2)
            assert 0.9 / ranks <= result["share"] <= 1.2 / ranks, case
        once = pin["zero"] in (1, 2)
        assert (result["gathers"] > 0) == once, case
        backwards = 1 if how == "never synced" else 2
        whole = pin["zero"] == 1 and how != "plain"
        assert result["scatters"] == result["gathers"] * (1 if whole else backwards), f"{case}: {result}"
        # all of a small model fits a bucket for each group: a gather, and a reduction a backward or a step
        groups = 2 if mesh == "2x2" else 1
        assert result["collectives"] <= once * groups * (1 + (1 if whole else backwards)), f"{case}: {result}"


@pytest.mark.reads(CASES)
def test_two_ranks():
    results = CASES.results()
    for case, *found in zip(TWO, *results, strict=True):
        check(case, found)
        assert found[0]["gathers"] == PARAMETERS if case[0] == "gpt" else found[0]["gathers"] > 30
    # a whole parameter is kept for the step, and its whole gradient until all of them are there, at both levels
    two, one = results[0][0]["gathered"], results[0][2]["gathered"]
    assert one == two > 0


@pytest.mark.reads(CHANGES)
def test_copies_are_dropped_when_parameters_change():
    for found in CHANGES.results():
        losses = [mine for mine, _ in found.values()]
        assert len(set(losses)) == len(losses) == 4
        for way, (mine, expected) in found.items():
            assert mine == pytest.approx(expected, rel=1e-9), way


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_four_ranks():
    for case, *found in zip(FOUR, *run("run_cases", 4, {"cases": FOUR}, 1100).results(), strict=True):
        check(case, found)
