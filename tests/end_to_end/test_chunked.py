"""Logits in chunks on two ranks, of a cut vocabulary, gathered weights, micro-batches: as one device."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local

PLANS = {
    "vocabulary": {"tp": 2, "lm_head*": {"tp": "S(0)"}},
    "gathered": {"dp": 2, "zero": 3},
    "micro-batches": {"dp": 2, "zero": 1, "microbatches": 2},
}
CASES = [["gpt", "2", {"pin": {**pin, "loss_chunks": 3}}] for pin in PLANS.values()]


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
