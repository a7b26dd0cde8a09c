"""A transformer by its sizes: parameters, matrix products, and what one rank holds of them.

Enters: a `Transformer` (sizes) and a `Shard` (degrees and micro-batch of one rank). Leaves: the products of a layer as
a table of (batch, rows, columns, depth), parameters, layers of each pipeline stage.
Refused, with a `ValueError` that names the field: sizes that are not positive. Degrees that divide nothing leave
fractions: a rank's mean share.

Source: Vaswani et al. 2017; Shoeybi et al. 2019 (tensor parallelism); Lepikhin et al. 2020 (dispatch by one-hot
products).
"""

from __future__ import annotations

from dataclasses import dataclass

Product = tuple[float, float, float, float]
"""(batch, rows, columns, depth) of a matrix product."""

ELEMENT_BYTES = 2
"""Width of an activation in mixed precision."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder.

    ffn: width of the feed-forward network (of one expert). gated: it has a third, gating matrix. vocab: rows of the
    embedding. experts, top_k: of a mixture; 1, 1 is a dense network. moe_every: every n-th layer has the mixture.
    dispatch_group: tokens among which one-hot matrices dispatch to experts; 0: tokens are routed by index.
    tied: the head is the embedding. positions: rows of a learned table of positions.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    seq: int
    experts: int = 1
    top_k: int = 1
    moe_every: int = 1
    dispatch_group: int = 0
    tied: bool = True
    positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "experts", "top_k", "moe_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")

    @property
    def head_size(self) -> float:
        return self.hidden / self.heads

    @property
    def attention_parameters(self) -> float:
        """Weights of one layer's attention, biases aside."""
        return 2 * self.hidden * (self.hidden + self.kv_heads * self.head_size)

    @property
    def expert_parameters(self) -> float:
        """Weights of one feed-forward network."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    def layer_parameters(self, moe: bool) -> float:
        """Weights of one layer with its norms and, where the network is not gated, its biases."""
        small = 2 * self.hidden if self.gated else 9 * self.hidden + self.ffn
        return self.attention_parameters + self.expert_parameters * (self.experts if moe else 1) + small

    @property
    def embedding_parameters(self) -> float:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """All weights."""
        body = sum(self.layer_parameters(self.has_experts(i)) for i in range(self.layers))
        return body + self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden

    def has_experts(self, layer: int) -> bool:
        return self.experts > 1 and (layer + 1) % self.moe_every == 0


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank computes of one micro-batch.

    sequences: of the micro-batch. tp, cp, ep: degrees. sp: sequence parallel, so that norms and residuals are cut too.
    dtype: of the products. flash: attention is one fused kernel. dropout: there is dropout after attention and network.
    """

    sequences: float
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    dtype: str = "bf16"
    attention: str = "flash"
    fused: bool = False
    dropout: bool = False

    def tokens(self, model: Transformer) -> float:
        return self.sequences * model.seq / self.cp


def linear_products(model: Transformer, shard: Shard, moe: bool) -> list[Product]:
    """Products of a layer with weights: queries, keys and values at once; output; network, a batch entry an expert."""
    tokens, h, t, d = shard.tokens(model), model.hidden, shard.tp, model.head_size
    kv = max(model.kv_heads / t, 1) * d
    up = model.ffn / t * (2 if model.gated else 1)
    products: list[Product] = [(1, tokens, h / t + 2 * kv, h), (1, tokens, h, h / t)]
    if not moe:
        return [*products, (1, tokens, up, h), (1, tokens, h, model.ffn / t)]
    local, rows = model.experts / shard.ep, tokens * model.top_k * shard.ep / model.experts
    return [*products, (local, rows, up, h), (local, rows, h, model.ffn / t)]


def dispatch_products(model: Transformer, shard: Shard) -> list[Product]:
    """One-hot products that send a group's tokens to slots and back; none where tokens are routed by index."""
    group = model.dispatch_group
    if not group:
        return []
    groups = shard.tokens(model) / group
    return [(groups, model.top_k * group, model.hidden, group), (groups, group, model.hidden, model.top_k * group)]


def attention_products(model: Transformer, shard: Shard) -> list[Product]:
    """Scores and weighted sum, of all heads of this rank, the causal half not saved."""
    batch = shard.sequences * model.heads / shard.tp
    queries, keys, d = model.seq / shard.cp, model.seq, model.head_size
    return [(batch, queries, keys, d), (batch, queries, d, keys)]


def causal_flop(model: Transformer, shard: Shard) -> float:
    """Floating-point operations of attention where each query sees the keys up to its own: (s + 1) / 2 of s."""
    return flop(attention_products(model, shard)) * (model.seq + 1) / (2 * model.seq)


def flop(products: list[Product]) -> float:
    """Floating-point operations of a list of products."""
    return sum(2 * b * m * n * k for b, m, n, k in products)


def layers_of_stage(layers: int, stages: int, short_ends: bool, last: int | None = None) -> list[int]:
    """Layers of each stage. short_ends: the embedding and the head count as a layer each. last: of the last stage."""
    if last is not None:
        rest = layers_of_stage(layers - last, stages - 1, False)
        return [*rest, last]
    total = layers + (2 if short_ends else 0)
    counts = [total // stages + (1 if i < total % stages else 0) for i in range(stages)]
    if short_ends:
        counts[0] -= 1
        counts[-1] -= 1
    return counts
