"""Offload on real gloo ranks: not a digit changes, states lie in host memory, and copies are as many as is said."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.end_to_end.offload import SOME

REST = [
    ["2", {"dp": 2, "zero": 0}, "aot", "bf16"],
    ["2", {"dp": 2, "zero": 1}, "eager", None],
    ["2", {"dp": 2, "zero": 1}, "aot", "bf16"],
    ["2", {"dp": 2, "zero": 3}, "eager", None],
    ["2", {"tp": 2}, "aot", None],
]


def check(cases, ranks):
    for rank in ranks:
        for case, found in zip(cases, rank, strict=True):
            check_case(case, found)


def check_case(case, found):
    _, pin, _, precision = case
    none, parameters = found["none"], found["none"]["parameters"]
    assert none["fetches"] == none["puts"] == none["predicted"].get("host", 0) == 0
    for word in ("optimizer", "parameters"):
        told = found[word]
        assert told["differ"] == 0, (case, word)
        assert told["shared"] == told["after step"] == 0, (case, word)
        assert told["step"] > none["step"]
        in_call = word == "parameters" and pin.get("zero") not in (1, 2)
        if not in_call:  # once a step, for both micro-batches
            assert told["fetches"] == parameters, (case, told)
            assert told["device bytes"] > 0
        else:
            assert told["device bytes"] == 0
            assert told["fetches"] >= 2 * parameters
        assert told["puts"] == 2 * parameters, (case, told)
        assert told["host bytes"] == pytest.approx(told["predicted"]["host"], rel=0.05)
        if word == "optimizer" and pin.get("zero") not in (1, 2):
            expected = told["predicted"]["parameters_gradients_optimizer"]
            if precision == "bf16":  # of 10 bytes a parameter 2 are its cast copy, which lives within a call
                expected *= 8 / 10
            assert told["device bytes"] + told["put bytes"] == pytest.approx(expected, rel=0.05), case


@pytest.mark.part("offload")
@pytest.mark.timeout(1200)
def test_some_cases(on_two_ranks):
    check(SOME, on_two_ranks("offload"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_other_cases():
    preload = (*CAPTURE, "functorch.compile")
    check(REST, run_ranks_local("tests.end_to_end.offload:run_cases", 2, {"cases": REST}, 800, preload=preload))
