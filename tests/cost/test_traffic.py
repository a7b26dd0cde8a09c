"""Bytes moved by kernels of a GPT's layer: those that `layer_time.pointwise_bytes` counts."""

import pytest

import autopar
from autopar.cost.layer_time import pointwise_bytes
from autopar.cost.op_time import COPIED_HEADS
from autopar.cost.traffic import is_fusible, op_name, traffic
from autopar.cost.transformer import Shard, Transformer
from autopar.pipeline import prepare
from autopar.program import record


def analysed(name):
    model = autopar.models.build(name, batch=2, seq=64, device="meta")
    args, kwargs = model.example_inputs()
    return prepare(model, args, kwargs, name=name, outputs="auto").analysis


@pytest.fixture(scope="module", params=["gpt-tiny", "llama-tiny"])
def analysis(request):
    return analysed(request.param)


def moved(analysis, fused):
    """Elements moved by the ops between products of a layer in the middle, forward and backward, weights aside."""
    totals = [0.0, 0.0]
    for name, moves in traffic(analysis, fused).items():
        op = analysis.ops[name]
        if record(op.node).op.startswith(("layers.1.", "layers.1/")) and is_fusible(op):
            for i, (ins, outs) in enumerate((moves.forward, moves.backward)):
                sizes = [(w, analysis.parts[v].numel) for w, v in zip((*ins, *outs), (*op.ins, *op.outs), strict=True)]
                totals[i] += sum(w * n for w, n in sizes if n >= 64 * 64)
    return totals


def test_as_many_as_sizes_say(analysis):
    heads = analysis.program.name == "llama-tiny"
    sizes = Transformer(4, 128, 8, 4 if heads else 8, 384 if heads else 512, gated=heads, vocab=512, seq=64)
    tokens = 2 * 64
    copies = COPIED_HEADS * tokens * 128
    expected = [x / 2 - copies for x in pointwise_bytes(sizes, Shard(2))]
    rotated = 2 * tokens * (128 + 64) if heads else 0  # queries and keys read and written; by sizes they are copies
    assert moved(analysis, True) == pytest.approx([x + rotated for x in expected])


def test_ops_by_themselves_move_more(analysis):
    for fused, apart in zip(moved(analysis, True), moved(analysis, False), strict=True):
        assert apart >= fused
    assert (moved(analysis, False)[0] > moved(analysis, True)[0]) == (analysis.program.name == "llama-tiny")


def test_a_kernel_reads_a_value_once():
    analysis = analysed("llama-tiny")
    found = traffic(analysis)
    first = [name for name, op in analysis.ops.items() if op_name(op) == "mul" and any(op.in_grads)][:4]
    assert [found[name].forward[0] for name in first] == [(1, 1), (1, 1), (0, 0), (0, 0)]
    assert [found[name].launches for name in first] == [True, False, False, False]
