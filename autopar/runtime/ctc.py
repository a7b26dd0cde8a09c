"""Connectionist temporal classification as an op of one loss a sample: `torch.ops.autopar.ctc_loss`.

    %loss = autopar.ctc_loss(%log_probs, %targets, %input_lengths, %target_lengths, blank, zero_infinity)

torch's own also returns its table of alignments, whose width is the longest target: a shape that depends on data, which
no graph can hold. Here the backward makes that table again. Samples do not read each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_SAMPLES = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
)
_LIBRARY.define(f"ctc_loss({_SAMPLES}) -> Tensor")
_LIBRARY.define(f"ctc_loss_backward(Tensor grad, {_SAMPLES}) -> Tensor")

NONE = 0
"""torch's number for "no reduction"."""
_torchs = torch.ctc_loss


def _loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    if not log_probs.shape[1]:
        return log_probs.new_zeros(0)  # an empty shard
    return _torchs(log_probs, targets, input_lengths, target_lengths, blank, NONE, zero_infinity)


def _loss_backward(grad: Tensor, log_probs: Tensor, *samples: Any) -> Tensor:
    if not log_probs.shape[1]:
        return torch.zeros_like(log_probs)
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        return torch.autograd.grad(_loss(leaf, *samples), leaf, grad)[0]


_LIBRARY.impl("ctc_loss", _loss, "CompositeExplicitAutograd")
_LIBRARY.impl("ctc_loss_backward", _loss_backward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::ctc_loss", lambda x, *rest: x.new_empty(x.shape[1]), lib=_LIBRARY)
torch.library.register_fake("autopar::ctc_loss_backward", lambda grad, x, *rest: torch.empty_like(x), lib=_LIBRARY)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    given = torch.ops.autopar.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return given, None, None, None, None, None


torch.library.register_autograd("autopar::ctc_loss", _differentiate, setup_context=_save, lib=_LIBRARY)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
    *,
    original: Any = None,
) -> Tensor:
    """What `torch.ctc_loss` does, through the op: log_probs [T, N, C] or [T, C]; reduction 0 none, 1 mean, 2 sum."""
    alone = log_probs.dim() == 2
    device = log_probs.device
    lengths = [
        torch.as_tensor(n, dtype=torch.int64, device=device).reshape(-1) for n in (input_lengths, target_lengths)
    ]
    x = log_probs.unsqueeze(1) if alone else log_probs
    given = targets.reshape(1, -1) if alone else targets
    loss = torch.ops.autopar.ctc_loss(x, given, *lengths, blank, zero_infinity)
    if reduction == 1:
        return (loss / lengths[1].clamp(min=1)).mean()
    if reduction == 2:
        return loss.sum()
    return loss.squeeze(0) if alone else loss
