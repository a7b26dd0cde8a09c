"""Seconds of layers against published ones, and what must make them longer or shorter."""

from dataclasses import replace

import pytest

from autopar.cost.fitted import FITTED
from autopar.cost.hardware import load_profile
from autopar.cost.layer_time import Pass, embedding, head, layer, pointwise_bytes
from autopar.cost.transformer import Shard, Transformer

A100, H100 = load_profile("a100-sxm-80gb"), load_profile("h100-sxm")
GPT = Transformer(30, 4096, 32, 32, 16384, gated=False, vocab=51200, seq=1024)


# Qi et al. 2024, table 9: milliseconds of forward, input gradient and weight gradient of some layers on A100.
@pytest.mark.parametrize(
    ("hidden", "heads", "sequences", "layers", "measured_ms"),
    [
        (2304, 24, 6, 3, (18.522, 18.086, 9.337)),
        (4096, 32, 3, 4, (29.718, 29.444, 19.927)),
        (5120, 40, 1, 3, (11.347, 11.248, 8.132)),
        (6144, 48, 1, 2, (10.419, 10.207, 7.715)),
    ],
)
def test_published_layers(hidden, heads, sequences, layers, measured_ms):
    model = Transformer(layers, hidden, heads, heads, 4 * hidden, False, 51200, 1024)
    one = layer(model, Shard(sequences, attention="plain", fused=True, dropout=True), A100)
    predicted = [1e3 * layers * s for s in (one.forward_s, one.input_s, one.weight_s)]
    assert sum(predicted) == pytest.approx(sum(measured_ms), rel=0.09)
    assert predicted == pytest.approx(measured_ms, rel=0.2)


def test_unfused_ops_cost_more_than_fused_and_only_outside_products():
    eager, fused = (layer(GPT, Shard(4, fused=f), A100) for f in (False, True))
    assert eager.forward_s > fused.forward_s
    assert eager.weight_s == fused.weight_s


def test_heads_that_are_no_whole_vector_loads_are_slow():
    odd = replace(GPT, hidden=13824, heads=128, kv_heads=128)  # heads of 108, as in BigScience's sweep
    even = replace(odd, heads=96, kv_heads=96)
    shard = Shard(4, tp=8, attention="plain", fused=True)
    assert layer(odd, shard, A100).forward_s > 1.2 * layer(even, shard, A100).forward_s


def test_attention_kernels():
    long = replace(GPT, seq=32768)
    plain, flash, native = (layer(long, Shard(1, attention=a), H100).forward_s for a in ("plain", "flash", "native"))
    assert plain > flash > native
    shorter = layer(replace(GPT, seq=16384), Shard(1), H100).attention_s
    assert layer(long, Shard(1), H100).attention_s == pytest.approx(4 * shorter, rel=1e-3)


def test_the_host_is_the_floor():
    tiny = replace(GPT, hidden=64, heads=1, kv_heads=1, ffn=256, seq=16)
    assert layer(tiny, Shard(1), H100).forward_s == pytest.approx(20 * FITTED.host_kernel_s)


def test_sequence_parallelism_divides_norms_and_residuals():
    cut, whole = (pointwise_bytes(GPT, Shard(4, tp=8, sp=sp)) for sp in (True, False))
    assert cut[0] < whole[0] / 3
    assert pointwise_bytes(GPT, Shard(4, tp=8, sp=True))[0] == pytest.approx(pointwise_bytes(GPT, Shard(4))[0] / 8)


def test_ends_and_sums():
    shard = Shard(4)
    ends = head(GPT, shard, A100) + embedding(GPT, shard, A100)
    assert ends.forward_s > head(GPT, shard, A100).forward_s > 2 * 4 * 1024 * 4096 * 51200 / 312e12
    assert Pass(1, 2, 3, 4) * 2 == Pass(2, 4, 6, 8)
