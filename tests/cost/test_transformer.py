"""Sizes of transformers: parameters of published models, products against the textbook counts, stages."""

import pytest

from autopar.cost.transformer import (
    Shard,
    Transformer,
    attention_products,
    dispatch_products,
    flop,
    layers_of_stage,
    linear_products,
)

GPT3 = Transformer(96, 12288, 96, 96, 49152, gated=False, vocab=51200, seq=2048, positions=2048)
LLAMA = Transformer(32, 4096, 32, 8, 14336, gated=True, vocab=128256, seq=8192, tied=False)
MIXTURE = Transformer(8, 1024, 32, 32, 8192, False, 51200, 1024, experts=8, top_k=2, moe_every=2, dispatch_group=1024)


def test_parameters_of_published_models():
    assert GPT3.parameters == pytest.approx(174.6e9, rel=2e-3)  # Narayanan et al. 2021
    assert LLAMA.parameters == pytest.approx(8.03e9, rel=1e-3)  # the model card of Llama 3 8B
    assert MIXTURE.parameters == pytest.approx(0.690e9, rel=5e-3)  # Zheng et al. 2022, artifact


def test_products_count_the_textbook_flop():
    shard = Shard(sequences=4)
    tokens, h = 4 * 2048, 12288
    assert flop(linear_products(GPT3, shard, False)) == 24 * tokens * h**2
    assert flop(attention_products(GPT3, shard)) == 4 * tokens * 2048 * h


@pytest.mark.parametrize("degrees", [{"tp": 8}, {"cp": 4}, {"tp": 2, "cp": 2}])
def test_ranks_share_the_flop(degrees):
    whole, part = Shard(4), Shard(4, **degrees)
    ranks = part.tp * part.cp
    for products in (lambda s: linear_products(LLAMA, s, False), lambda s: attention_products(LLAMA, s)):
        assert flop(products(part)) * ranks == pytest.approx(flop(products(whole)))


def test_a_mixture_multiplies_top_k_times_and_experts_are_shared():
    whole = flop(linear_products(MIXTURE, Shard(8), True)) - flop(linear_products(MIXTURE, Shard(8), False))
    network = 4 * 8 * 1024 * 1024 * 8192
    assert whole == network  # top 2: once more
    [*_, (local, rows, _, _)] = linear_products(MIXTURE, Shard(8, ep=4), True)
    assert (local, rows) == (2, 8 * 1024 * 2 * 4 / 8)
    assert flop(dispatch_products(MIXTURE, Shard(8))) == 2 * 2 * 8 * 1024 * 2 * 1024 * 1024


def test_mixtures_lie_in_every_other_layer():
    assert [MIXTURE.has_experts(i) for i in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("layers", "stages", "short", "last", "expected"),
    [
        (8, 4, False, None, [2, 2, 2, 2]),
        (10, 4, False, None, [3, 3, 2, 2]),
        (22, 8, True, None, [2, 3, 3, 3, 3, 3, 3, 2]),
        (78, 12, False, 1, [7] * 11 + [1]),
    ],
)
def test_layers_of_stages(layers, stages, short, last, expected):
    assert layers_of_stage(layers, stages, short, last) == expected


def test_a_size_that_is_not_positive_is_named():
    with pytest.raises(ValueError, match="heads is 0; it must be positive"):
        Transformer(1, 8, 0, 1, 8, False, 8, 8)
