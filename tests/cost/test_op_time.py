"""Ops by hand, on a device of round figures."""

from dataclasses import replace

import pytest

from autopar.cost.fitted import FITTED, NATIVE, ON_CPU, software_of
from autopar.cost.hardware import load_profile
from autopar.cost.memory import ParameterBytes
from autopar.cost.op_time import attention_s, embedding_bytes, felt_s, loss_bytes, norm_s, product_s, update_s

H100 = load_profile("h100-sxm")
RATE = H100.memory_bandwidth_bytes_per_s * H100.memory_efficiency


def test_gradients_are_the_transposed_products():
    forward, left, right = product_s(2.0 * 4096 * 512 * 128, 4096, 512, 128, "bf16", H100)
    assert left == product_s(2.0 * 4096 * 512 * 128, 4096, 128, 512, "bf16", H100)[0]
    assert right == product_s(2.0 * 4096 * 512 * 128, 128, 512, 4096, "bf16", H100)[0]
    assert forward != right


def test_attention_at_its_fraction_of_large_matmuls():
    forward, backward = attention_s(1e12, 128, "bf16", H100)
    assert forward == pytest.approx(1e12 / (H100.peak("bf16") * H100.matmul_plateau * H100.attention_fraction))
    assert backward == pytest.approx(2.5 / FITTED.flash_backward * forward)
    assert attention_s(1e12, 64, "bf16", H100)[0] > forward
    assert attention_s(1e12, 128, "bf16", H100, native=True)[0] < forward
    assert attention_s(1e12, 100, "bf16", H100)[0] > 10 * forward  # rows of 200 bytes


def test_bytes():
    assert loss_bytes(100, 2) == (
        pytest.approx(FITTED.logit_traffic * 1800),
        pytest.approx(FITTED.logit_traffic * 1400),
    )
    assert embedding_bytes(10, 1000) == (30, 2030)


def test_an_update_moves_what_it_reads_and_writes():
    held = ParameterBytes(weights=4, compute_copy=2, gradients=4, optimizer=8)
    assert update_s(1e9, held, H100) == pytest.approx(30e9 / RATE, rel=1e-3)
    assert norm_s(1e9, held, H100) == pytest.approx(12e9 / RATE, rel=1e-3)


def test_what_is_felt_beside_compute():
    assert felt_s(2.0, 1.0) == pytest.approx(FITTED.overlap_slowdown)
    assert felt_s(1.0, 3.0) == pytest.approx(2 + FITTED.overlap_slowdown)


def test_software():
    assert software_of(H100) is NATIVE
    assert software_of(load_profile("cpu")) == ON_CPU
    assert NATIVE.traffic < 2 < replace(NATIVE, fused=False).traffic
    busy = software_of(replace(load_profile("cpu"), pointwise_traffic=3.0, update_traffic=2.0, loss_traffic=1.5))
    assert (busy.traffic, busy.fitted.update_traffic, busy.fitted.logit_traffic) == (3.0, 2.0, 1.5)
