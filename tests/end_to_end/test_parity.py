"""Every plan trains like one device: losses, all gradients and all parameters after three AdamW steps, in float64.

A pinned run must also be a divided one: by the plan's degrees, by the elements that a rank holds and by the operations
it counts. Ranks are real gloo processes, one group of them for all cases of a size.
"""

import math

import pytest

from autopar.runtime.launch import CAPTURE
from tests.ahead import Ahead
from tests.end_to_end.parity import run_cases

BOUND = 1e-9
LOWER = {"hf-gpt2": 1e-6, "hf-llama": 1e-6}
"""Models that compute their loss in float32; parameters are then held to 1e-4."""

DP, TP, SP, ZERO = {"dp": 2}, {"tp": 2}, {"tp": 2, "sp": True}, {"dp": 2, "zero": 3}
BOTH, ALL_TP = {"dp": 2, "tp": 2}, {"tp": 4, "sp": False}
MODELS = ("gpt", "llama", "hf-gpt2", "hf-llama")


def pinned(*rows):
    return [[model, mesh, {"pin": pin}] for model, mesh, pin in rows]


ONE = [[model, "1", {}] for model in MODELS]
TWO = pinned(("gpt", "2", ZERO), ("llama", "2", SP), ("hf-gpt2", "2", TP), ("hf-llama", "2", DP))
# hf-llama has two key/value heads: four tensor-parallel ranks hold two copies of each.
FOUR = pinned(("hf-llama", "4", ALL_TP), ("hf-gpt2", "2x2", BOTH), ("llama", "2x2", {**BOTH, "zero": 3}))
FOUR += [["gpt", "4", {"memory_share": 0.5}]]

EVERY_TWO = pinned(*((m, "2", p) for m in MODELS for p in (DP, TP, SP, ZERO))) + [[m, "2", {}] for m in MODELS]
_PINS = (
    {"dp": 4},
    ALL_TP,
    {"tp": 4, "sp": True},
    {"dp": 4, "zero": 3},
    BOTH,
    {**BOTH, "sp": True},
    {**BOTH, "zero": 3},
)
EVERY_FOUR = pinned(*((model, mesh, pin) for mesh in ("4", "2x2") for model in MODELS for pin in _PINS))
EVERY_FOUR += [[m, mesh, options] for mesh in ("4", "2x2") for m in MODELS for options in ({}, {"memory_share": 0.5})]
EVERY_TWO = [case for case in EVERY_TWO if case not in TWO]
EVERY_FOUR = [case for case in EVERY_FOUR if case not in FOUR]


def check(case, found):
    """found: one result a rank."""
    model, _, options = case
    bound = LOWER.get(model, BOUND)
    pin = options.get("pin", {})
    degrees = {role: pin.get(role, 1) for role in ("dp", "tp")}
    for rank, result in enumerate(found):
        where = f"{case}, rank {rank}"
        assert "refused" not in result, f"{where}: {result['refused']}"
        assert result["names"], where
        assert max(result["losses"]) <= bound, f"{where}: {result['losses']}"
        _all_below(result["grads"], bound, f"{where}, gradient")
        _all_below(result["params"], 1e-4 if model in LOWER else BOUND, f"{where}, parameter")
        divided = _divided(pin, degrees, result, where)
        share = result["local"] / result["total"]
        if "memory_share" in options:
            assert share < 0.6, f"{where}: holds {share:.2f} of the parameters"
        elif not divided:
            assert "pin" not in options


def _all_below(errors, bound, where):
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, f"{where} {worst}: {errors[worst]:.2e}"


def _divided(pin, degrees, result, where):
    ways = math.prod(degrees.values())
    if ways == 1:
        return False
    assert {role: result["degrees"][role] for role in degrees} == degrees, f"{where}: {result['degrees']}"
    assert result["zero"] == pin.get("zero", 0), where
    work = result["flop"] / result["reference_flop"]
    assert work <= 1.02 / ways, f"{where}: does {work:.3f} of the operations"
    share = result["local"] / result["total"]
    if pin.get("zero") == 3:
        assert share <= 1.3 / ways, f"{where}: holds {share:.2f} of the parameters"
    elif degrees["tp"] > 1:  # norms, and the table of positions, are whole on every rank
        assert share <= 1 / degrees["tp"] + 0.12, f"{where}: holds {share:.2f} of the parameters"
    else:
        assert share == 1, where
    if "sp" in pin:
        assert bool(result["sequence_cut"]) == pin["sp"], f"{where}: {result['sequence_cut']}"
    return True


def run(cases, world, timeout_s):
    preload = (*CAPTURE, "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
    return Ahead("tests.end_to_end.parity:run_cases", world, {"cases": cases}, timeout_s, preload)


def check_all(cases, results):
    for case, *found in zip(cases, *results, strict=True):
        check(case, found)


def test_one_device_needs_no_process_group():
    for case, found in zip(ONE, run_cases({"cases": ONE}), strict=True):
        check(case, [found])


RUN = run(TWO, 2, 500)


@pytest.mark.reads(RUN)
def test_two_ranks():
    check_all(TWO, RUN.results())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks():
    check_all(FOUR, run(FOUR, 4, 280).results())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_plan_on_two_ranks():
    check_all(EVERY_TWO, run(EVERY_TWO, 2, 1700).results())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_plan_on_four_ranks():
    check_all(EVERY_FOUR, run(EVERY_FOUR, 4, 3500).results())
