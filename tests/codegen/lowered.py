"""The lowered graphs of small models, without planning: what the fuse pass works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.graph import CodeGen

from autopar.models import GPT, GPTConfig, Llama, LlamaConfig
from autopar.passes.chunk_loss import ChunkLoss
from autopar.passes.lower import Graphs, Partition, lower_to_graphs
from autopar.passes.stream_cross_entropy import StreamCrossEntropy

VOCAB = 61


def gpt(batch: int, seq: int, width: int, heads: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = GPTConfig(vocab=VOCAB, context=max(seq, 2), layers=2, heads=heads, width=width, ff_width=2 * width)
    return GPT(config, batch=batch, seq=seq), tokens(batch, seq)


def llama(batch: int, seq: int, width: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = {"layers": 2, "heads": 2, "kv_heads": 1, "width": width, "ff_width": 3 * width // 2}
    return Llama(LlamaConfig(vocab=VOCAB, context=max(seq, 2), **sizes), batch=batch, seq=seq), tokens(batch, seq)


def tokens(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, VOCAB, (batch, seq), generator=generator) for _ in range(2))  # type: ignore[return-value]


def lower_model(model: nn.Module, inputs: tuple[Tensor, ...], recompute: str = "none", chunks: int = 1) -> Graphs:
    """The graphs of a model that returns its loss. chunks: parts of the rows in which logits are made."""
    names = [n for n, _ in model.named_parameters()]
    values = [p.detach().requires_grad_(p.requires_grad) for p in model.parameters()]

    def run(*flat: Tensor) -> Any:
        return functional_call(model, dict(zip(names, flat, strict=False)), flat[len(names) :])

    return lower_function(run, (*values, *inputs), len(names), chunks=chunks)


def lower_function(
    run: Callable[..., Any], values: tuple[Tensor, ...], parameters: int = 0, stream: bool = True, chunks: int = 1
) -> Graphs:
    """The graphs of a function, of which the first values are parameters. stream: cross entropies, as for kernels.
    chunks: parts of the rows in which logits are made."""
    found: list[Graphs] = []
    early = (StreamCrossEntropy().run,) if stream else ()
    early = (*early, ChunkLoss(chunks).run) if chunks > 1 else early
    lower_to_graphs(run, Partition(frozenset(range(parameters))), (), found.append, joint_passes=early)(*values)
    for module in (found[0].forward, found[0].backward):
        module.graph.set_codegen(CodeGen())  # called with its inputs, not with a list of them
        module.recompile()
    return found[0]
