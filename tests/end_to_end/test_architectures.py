"""Architectures of transformers and of the zoo give the numbers of one device: train and eval mode, float64 and bf16.

Pinned runs must also be divided ones: by the plan's degrees, the operations that a rank counts and the parameters it
holds. No op may be kept whole for want of a rule. Ranks are real gloo processes, one group of them for many cases.
`tests/bench/architectures.py` prints the table of all results.
"""

import math

import pytest

from autopar.runtime.launch import CAPTURE
from tests.ahead import Ahead
from tests.end_to_end.architectures import ARCHITECTURES

DP, TP, FREE, TIGHT = {"pin": {"dp": 2}}, {"pin": {"tp": 2}}, {}, {"memory": 0.8}
BOTH = {"pin": {"dp": 2, "tp": 2}}

DEFAULT = [
    ["mixtral", "train", "float64", "2", TP],
    ["t5", "train", "float64", "2", TP],
    ["clip", "train", "float64", "2", DP],
    ["resnet", "train", "float64", "2", DP],
    ["llama-lora-dropout", "train", "float64", "2", DP],
    ["bert", "train", "bfloat16", "2", DP],
    ["vit", "eval", "float64", "2", TP],
    ["zoo-unet", "train", "float64", "2", TP],
]
TIGHT_OF = ("gpt2", "mixtral", "t5", "resnet", "clip", "zoo-unet")
TRAIN = [[name, "train", "float64", "2", options] for name in ARCHITECTURES for options in (DP, TP, FREE)]
TRAIN += [[name, "train", "float64", "2", TIGHT] for name in TIGHT_OF]
EVAL = [[name, "eval", "float64", "2", options] for name in ARCHITECTURES for options in (DP, TP)]
HALF = [[n, mode, "bfloat16", "2", how] for mode in ("train", "eval") for n in ARCHITECTURES for how in (DP, TP)]
FOUR_OF = ("mixtral", "deepseek-v3", "t5", "resnet", "mamba2", "clip", "qwen3", "zoo-moe", "zoo-unet")
FOUR = [[name, "train", "float64", "2x2", BOTH] for name in FOUR_OF]

WHOLE = 0.2
"""Share of the parameters of small models like these that tensor parallelism may leave whole: tables of positions,
norms, biases after a sum."""

MORE_WORK = {"zoo-moe": 0.1}
"""Share of the operations done twice under tensor parallelism, where it is above 0.04: products of activations alone,
such as those that send tokens to slots."""


def run(cases, world, timeout_s):
    modules = {module: None for name, *_ in cases for module in ARCHITECTURES[name].preload}
    target = "tests.end_to_end.architecture_runs:run_cases"
    return Ahead(target, world, {"cases": cases}, timeout_s, (*CAPTURE, *modules))


def check_all(cases, results):
    wrong = [fault for case, *found in zip(cases, *results, strict=True) for fault in faults(case, found)]
    assert not wrong, "\n".join(wrong)


def faults(case, found):
    """What is wrong with a case, one line each; all cases of a group are run before the first is reported."""
    name, mode, dtype, _, options = case
    for rank, result in enumerate(found):
        where = f"{name} {mode} {dtype} {options or 'free'}, rank {rank}"
        if "refused" in result:
            yield f"{where}: {result['refused']}"
            continue
        if not result["compared"]["loss"] or not result["compared"]["grads"]:
            yield f"{where}: nothing was compared: {result['compared']}"
        for category, bound in result["bounds"].items():
            if bound is not None and not result["errors"][category] <= bound:
                yield f"{where}: {category} {result['errors'][category]:.2e} > {bound:.2e}; worst {result['worst']}"
        if result["no_rule"]:
            yield f"{where}: kept whole for want of a rule: {result['no_rule']}"
        yield from (f"{where}: {fault}" for fault in _undivided(name, options, result))


def _undivided(name, options, result):
    pin = options.get("pin", {})
    degrees = {role: result["degrees"][role] for role in ("dp", "tp")}
    if any(degrees[role] != pin[role] for role in pin):
        yield f"degrees {degrees}"
    ways = math.prod(pin.values())
    if pin and result["work"] > (1 + MORE_WORK.get(name, 0.04)) / ways:
        yield f"does {result['work']:.3f} of the operations"
    held = 1 / pin["tp"] + WHOLE if "tp" in pin else 1.0
    if pin and not 1 / ways <= result["share"] <= held:
        yield f"holds {result['share']:.3f} of the parameters"
    if options == TIGHT and result["work"] > 0.9 and result["share"] > 0.9:
        yield "is not divided, though memory is short"


RUN = run(DEFAULT, 2, 500)


@pytest.mark.reads(RUN)
def test_two_ranks():
    check_all(DEFAULT, RUN.results())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", [TRAIN, EVAL, HALF], ids=["train", "eval", "bfloat16"])
def test_all_on_two_ranks(cases):
    check_all(cases, run(cases, 2, 3500).results())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_data_and_tensor_parallel_on_four_ranks():
    check_all(FOUR, run(FOUR, 4, 3500).results())
