"""A model's sizes and its captured graph have the same parameters and work; their prices: `test_one_price`."""

import pytest

from autopar.capture import capture
from autopar.cost.transformer import Shard, Transformer, causal_flop, flop, linear_products
from autopar.models.gpt import GPT, GPTConfig
from autopar.models.llama import Llama, LlamaConfig
from autopar.passes.normalize import Normalize
from autopar.rules.analyse import analyse

WIDTH, SEQ, BATCH = 4096, 2048, 4


def gpt():
    config = GPTConfig(vocab=51200, context=SEQ, layers=2, heads=32, width=WIDTH, ff_width=4 * WIDTH, fused_qkv=True)
    sizes = Transformer(2, WIDTH, 32, 32, 4 * WIDTH, gated=False, vocab=51200, seq=SEQ, positions=SEQ)
    return GPT(config, batch=BATCH, seq=SEQ, device="meta"), sizes


def llama():
    config = LlamaConfig(vocab=128256, context=SEQ, layers=2, heads=32, kv_heads=8, width=WIDTH, ff_width=14336)
    sizes = Transformer(2, WIDTH, 32, 8, 14336, gated=True, vocab=128256, seq=SEQ, tied=config.tied)
    return Llama(config, batch=BATCH, seq=SEQ, device="meta"), sizes


@pytest.fixture(scope="module", params=[gpt, llama], ids=lambda make: make.__name__)
def both(request):
    module, sizes = request.param()
    args, kwargs = module.example_inputs()
    ops = analyse(Normalize().run(capture(module, args, kwargs))).ops.values()
    # beside these a Llama multiplies positions by frequencies, once
    return module, [op for op in ops if op.rule.flop and ("linear" in op.name or "attention" in op.name)], sizes


def head_flop(sizes):
    return 2 * BATCH * SEQ * sizes.hidden * sizes.vocab


def test_parameters(both):
    module, _, sizes = both
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(sizes.parameters, rel=1e-4)


def test_flop_are_the_same_exactly(both):
    _, ops, sizes = both
    shard = Shard(BATCH)
    products = sizes.layers * flop(linear_products(sizes, shard, False)) + head_flop(sizes)
    attention = [op for op in ops if "attention" in op.name]
    assert sum(op.rule.flop for op in attention) == sizes.layers * causal_flop(sizes, shard)
    assert sum(op.rule.flop for op in ops if op not in attention) == products
