"""Loops around a parallel module on two gloo ranks: what runs gives one device's numbers, the rest is refused."""

import pytest

from tests.end_to_end.loops import LOOPS, PINS

pytestmark = [pytest.mark.part("loops"), pytest.mark.timeout(1200)]


def test_equal_to_one_device(on_two_ranks):
    for rank in on_two_ranks("loops"):
        assert len(rank["errors"]) == len(LOOPS) * len(PINS)
        for what, error in rank["errors"].items():
            assert error <= 1e-9, f"{what}: {error:.1e}"


def test_what_torch_would_let_pass_or_fail_in_is_refused(on_two_ranks):
    for rank in on_two_ranks("loops"):
        refused = rank["refused"]
        assert refused["replaced"].startswith("up.weight: p.data = ...")
        assert refused["float"].startswith("up.weight: torch.float64 on cpu cannot become torch.float32")
        for name in ("SGD", "Adagrad"):
            assert refused[name].startswith(f"{name}(fused=True) cannot step DTensors")
