"""Lowered training: ZeRO level x recomputation x accumulation x precision or offload, against one device; bytes as
predicted.
"""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.end_to_end.lowered import PRODUCT, pairwise

EXACT, ROUGH = 1e-9, 1.5
"""Errors in the model's own float64; in bf16 those of one device in bf16, times this."""


def run(mesh, world, cases, timeout_s):
    preload = (*CAPTURE, "functorch.compile")
    payload = {"mesh": mesh, "cases": cases}
    return run_ranks_local("tests.end_to_end.lowered:run_cases", world, payload, timeout_s, preload=preload)


def check(found):
    """found: one result a case."""
    for case in found:
        bf16 = case["precision"] == "bf16"
        for what, error in case["errors"].items():
            if bf16 and what == "parameters":  # Adam turns by the sign of a gradient, which rounding decides for some
                continue
            bound = ROUGH * case["rough"][what] if bf16 else EXACT
            assert error <= bound, f"{case}: {what}: {error:.2e} > {bound:.2e}"
        assert case["zero of plan"] == case["zero"]
        predicted = case["predicted"]["host" if case["precision"] == "offload" else "parameters_gradients_optimizer"]
        if bf16:  # of 18 bytes a parameter 2 are its cast copy, which lives within a call
            predicted *= 16 / 18
        measured = sum(case["bytes"].values())
        assert measured == pytest.approx(predicted, rel=0.05), case
        assert case["saved_in_run"] == pytest.approx(case["saved_bytes"], rel=0.02), case


def check_saved(found):
    """Recomputing saves less, whatever the rest."""
    saved = {}
    for case in found:
        key = tuple(case[k] for k in ("zero", "accumulate", "precision"))
        saved.setdefault(key, {})[case["recompute"]] = case["saved_bytes"]
    for levels in saved.values():
        assert levels["none"] > levels["selective"] > levels["full"] > 0


@pytest.mark.part("lowered")
@pytest.mark.timeout(1200)
def test_pairwise_on_two_ranks(on_two_ranks):
    for found in on_two_ranks("lowered"):
        check(found)


def test_pairs_meet():
    assert len(pairwise()) <= 14
    assert {(c["zero"], c["recompute"]) for c in pairwise()} == {(c["zero"], c["recompute"]) for c in PRODUCT}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pairwise_on_four_ranks():
    for found in run("4", 4, pairwise(), 1700):
        check(found)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_full_product_on_two_ranks():
    for found in run("2", 2, PRODUCT, 1700):
        check(found)
        check_saved(found)
