"""Memory: Korthikanti's activation formulas and the ZeRO table exactly; what schedules hold; measured peaks."""

from dataclasses import replace

import pytest

from autopar.cost.hardware import load_profile
from autopar.cost.training_memory import activation_bytes, fits, in_flight, peak_memory, stage_memory, state_bytes
from autopar.cost.training_run import Run
from autopar.cost.transformer import Shard, Transformer

S, B, H, A = 2048, 4, 6144, 64
GPT = Transformer(48, H, A, A, 4 * H, gated=False, vocab=51200, seq=S)
A100 = load_profile("a100-sxm-80gb")


def megatron(t=1, sp=False):
    return Shard(B, tp=t, sp=sp, attention="plain", dropout=True)


@pytest.mark.parametrize(
    ("t", "sp", "recompute", "factor"),
    [
        (1, False, "none", 34 + 5 * A * S / H),
        (8, False, "none", 10 + 24 / 8 + 5 * A * S / (H * 8)),
        (8, True, "none", (34 + 5 * A * S / H) / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8),
        (1, False, "full", 2),
    ],
)
def test_korthikanti_table_2(t, sp, recompute, factor):
    assert activation_bytes(GPT, megatron(t, sp), recompute) == pytest.approx(S * B * H * factor, rel=1e-12)


def test_korthikanti_interleaving():
    # 1 + (p - 1) / (p v) times the p micro-batches of the first stage
    assert in_flight("interleaved-1f1b", 0, 8, 64, 3) == pytest.approx(8 * (1 + 7 / (8 * 3)))


# Rajbhandari et al. 2020, table 1: gigabytes of a 7.5B model on 64 ranks, 16 bytes a parameter.
@pytest.mark.parametrize(("zero", "measured_gb"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(zero, measured_gb):
    assert 7.5 * state_bytes(zero, 64).total == pytest.approx(measured_gb, abs=0.06)


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_megatron_distributed_optimizer(ranks):
    assert state_bytes(1, ranks, gradient_bytes=2, copied=4).total == pytest.approx(4 + 16 / ranks)
    assert state_bytes(1, ranks, gradient_bytes=4).total == pytest.approx(6 + 12 / ranks)
    assert state_bytes(1, ranks, precision="fp32").total == pytest.approx(8 + 8 / ranks)


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"),
    [("gpipe", 0, 32), ("1f1b", 0, 8), ("1f1b", 7, 1), ("zb-2p", 0, 15), ("zb-h1", 7, 8), ("zb-v", 3, 8)],
)
def test_in_flight(schedule, stage, expected):
    assert in_flight(schedule, stage, 8, 32) == expected
    assert in_flight(schedule, stage, 8, 1) == 1


def run(**changes):
    return replace(Run(GPT, A100, 1, 8, B, 16, tp=8, attention="plain", dropout=True, fused=True), **changes)


def test_the_first_stage_holds_most():
    pipeline = run(tp=1, pp=8, schedule="1f1b", stage_layers=(6,) * 8)
    peaks = [stage_memory(pipeline, i).allocated for i in range(8)]
    assert max(peaks[:-1]) == peaks[0] == peak_memory(pipeline).allocated
    assert stage_memory(pipeline, 7).working > stage_memory(pipeline, 6).working  # the logits


def test_recompute_and_zero_make_it_fit():
    data = run(tp=1, dp=8)
    assert not fits(data)
    assert not fits(replace(data, zero=3))
    assert fits(replace(data, zero=3, recompute="full"))
    assert peak_memory(replace(data, zero=3)).gathered > 0


def test_parts_add_up():
    peak = peak_memory(run())
    assert peak.allocated == peak.states + peak.gathered + peak.activations + peak.working
    assert peak.allocated < peak.needed < peak.total
