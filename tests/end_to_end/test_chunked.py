"""Logits in chunks on two ranks, of a cut vocabulary, gathered weights, micro-batches, stages: as one device."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local

PLANS = {
    "vocabulary": {"tp": 2, "lm_head*": {"tp": "S(0)"}},
    "gathered": {"dp": 2, "zero": 3},
    "micro-batches": {"dp": 2, "zero": 1, "microbatches": 2},
}
CASES = [["gpt", "2", {"pin": {**pin, "loss_chunks": 3}}] for pin in PLANS.values()]


STAGES = [
    ["gpt", "2", 8, {"pin": {"pp": 2, "microbatches": 2, "loss_chunks": 3}}],
    ["gpt-tied", "2", 8, {"pin": {"pp": 2, "microbatches": 3, "schedule": "gpipe", "loss_chunks": 4}}],
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stages_equal_one_device():
    preload = (*CAPTURE, "functorch.compile")
    for found in run_ranks_local("tests.end_to_end.pipeline:run_cases", 2, {"cases": STAGES}, 300, preload=preload):
        for case in found:
            assert "refused" not in case, case
            errors = (*case["losses"], *case["norms"], *case["grads"].values(), *case["params"].values())
            assert max(errors) < 1e-9, case


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_equal_one_device():
    preload = (*CAPTURE, "functorch.compile")
    ranks = run_ranks_local("tests.end_to_end.parity:run_cases", 2, {"cases": CASES}, 300, preload=preload)
    for found in ranks:
        for plan, case in zip(PLANS, found, strict=True):
            assert "refused" not in case, (plan, case)
            for what in ("losses", "grads", "params"):
                errors = case[what].values() if isinstance(case[what], dict) else case[what]
                assert max(errors) < 1e-9, (plan, what)
