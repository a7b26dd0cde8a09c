"""A mixture-of-experts language model in plain PyTorch: a Llama in which a router sends each token to a few experts.

Enters: token ids [B, S], and labels for a loss. Leaves: the mean cross entropy plus the load-balancing loss, or logits
[B, S, V]. Refused: more experts a token than there are; what `LlamaConfig` refuses.

Two ways to compute the same experts. Dense: every expert computes every token, and weights of 0 drop what it was not
sent; exact, with `experts / top_k` times the work. By slots: each expert has room for a fixed number of tokens of a
sequence, its slots are filled in the order of the tokens, and what comes too late is dropped (its residual alone goes
on). Shapes never depend on the routing, and no token's place depends on another sequence.

Shape suffixes: B batch, S sequence, E embedding width, X experts, K experts a token, C slots of an expert,
F feed-forward width of an expert, V vocabulary.
Source: Jiang et al. 2024 (Mixtral: softmax over the chosen K); Lepikhin et al. 2021 (GShard: slots); Fedus et al. 2022,
section 2.2 (load balancing).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Embedding, Linear, Table, example_tokens, token_loss
from autopar.models.llama import Attention, FeedForward, LlamaConfig, rotary_table


@dataclass(frozen=True, slots=True)
class MoEConfig(LlamaConfig):
    """Sizes of a mixture of experts; ff_width is that of one expert.

    experts, top_k: how many there are, and how many a token is sent to. capacity: slots of an expert over its fair
    share of a sequence (S top_k / experts); None computes densely. every: one layer in so many has experts, the last of
    them; the others are plain. balance: weight of the load-balancing loss.
    """

    experts: int = 8
    top_k: int = 2
    capacity: float | None = None
    every: int = 1
    balance: float = 0.01

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"MoEConfig: top_k {self.top_k} must be between 1 and the {self.experts} experts")


class Experts(nn.Module):
    """SwiGLU feed-forward networks, one for each row: [X, N, E] to [X, N, E]."""

    def __init__(self, config: MoEConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        into, out = (config.experts, config.width, config.ff_width), (config.experts, config.ff_width, config.width)
        self.gate_proj = Table(*into, device=device, dtype=dtype)
        self.up_proj = Table(*into, device=device, dtype=dtype)
        self.down_proj = Table(*out, device=device, dtype=dtype)

    def forward(self, x_XNE: Tensor) -> Tensor:
        h_XNF = F.silu(x_XNE @ self.gate_proj()) * (x_XNE @ self.up_proj())
        return h_XNF @ self.down_proj()


class Mixture(nn.Module):
    """Router and experts, [B, S, E] to [B, S, E] and the load-balancing loss of this layer, a scalar."""

    def __init__(self, config: MoEConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(config.width, config.experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(config, device, dtype)

    def forward(self, x_BSE: Tensor) -> tuple[Tensor, Tensor]:
        logits_BSX = self.router(x_BSE)
        top_BSK, expert_BSK = logits_BSX.topk(self.config.top_k, dim=-1)
        weight_BSK = top_BSK.softmax(dim=-1)
        chosen_BSKX = F.one_hot(expert_BSK, self.config.experts)
        loss = self._balance(logits_BSX.softmax(dim=-1), chosen_BSKX)
        compute = self._dense if self.config.capacity is None else self._slots
        return compute(x_BSE, weight_BSK, chosen_BSKX), loss

    def _balance(self, probability_BSX: Tensor, chosen_BSKX: Tensor) -> Tensor:
        """X sum_x f_x P_x: f the share of choices, P the mean probability of expert x; 1 when all is even."""
        share_X = chosen_BSKX.to(probability_BSX.dtype).mean(dim=(0, 1, 2))
        return self.config.experts * (share_X * probability_BSX.mean(dim=(0, 1))).sum()

    def _dense(self, x_BSE: Tensor, weight_BSK: Tensor, chosen_BSKX: Tensor) -> Tensor:
        B, S, E = x_BSE.shape
        weight_BSX = (weight_BSK.unsqueeze(-1) * chosen_BSKX).sum(dim=2)
        x_XNE = x_BSE.reshape(1, B * S, E).expand(self.config.experts, -1, -1)
        y_XBSE = self.experts(x_XNE).view(-1, B, S, E)
        return (y_XBSE * weight_BSX.permute(2, 0, 1).unsqueeze(-1)).sum(dim=0)

    def _slots(self, x_BSE: Tensor, weight_BSK: Tensor, chosen_BSKX: Tensor) -> Tensor:
        B, S, K, X = chosen_BSKX.shape
        E = x_BSE.shape[-1]
        assert self.config.capacity is not None
        room = min(S, math.ceil(self.config.capacity * S * K / X))
        # First choices of all tokens are served before second ones.
        taken_BNX = chosen_BSKX.transpose(1, 2).reshape(B, K * S, X)
        place_BNX = (taken_BNX.cumsum(dim=1) - 1) * taken_BNX
        kept_BNX = taken_BNX * (place_BNX < room)
        slot_BNXC = F.one_hot(place_BNX.clamp(max=room - 1), room) * kept_BNX.unsqueeze(-1)
        slot_BSKXC = slot_BNXC.view(B, K, S, X, room).transpose(1, 2).to(x_BSE.dtype)
        send_BSXC = slot_BSKXC.sum(dim=2)
        combine_BSXC = (slot_BSKXC * weight_BSK[..., None, None]).sum(dim=2)
        x_XBCE = torch.einsum("bsxc,bse->xbce", send_BSXC, x_BSE)
        y_XBCE = self.experts(x_XBCE.flatten(1, 2)).view(X, B, room, E)
        return torch.einsum("bsxc,xbce->bse", combine_BSXC, y_XBCE)


class Layer(nn.Module):
    """One transformer layer, [B, S, E] to [B, S, E] and its load-balancing loss (0 without experts)."""

    def __init__(self, config: MoEConfig, routed: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, device, dtype)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        self.mlp = Mixture(config, device, dtype) if routed else FeedForward(config, device, dtype)

    def forward(self, x_BSE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor | float]:
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), cos_SR, sin_SR)
        h_BSE = self.post_attention_layernorm(x_BSE)
        out_BSE, balance = self.mlp(h_BSE) if isinstance(self.mlp, Mixture) else (self.mlp(h_BSE), 0.0)
        return x_BSE + out_BSE, balance


class MoE(nn.Module):
    """The language model.

    Args:    batch, seq: what `example_inputs` makes; forward takes any batch and any seq.
             device, dtype: where and as what the parameters are created.
    """

    def __init__(
        self,
        config: MoEConfig,
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
        self.layers = nn.ModuleList(
            Layer(config, (i + 1) % config.every == 0, device, dtype) for i in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps, device=device, dtype=dtype)
        # A tied head is made on meta first: its own weight would only be thrown away.
        head_device = torch.device("meta") if config.tied else device
        self.lm_head = Linear(config.width, config.vocab, bias=False, device=head_device, dtype=dtype)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Ids int64 [B, S] to logits [B, S, V]; with labels [B, S] (the next tokens) to the loss, a scalar.

        loss = mean cross entropy + balance x (mean load-balancing loss of the layers with experts)
        """
        x_BSE = self.embed_tokens(ids)
        cos_SR, sin_SR = rotary_table(ids.shape[1], self.config.head_width, self.config.rotary_base, x_BSE)
        balances = []
        for layer in self.layers:
            x_BSE, balance = layer(x_BSE, cos_SR, sin_SR)
            if isinstance(layer.mlp, Mixture):
                balances.append(balance)
        logits_BSV = self.lm_head(self.norm(x_BSE))
        if labels is None:
            return logits_BSV
        return token_loss(logits_BSV, labels) + self.config.balance * sum(balances) / max(len(balances), 1)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """`((ids, labels), {})` for the configured batch and seq, on the parameters' device."""
        return example_tokens(self.batch, self.seq, self.config.vocab, self.embed_tokens.weight.device), {}
