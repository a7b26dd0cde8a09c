"""A Llama 2 / Llama 3 language model in plain PyTorch.

RMS norm before each half of a layer, rotary positions, grouped-query causal attention, a SwiGLU feed-forward network.
Parameter names are those of transformers' `LlamaForCausalLM` without its `model.` prefix.
Enters: token ids [B, S], and labels for a loss. Leaves: the mean cross entropy, or logits [B, S, V].
Refused: a width that the heads do not divide, heads that the key/value heads do not divide, an odd width of a head.

Shape suffixes: B batch, S sequence, E embedding width, H query heads, K key/value heads, G queries a key/value head
(H = K G), D width of a head, R = D / 2, F feed-forward width, V vocabulary.
Source: Touvron et al. 2023 (Llama 2); Grattafiori et al. 2024 (Llama 3; 3.1's stretched rotary table for contexts
beyond 8192 is left out: it changes a constant table, no shape and no cost).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Embedding, Linear, example_tokens, token_loss


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama.

    vocab: tokens. context: the default sequence length. layers, heads, kv_heads: counts. width, ff_width: features.
    rotary_base: the base of the rotary frequencies. tied: the head is the token embedding's weight.
    """

    vocab: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    ff_width: int
    rotary_base: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"LlamaConfig: {self.heads} heads do not divide width {self.width} into even parts; change one of them"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: {self.kv_heads} key/value heads do not divide {self.heads} heads; change one of them"
            )

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads


def rotary_table(seq: int, head_width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [seq, head_width / 2], with the device and dtype of `like`.

    angle[s, i] = s base**(-2 i / head_width)
    The angles are float32 whatever the model's dtype, as in the released models: bf16 cannot hold positions above 256.
    """
    even_R = torch.arange(0, head_width, 2, device=like.device).float()
    frequency_R = 1.0 / base ** (even_R / head_width)
    angle_SR = torch.outer(torch.arange(seq, device=like.device).float(), frequency_R)
    return angle_SR.cos().to(like.dtype), angle_SR.sin().to(like.dtype)


def rotate(x_BHSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of a head's features by its position's angle; shape unchanged."""
    a, b = x_BHSD.chunk(2, dim=-1)
    return torch.cat((a * cos_SR - b * sin_SR, b * cos_SR + a * sin_SR), dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which G query heads share a key/value head, [B, S, E] to [B, S, E]."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_width
        kv_width = config.kv_heads * config.head_width
        self.q_proj = Linear(config.width, config.width, bias=False, device=device, dtype=dtype)
        self.k_proj = Linear(config.width, kv_width, bias=False, device=device, dtype=dtype)
        self.v_proj = Linear(config.width, kv_width, bias=False, device=device, dtype=dtype)
        self.o_proj = Linear(config.width, config.width, bias=False, device=device, dtype=dtype)

    def forward(self, x_BSE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        B, S, E = x_BSE.shape
        H, K, D = self.heads, self.kv_heads, self.head_width
        q_BHSD = rotate(self.q_proj(x_BSE).view(B, S, H, D).transpose(1, 2), cos_SR, sin_SR)
        k_BKSD = rotate(self.k_proj(x_BSE).view(B, S, K, D).transpose(1, 2), cos_SR, sin_SR)
        v_BKSD = self.v_proj(x_BSE).view(B, S, K, D).transpose(1, 2)
        k_BHSD, v_BHSD = self._repeat(k_BKSD), self._repeat(v_BKSD)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)
        return self.o_proj(out_BHSD.transpose(1, 2).reshape(B, S, E))

    def _repeat(self, x_BKSD: Tensor) -> Tensor:
        """[B, K, S, D] to [B, H, S, D], each key/value head G times in a row."""
        if self.heads == self.kv_heads:
            return x_BKSD
        B, K, S, D = x_BKSD.shape
        G = self.heads // K
        return x_BKSD[:, :, None].expand(B, K, G, S, D).reshape(B, K * G, S, D)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [B, S, E] to [B, S, E]."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.ff_width, bias=False, device=device, dtype=dtype)
        self.up_proj = Linear(config.width, config.ff_width, bias=False, device=device, dtype=dtype)
        self.down_proj = Linear(config.ff_width, config.width, bias=False, device=device, dtype=dtype)

    def forward(self, x_BSE: Tensor) -> Tensor:
        h_BSF = F.silu(self.gate_proj(x_BSE)) * self.up_proj(x_BSE)
        return self.down_proj(h_BSF)


class Layer(nn.Module):
    """One transformer layer, [B, S, E] to [B, S, E]."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, device, dtype)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.mlp = FeedForward(config, device, dtype)

    def forward(self, x_BSE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), cos_SR, sin_SR)
        return x_BSE + self.mlp(self.post_attention_layernorm(x_BSE))


class Llama(nn.Module):
    """The language model.

    Args:    batch, seq: what `example_inputs` makes; forward takes any batch and any seq.
             device, dtype: where and as what the parameters are created.
    """

    def __init__(
        self,
        config: LlamaConfig,
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
        self.embed_tokens = Embedding(config.vocab, config.width, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, device, dtype) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        # A tied head is made on meta first: its own weight would only be thrown away.
        head_device = torch.device("meta") if config.tied else device
        self.lm_head = Linear(config.width, config.vocab, bias=False, device=head_device, dtype=dtype)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Ids int64 [B, S] to logits [B, S, V]; with labels [B, S] (the next tokens) to their mean cross entropy."""
        x_BSE = self.embed_tokens(ids)
        cos_SR, sin_SR = rotary_table(ids.shape[1], self.config.head_width, self.config.rotary_base, x_BSE)
        for layer in self.layers:
            x_BSE = layer(x_BSE, cos_SR, sin_SR)
        logits_BSV = self.lm_head(self.norm(x_BSE))
        return logits_BSV if labels is None else token_loss(logits_BSV, labels)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """`((ids, labels), {})` for the configured batch and seq, on the parameters' device."""
        device = self.embed_tokens.weight.device
        return example_tokens(self.batch, self.seq, self.config.vocab, device), {}
