"""cost/offload.py: what leaves the device, what arrives on the host, and how long a step moves it."""

import dataclasses

import pytest

from autopar.cost.hardware import load_profile, profile_names
from autopar.cost.memory import parameter_bytes
from autopar.cost.offload import check_host, offload_price
from autopar.errors import PlanError

A100 = load_profile("a100-sxm-80gb")
BF16 = parameter_bytes("adamw", 4, "bf16")
"""4 bytes of weights, 2 of their copy, 4 of gradients, 8 of states."""


@pytest.mark.parametrize(
    ("offload", "gathered_once", "whole_call", "device", "sent"),
    [
        ("optimizer", False, False, 10, 4 + 4),
        ("parameters", False, False, 0, 2 + 2 + 4),
        ("parameters", False, True, 10, 4 + 4),
        ("optimizer", True, False, 0, 2 + 4),
        ("parameters", True, True, 0, 2 + 4),
    ],
)
def test_by_hand(offload, gathered_once, whole_call, device, sent):
    found = offload_price(BF16, offload, gathered_once, whole_call, A100)
    assert (found.device_bytes, found.host_bytes) == (device, 16)
    expected = sent / A100.host_link_bytes_per_s + (2 * 4 + 4 + 2 * 8) / A100.host_memory_bytes_per_s
    assert found.update_s == pytest.approx(expected, rel=1e-12)


def test_every_profile_knows_its_host():
    for name in profile_names():
        profile = load_profile(name)
        check_host(profile)
        assert profile.host_link_bytes_per_s < profile.memory_bandwidth_bytes_per_s


def test_refuses_a_host_of_unknown_speed():
    unknown = dataclasses.replace(A100, host_link_bytes_per_s=0.0)
    with pytest.raises(PlanError, match=r"profile 'a100-sxm-80gb' has no host_link_bytes_per_s"):
        check_host(unknown)
