"""The roofline: hand-computed times, properties, and published matmuls."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.compute import element_bytes, matmul_s, memory_bound_s
from autopar.cost.hardware import load_profile

A100 = load_profile("a100-sxm-80gb")
SIMPLE = dataclasses.replace(
    A100,
    peak_flop_per_s=dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16"), 100e12),
    matmul_plateau=0.5,
    matmul_half_output=1e6,
    multiprocessors=0,
    matmul_half_depth=100.0,
    narrow_half_dim=64.0,
    memory_bandwidth_bytes_per_s=1e12,
    memory_efficiency=0.8,
    kernel_launch_s=1e-6,
    misaligned_fraction=0.5,
    alignment_bytes=16,
)


def square(n, profile=SIMPLE, dtype="bf16"):
    return matmul_s(2 * n**3, n, n, n, dtype, profile)


def test_matmul_by_hand():
    # 2e9 flop at 50 Tflop/s is 40 us; half of the output size doubles it; sums of 1000 cost 1.1.
    assert square(1000) == pytest.approx(1e-6 + 40e-6 * 2 * 1.1, rel=1e-12)


def test_batch_fills_the_device():
    batched = matmul_s(10 * 2e9, 1000, 1000, 1000, "bf16", SIMPLE)
    assert batched == pytest.approx(1e-6 + 400e-6 * 1.1 * 1.1, rel=1e-12)


def test_thin_matmul_is_bound_by_memory():
    # A vector times 8192 x 8192 in bf16: 134 MB at 800 GB/s.
    wide = dataclasses.replace(SIMPLE, matmul_half_output=0.0, matmul_half_depth=0.0)
    expected = 1e-6 + 2 * (8192 * 8192 + 2 * 8192) / 800e9
    assert matmul_s(2 * 8192**2, 1, 8192, 8192, "bf16", wide) == pytest.approx(expected, rel=1e-12)


def test_misaligned_rows_are_slow():
    aligned = matmul_s(2 * 4096 * 10944 * 4096, 4096, 10944, 4096, "bf16", A100)
    odd = matmul_s(2 * 4096 * 10922 * 4096, 4096, 10922, 4096, "bf16", A100)
    assert 1.4 < odd / aligned < 1.5
    # 1001 float64 are no whole number of 16 bytes, 1002 are.
    assert matmul_s(2e9, 1000, 1001, 1000, "fp64", SIMPLE) > 1.9 * matmul_s(2e9, 1000, 1002, 1000, "fp64", SIMPLE)


def test_memory_bound_by_hand():
    assert memory_bound_s(8e9, SIMPLE) == pytest.approx(1e-6 + 0.01)
    assert memory_bound_s(0, SIMPLE) == 0.0


def test_dtypes():
    assert square(4096, A100, "fp32") > 8 * square(4096, A100, torch.bfloat16)
    assert [element_bytes(d) for d in (torch.float64, "fp32", "tf32", torch.bfloat16, "fp16")] == [8, 4, 4, 2, 2]


def test_arrays_broadcast():
    m = np.array([[64], [1024]])
    n = np.array([128, 256, 512])
    times = matmul_s(2 * m * n * 4096, m, n, 4096, "bf16", A100)
    assert times.shape == (2, 3)
    assert times[1, 2] == matmul_s(2 * 1024 * 512 * 4096, 1024, 512, 4096, "bf16", A100)
    assert isinstance(square(64), float)
    np.testing.assert_array_equal(memory_bound_s(np.array([0.0, 8e9]), SIMPLE), [0.0, memory_bound_s(8e9, SIMPLE)])
    assert matmul_s(np.array([0.0]), 0, 0, 0, "bf16", A100).tolist() == [0.0]


dims = st.integers(1, 2**17)


@settings(max_examples=200, deadline=None)
@given(dims, dims, dims, st.integers(1, 64), st.integers(1, 8), st.sampled_from(["bf16", "fp32", "fp64"]))
def test_roofline_bounds_and_growth(m, n, k, batch, more, dtype):
    m, n, k = 8 * m, 8 * n, 8 * k  # aligned; odd sizes have their own test
    flop = 2.0 * batch * m * n * k
    time_s = matmul_s(flop, m, n, k, dtype, A100)
    assert time_s >= flop / A100.peak(dtype)
    assert time_s >= element_bytes(dtype) * batch * (m * k + k * n + m * n) / A100.memory_bandwidth_bytes_per_s
    for grown in ((more * m, n, k), (m, more * n, k), (m, n, more * k)):
        assert matmul_s(flop * more, *grown, dtype, A100) >= time_s * (1 - 1e-12)
    # Splitting the work over devices never makes a device faster than its share.
    assert time_s * more >= matmul_s(flop * more, m, n * more, k, dtype, A100) * (1 - 1e-12)


# Published A100 fp16 matmuls of a training step (hidden 4096, 4 x 2048 tokens), and square ones.
@pytest.mark.parametrize(
    ("m", "n", "k", "measured_flop_per_s", "bound"),
    [
        (8192, 12288, 4096, 241.6e12, 0.05),
        (8192, 4096, 4096, 234.9e12, 0.05),
        (8192, 16384, 4096, 241.1e12, 0.05),
        (8192, 4096, 16384, 252.8e12, 0.05),
        (8192, 51200, 4096, 255.4e12, 0.05),
        (512, 512, 512, 28e12, 0.25),
        (1024, 1024, 1024, 88e12, 0.1),
        (2048, 2048, 2048, 195e12, 0.12),
        (4096, 4096, 4096, 260e12, 0.12),
        (8192, 8192, 8192, 291e12, 0.15),
    ],
)
def test_published_matmuls(m, n, k, measured_flop_per_s, bound):
    predicted = 2 * m * n * k / matmul_s(2 * m * n * k, m, n, k, "fp16", A100)
    assert abs(predicted / measured_flop_per_s - 1) <= bound
