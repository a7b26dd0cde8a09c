"""Bytes a parameter, and bytes a device."""

import pytest

from autopar.cost.hardware import load_profile
from autopar.cost.memory import ParameterBytes, optimizer_bytes, parameter_bytes, usable_bytes
from autopar.errors import PlanError

H100 = load_profile("h100-sxm")


@pytest.mark.parametrize(
    ("optimizer", "element_bytes", "precision", "expected"),
    [
        ("adamw", 4, None, (4, 0, 4, 8)),
        ("adamw", 4, "fp32", (4, 0, 4, 8)),
        ("adamw", 4, "bf16", (4, 2, 4, 8)),
        ("adamw", 2, "bf16", (4, 2, 4, 8)),
        ("adamw", 4, "fp16", (4, 2, 4, 8)),
        ("adamw", 2, None, (2, 0, 2, 8)),
        ("adamw", 8, None, (8, 0, 8, 16)),
        ("adamw", 8, "fp32", (8, 4, 8, 16)),
        ("sgd", 4, None, (4, 0, 4, 4)),
        ("none", 4, "bf16", (4, 2, 4, 0)),
        (0, 4, None, (4, 0, 4, 0)),
        (12, 4, None, (4, 0, 4, 12)),
    ],
)
def test_roles(optimizer, element_bytes, precision, expected):
    found = parameter_bytes(optimizer, element_bytes, precision)
    assert found == ParameterBytes(*expected)
    assert found.total == sum(expected)
    assert optimizer_bytes(optimizer, element_bytes, precision) == expected[3]


@pytest.mark.parametrize("optimizer", ["adam", "", None, -1, 2.5, True])
def test_bad_optimizer(optimizer):
    with pytest.raises(PlanError, match="optimizer") as error:
        optimizer_bytes(optimizer, 4, None)
    assert repr(optimizer) in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_precision():
    with pytest.raises(PlanError, match="precision 'fp8' is none of"):
        parameter_bytes("adamw", 4, "fp8")
    with pytest.raises(PlanError, match="precision 'fp8'"):
        optimizer_bytes("adamw", 4, "fp8")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("70GiB", 70 * 2**30),
        ("70 gib", 70 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("1TB", 10**12),
        ("64KiB", 2**16),
        ("123B", 123),
        ("123", 123),
        (5, 5),
        (10**15, 10**15),
    ],
)
def test_usable(memory, expected):
    assert usable_bytes(H100, memory) == expected


def test_usable_default_keeps_the_reserve():
    assert usable_bytes(H100) == H100.memory_bytes - H100.reserve_bytes
    assert 70 * 2**30 < usable_bytes(H100, None) < 80 * 2**30


@pytest.mark.parametrize("memory", ["", "GiB", "70 potatoes", "-5GiB", "0", "0GiB", 0, -1, 1.5, True, "1e9", "70G iB"])
def test_bad_memory(memory):
    with pytest.raises(PlanError, match="memory") as error:
        usable_bytes(H100, memory)
    assert repr(memory) in str(error.value)
    assert "\n" not in str(error.value)
