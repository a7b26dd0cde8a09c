"""Optimizers as they are: on two gloo ranks they train like one device, or are refused by name."""

import pytest

pytestmark = [pytest.mark.part("optimizers"), pytest.mark.timeout(1200)]


@pytest.fixture
def found(on_two_ranks):
    return on_two_ranks("optimizers")


def test_equal_to_one_device(found):
    for rank in found:
        assert len(rank["errors"]) == 21
        for what, error in rank["errors"].items():
            # Muon orthogonalises in bfloat16: rounding of its sums shows
            assert error <= (1e-2 if what.startswith("Muon") else 1e-9), f"{what}: {error:.1e}"


def test_what_dtensor_cannot_run_is_refused_by_name(found):
    for name in ("Adafactor", "Rprop"):
        said = found[0]["refused"][f"{name} 3"]
        assert said.startswith(f"{name} cannot step sharded parameters"), said
        assert "AdamW" in said
        assert found[0]["refused"][f"{name} 0"] == ""  # whole parameters are none to it
