"""A T5 encoder-decoder in plain PyTorch.

RMS norm before each part of a layer, no biases, attention scores that are not scaled but shifted by a learned bias of
the distance (one table for all encoder layers, one for all decoder layers), cross attention to the encoder's result.
Enters: source ids [B, S], and target labels [B, T] for a loss or decoder ids [B, T]. Leaves: the mean cross entropy, or
logits [B, T, V]. Refused: neither labels nor decoder ids.

Shape suffixes: B batch, S source sequence, T target sequence, Q and K query and key sequence, E embedding width,
H heads, D width of a head, F feed-forward width, V vocabulary.
Source: Raffel et al. 2020, sections 2.1 and 3.1.1 (relative positions in buckets); `gated` and `tied=False`: version
1.1 of the released models, with Shazeer 2020's GEGLU.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Embedding, Linear, example_tokens, token_loss


@dataclass(frozen=True, slots=True)
class T5Config:
    """Sizes of a T5.

    vocab: rows of the embedding. context: default source and target length. layers: of the encoder and of the decoder.
    head_width: need not be width / heads. buckets: rows of the bias table. far: the distance from which all share one.
    """

    vocab: int
    context: int
    layers: int
    heads: int
    head_width: int
    width: int
    ff_width: int
    gated: bool = False
    tied: bool = True
    buckets: int = 32
    far: int = 128


class RelativeBias(nn.Module):
    """A bias [1, H, Q, K] for the scores of every query and key, looked up by their distance."""

    def __init__(self, config: T5Config, causal: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.causal, self.buckets, self.far = causal, config.buckets, config.far
        self.table = Embedding(config.buckets, config.heads, device=device, dtype=dtype)

    def forward(self, length: int) -> Tensor:
        position = torch.arange(length, device=self.table.weight.device)
        bias_QKH = self.table(self._bucket(position[None, :] - position[:, None]))
        bias_1HQK = bias_QKH.permute(2, 0, 1).unsqueeze(0)
        if not self.causal:
            return bias_1HQK
        later_QK = position[None, :] > position[:, None]
        return bias_1HQK.masked_fill(later_QK, float("-inf"))

    def _bucket(self, distance_QK: Tensor) -> Tensor:
        """Half of the buckets hold one distance each, the others grow by a constant factor up to `far`.

        Keys before and after the query share them in an encoder; a decoder looks back only.
        """
        buckets = self.buckets if self.causal else self.buckets // 2
        start_QK = torch.zeros_like(distance_QK) if self.causal else (distance_QK > 0) * buckets
        steps_QK = (-distance_QK).clamp(min=0) if self.causal else distance_QK.abs()
        exact = buckets // 2
        # clamp: the logarithm of 0 would be drawn into the integer conversion, though `where` ignores it.
        grown_QK = (steps_QK.clamp(min=1).float() / exact).log() / math.log(self.far / exact) * (buckets - exact)
        large_QK = (exact + grown_QK.long()).clamp(max=buckets - 1)
        return start_QK + torch.where(steps_QK < exact, steps_QK, large_QK)


class Attention(nn.Module):
    """Attention of [B, Q, E] to [B, K, E], to [B, Q, E]; bias [1, H, Q, K] or none is added to the scores."""

    def __init__(self, config: T5Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, inner = config.heads, config.heads * config.head_width
        self.q_proj = Linear(config.width, inner, bias=False, device=device, dtype=dtype)
        self.k_proj = Linear(config.width, inner, bias=False, device=device, dtype=dtype)
        self.v_proj = Linear(config.width, inner, bias=False, device=device, dtype=dtype)
        self.o_proj = Linear(inner, config.width, bias=False, device=device, dtype=dtype)

    def forward(self, x_BQE: Tensor, memory_BKE: Tensor, bias_1HQK: Tensor | None) -> Tensor:
        q_BHQD, k_BHKD, v_BHKD = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q_proj(x_BQE), self.k_proj(memory_BKE), self.v_proj(memory_BKE))
        )
        # Not scaled: the initial weights of the queries are small instead.
        out_BHQD = F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=bias_1HQK, scale=1.0)
        return self.o_proj(out_BHQD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linears around a ReLU, or down(gelu(gate(x)) * up(x)); [B, Q, E] to [B, Q, E]."""

    def __init__(self, config: T5Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = (
            Linear(config.width, config.ff_width, bias=False, device=device, dtype=dtype) if config.gated else None
        )
        self.up_proj = Linear(config.width, config.ff_width, bias=False, device=device, dtype=dtype)
        self.down_proj = Linear(config.ff_width, config.width, bias=False, device=device, dtype=dtype)

    def forward(self, x_BQE: Tensor) -> Tensor:
        h_BQF = self.up_proj(x_BQE)
        if self.gate_proj is None:
            return self.down_proj(F.relu(h_BQF))
        return self.down_proj(F.gelu(self.gate_proj(x_BQE), approximate="tanh") * h_BQF)


class Layer(nn.Module):
    """One layer of the encoder, or with `cross` of the decoder, [B, Q, E] to [B, Q, E]."""

    def __init__(self, config: T5Config, cross: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=1e-6, device=device, dtype=dtype)
        self.attention = Attention(config, device, dtype)
        if cross:
            self.cross_norm = nn.RMSNorm(config.width, eps=1e-6, device=device, dtype=dtype)
            self.cross_attention = Attention(config, device, dtype)
        self.norm2 = nn.RMSNorm(config.width, eps=1e-6, device=device, dtype=dtype)
        self.mlp = FeedForward(config, device, dtype)

    def forward(self, x_BQE: Tensor, bias_1HQQ: Tensor, memory_BSE: Tensor | None = None) -> Tensor:
        h_BQE = self.norm1(x_BQE)
        x_BQE = x_BQE + self.attention(h_BQE, h_BQE, bias_1HQQ)
        if memory_BSE is not None:
            x_BQE = x_BQE + self.cross_attention(self.cross_norm(x_BQE), memory_BSE, None)
        return x_BQE + self.mlp(self.norm2(x_BQE))


class Stack(nn.Module):
    """The encoder, or the decoder, [B, Q, E] to [B, Q, E]."""

    def __init__(self, config: T5Config, decoder: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = RelativeBias(config, decoder, device, dtype)
        self.layers = nn.ModuleList(Layer(config, decoder, device, dtype) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6, device=device, dtype=dtype)

    def forward(self, x_BQE: Tensor, memory_BSE: Tensor | None = None) -> Tensor:
        bias_1HQQ = self.bias(x_BQE.shape[1])
        for layer in self.layers:
            x_BQE = layer(x_BQE, bias_1HQQ, memory_BSE)
        return self.norm(x_BQE)


class T5(nn.Module):
    """The encoder-decoder.

    Args:    batch, seq: what `example_inputs` makes (seq for both sides); forward takes any batch and any lengths.
             device, dtype: where and as what the parameters are created.
    """

    def __init__(
        self,
        config: T5Config,
        *,
        batch: int = 1,
        seq: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.batch = config, batch
        self.seq = config.context if seq is None else seq
        self.embedding = Embedding(config.vocab, config.width, device=device, dtype=dtype)
        self.encoder = Stack(config, False, device, dtype)
        self.decoder = Stack(config, True, device, dtype)
        # A tied head is made on meta first: its own weight would only be thrown away.
        head_device = torch.device("meta") if config.tied else device
        self.lm_head = Linear(config.width, config.vocab, bias=False, device=head_device, dtype=dtype)
        if config.tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None, decoder_ids: Tensor | None = None) -> Tensor:
        """Source ids int64 [B, S] to the mean cross entropy of labels [B, T], or with decoder_ids to logits [B, T, V].

        With labels the decoder reads them one step late, after token 0, which also starts every generation.
        """
        if decoder_ids is None:
            if labels is None:
                raise ValueError("T5: pass labels for a loss, or decoder_ids for logits")
            # A label of -100 does not count and is no token; the decoder reads 0 (padding) there.
            decoder_ids = F.pad(labels[:, :-1], (1, 0)).clamp(min=0)
        memory_BSE = self.encoder(self.embedding(ids))
        x_BTE = self.decoder(self.embedding(decoder_ids), memory_BSE)
        if (
            self.config.tied
        ):  # section 2.1's code: embeddings are large where they are read, small where they are a head
            x_BTE = x_BTE * self.config.width**-0.5
        logits_BTV = self.lm_head(x_BTE)
        return logits_BTV if labels is None else token_loss(logits_BTV, labels)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """`((ids, labels), {})` for the configured batch and seq, on the parameters' device."""
        return example_tokens(self.batch, self.seq, self.config.vocab, self.embedding.weight.device), {}
