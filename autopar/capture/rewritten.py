"""Functions of torch that read values where the same numbers need none; inference mode, which a graph does not show.

Enters: nothing. Leaves: a context in which each of `_REWRITTEN` runs another way, so that a traced forward, which has
no values, gets through it: argument checks are left out, hints are not guessed, and what gathers rows by value gathers
them by index. The values are those that torch's own function gives for arguments that it accepts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer
from torch.nn.modules.adaptive import _ASMoutput

from autopar.runtime.ctc import ctc_loss

_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda t: t, "mean": torch.mean, "sum": torch.sum}


def _gaussian_nll(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
    original: Any = None,
) -> Tensor:
    """Without the check that no variance is negative."""
    if not isinstance(var, Tensor):
        return original(input, target, var, full, eps, reduction)
    if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if reduction not in _REDUCED or torch.Size(torch.broadcast_shapes(input.shape, var.shape)) != input.shape:
        raise ValueError(f"gaussian_nll_loss: var {tuple(var.shape)}, input {tuple(input.shape)}, {reduction=}")
    clamped = var.clamp(min=eps).detach() + (var - var.detach())  # torch's clamp is one without a gradient of its own
    loss = 0.5 * (clamped.log() + (input - target).square() / clamped)
    return _REDUCED[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


def _causal_as_said(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None, original: Any = None
) -> bool:
    """Only what the caller says: a mask that is given is applied, whether or not it happens to be causal."""
    return is_causal is True


def _covariance(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
    original: Any = None,
) -> Tensor:
    if fweights is not None or aweights is not None or input.is_complex():
        return original(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    centred = rows - rows.mean(1, keepdim=True)
    found = centred @ centred.t() / max(rows.shape[1] - correction, 0)
    return found if input.dim() == 2 else found.reshape(())


def _correlation(input: Tensor, original: Any = None) -> Tensor:
    if input.dim() != 2 or input.is_complex():
        return original(input)
    found = _covariance(input)
    deviation = found.diagonal().sqrt()
    return (found / deviation[:, None] / deviation[None, :]).clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False, original: Any = None) -> Tensor:
    chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(chosen(range(input.shape[0]), r))
    if not rows or input.dim() != 1:
        return original(input, r, with_replacement)
    return input[torch.tensor(rows, device=input.device)]


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0, original: Any = None) -> Tensor:
    """With `minlength`, as many counts; a larger value is an index out of range when it is met."""
    if minlength <= 0:
        return original(input, weights, minlength)
    ones = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
    ones = ones if ones.dtype in (torch.int64, torch.float32) else ones.double()
    return torch.zeros(minlength, dtype=ones.dtype, device=input.device).scatter_add(0, input.long(), ones)


def _inverse_stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
    original: Any = None,
) -> Tensor:
    """Without the check that the windows leave no sample out: frames back, windowed, overlapped, each sample divided
    by the squares of the windows over it."""
    if return_complex or onesided is False or not input.is_complex():
        return original(
            input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
        )
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    frames = input if input.dim() == 3 else input.unsqueeze(0)
    count = frames.shape[-1]
    total = n_fft + hop * (count - 1)
    pieces = torch.fft.irfft(frames.transpose(1, 2), n=n_fft, norm="ortho" if normalized else None)
    shape = pieces.new_ones(width) if window is None else window
    left = (n_fft - width) // 2
    shape = F.pad(shape, (left, n_fft - width - left))

    def overlapped(rows: Tensor) -> Tensor:
        return F.fold(rows.transpose(1, 2), (1, total), (1, n_fft), stride=(1, hop)).flatten(1)

    summed = overlapped(pieces * shape)
    squares = overlapped(shape.square().expand(1, count, n_fft))
    first = n_fft // 2 if center else 0
    last = total - n_fft // 2 if center else total
    last = last if length is None else min(first + length, total)
    found = summed[:, first:last] / squares[:, first:last]  # outside, a window may be zero
    found = found if length is None else F.pad(found, (0, length - found.shape[1]))
    return found if input.dim() == 3 else found.squeeze(0)


def _adaptive(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor, original: Any = None) -> Any:
    """Every cluster's log probabilities, and of each row its target's."""
    found = self.log_prob(input_ if target_.dim() else input_.unsqueeze(0))
    output = found.gather(1, target_.reshape(-1, 1)).squeeze(1)
    return _ASMoutput(output if target_.dim() else output.squeeze(0), -output.mean())


def _adaptive_predict(self: nn.AdaptiveLogSoftmaxWithLoss, input: Tensor, original: Any = None) -> Tensor:
    return self.log_prob(input).argmax(1)


def _enter(self: torch.inference_mode, original: Any = None) -> None:
    """Its values carry no gradient: no_grad says so in a graph."""
    self.__dict__["_as_no_grad"] = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)
    self.__dict__["_as_no_grad"].__enter__()


def _leave(self: torch.inference_mode, *raised: Any, original: Any = None) -> None:
    self.__dict__.pop("_as_no_grad").__exit__(*raised)


_REWRITTEN: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (F, "gaussian_nll_loss", _gaussian_nll),
    (transformer, "_detect_is_causal_mask", _causal_as_said),
    (torch, "cov", _covariance),
    (Tensor, "cov", _covariance),
    (torch, "corrcoef", _correlation),
    (Tensor, "corrcoef", _correlation),
    (torch, "combinations", _combinations),
    (torch, "ctc_loss", ctc_loss),
    (torch, "istft", _inverse_stft),
    (Tensor, "istft", _inverse_stft),
    (torch, "bincount", _counts),
    (Tensor, "bincount", _counts),
    (nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive),
    (nn.AdaptiveLogSoftmaxWithLoss, "predict", _adaptive_predict),
    (torch.inference_mode, "__enter__", _enter),
    (torch.inference_mode, "__exit__", _leave),
)
"""(owner, name, what runs instead; it gets torch's own as `original`)."""


@contextlib.contextmanager
def values_unread() -> Iterator[None]:
    """Inside, the functions of `_REWRITTEN` are ours."""
    before = [(owner, name, name in vars(owner), getattr(owner, name)) for owner, name, _ in _REWRITTEN]
    for (owner, name, rewritten), (*_, original) in zip(_REWRITTEN, before, strict=True):
        setattr(owner, name, _with(rewritten, original))
    try:
        yield
    finally:
        for owner, name, own, original in before:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)  # inherited, as Tensor's methods are


def _with(rewritten: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return rewritten(*args, **kwargs, original=original)

    return run
