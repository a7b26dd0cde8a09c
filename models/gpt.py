"""A GPT-2 / GPT-3 language model in plain PyTorch.

Learned positions, layer norm before each half of a layer, causal attention, a tanh-GELU feed-forward network.
Enters: token ids [B, S], and labels for a loss. Leaves: the mean cross entropy, or logits [B, S, V].
Refused: sequences longer than the table of positions; a width that the heads do not divide.

Shape suffixes: B batch, S sequence, E embedding width, H heads, D width of a head, F feed-forward width, V vocabulary.
Source: Radford et al. 2019 (GPT-2); Brown et al. 2020 (GPT-3, here with dense attention in every layer).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Embedding, Linear, example_tokens, token_loss


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT.

    vocab: tokens. context: rows of the table of positions. layers, heads: counts. width, ff_width: features.
    fused_qkv: one linear makes queries, keys and values, as in GPT-2's own code. tied: the head is the token
    embedding's weight.
    """

    vocab: int
    context: int
    layers: int
    heads: int
    width: int
    ff_width: int
    fused_qkv: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"GPTConfig: {self.heads} heads do not divide width {self.width}; change one of them")


class Attention(nn.Module):
    """Causal self-attention, [B, S, E] to [B, S, E]."""

    def __init__(self, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.width
        self.heads, self.fused = config.heads, config.fused_qkv
        if self.fused:
            self.qkv_proj = Linear(width, 3 * width, device=device, dtype=dtype)
        else:
            self.q_proj = Linear(width, width, device=device, dtype=dtype)
            self.k_proj = Linear(width, width, device=device, dtype=dtype)
            self.v_proj = Linear(width, width, device=device, dtype=dtype)
        self.o_proj = Linear(width, width, device=device, dtype=dtype)

    def forward(self, x_BSE: Tensor) -> Tensor:
        if self.fused:
            q_BSE, k_BSE, v_BSE = self.qkv_proj(x_BSE).chunk(3, dim=-1)
        else:
            q_BSE, k_BSE, v_BSE = self.q_proj(x_BSE), self.k_proj(x_BSE), self.v_proj(x_BSE)
        B, S, E = x_BSE.shape
        q_BHSD, k_BHSD, v_BHSD = (
            t.view(B, S, self.heads, E // self.heads).transpose(1, 2) for t in (q_BSE, k_BSE, v_BSE)
        )
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)
        return self.o_proj(out_BHSD.transpose(1, 2).reshape(B, S, E))


class FeedForward(nn.Module):
    """Two linears around a GELU, [B, S, E] to [B, S, E]."""

    def __init__(self, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(config.width, config.ff_width, device=device, dtype=dtype)
        self.down_proj = Linear(config.ff_width, config.width, device=device, dtype=dtype)

    def forward(self, x_BSE: Tensor) -> Tensor:
        h_BSF = F.gelu(self.up_proj(x_BSE), approximate="tanh")
        return self.down_proj(h_BSF)


class Layer(nn.Module):
    """One transformer layer, [B, S, E] to [B, S, E]."""

    def __init__(self, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, device=device, dtype=dtype)
        self.attention = Attention(config, device, dtype)
        self.norm2 = nn.LayerNorm(config.width, device=device, dtype=dtype)
        self.mlp = FeedForward(config, device, dtype)

    def forward(self, x_BSE: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.norm1(x_BSE))
        return x_BSE + self.mlp(self.norm2(x_BSE))


class GPT(nn.Module):
    """The language model.

    Args:    batch, seq: what `example_inputs` makes; forward takes any batch, and any seq up to `config.context`.
             device, dtype: where and as what the parameters are created.
    Raises:  ValueError: seq is longer than the table of positions.
    """

    def __init__(
        self,
        config: GPTConfig,
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
        self._check_seq(self.seq)
        self.token_embedding = Embedding(config.vocab, config.width, device=device, dtype=dtype)
        self.position_embedding = Embedding(config.context, config.width, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, device, dtype) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, device=device, dtype=dtype)
        # A tied head is made on meta first: its own weight would only be thrown away.
        head_device = torch.device("meta") if config.tied else device
        self.lm_head = Linear(config.width, config.vocab, bias=False, device=head_device, dtype=dtype)
        if config.tied:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Ids int64 [B, S] to logits [B, S, V]; with labels [B, S] (the next tokens) to their mean cross entropy."""
        S = ids.shape[1]
        self._check_seq(S)
        positions_S = torch.arange(S, device=ids.device)
        x_BSE = self.token_embedding(ids) + self.position_embedding(positions_S)
        for layer in self.layers:
            x_BSE = layer(x_BSE)
        logits_BSV = self.lm_head(self.norm(x_BSE))
        return logits_BSV if labels is None else token_loss(logits_BSV, labels)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """`((ids, labels), {})` for the configured batch and seq, on the parameters' device."""
        device = self.token_embedding.weight.device
        return example_tokens(self.batch, self.seq, self.config.vocab, device), {}

    def _check_seq(self, seq: int) -> None:
        if seq > self.config.context:
            raise ValueError(
                f"GPT: seq {seq} exceeds the {self.config.context} positions of the model; raise `context`"
            )
