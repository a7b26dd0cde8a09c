"""Calls and hooks that export would drop without a word: gradients changed or accumulated inside the model.

Enters: the module before it is traced, and calls that its forward makes. Leaves: nothing; the graph needs none of this.
Refused, as `CaptureError`: hooks on gradients of parameters, of modules and of values inside forward; `backward()`
inside forward. The graph holds the forward alone, so each of these would be lost and the gradients silently wrong.
What an `autograd.Function` does inside is its own affair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.capture.functions import inside_function
from autopar.errors import CaptureError


class DroppedError(CaptureError):
    """A call inside forward that a graph of the forward cannot hold; `explain` adds module and line."""


_CALLS: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "register_hook", "hooks"),
    (torch.Tensor, "backward", "differentiates"),
    (torch.autograd, "backward", "differentiates"),
)
"""(owner, name, what it does: a word that `explain` looks for)."""


@contextlib.contextmanager
def calls_refused() -> Iterator[None]:
    """Inside, a call of `_CALLS` raises `DroppedError` at the user's line."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in _CALLS]
    for owner, name, what in _CALLS:
        setattr(owner, name, _refusing(f"{what}: {name}", owner.__dict__[name]))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _refusing(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if inside_function():
            return original(*args, **kwargs)
        raise DroppedError(what)

    return refuse


def refuse_hooks(model: nn.Module) -> None:
    """Raise for a gradient hook on a parameter or a module.

    Raises:  CaptureError: names it, and says where the hook belongs.
    """
    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{path}: a gradient hook is on this parameter, which autopar replaces by its shard; register it on "
                f'the parallel module\'s own (m.get_parameter("{path}")) after parallelize'
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{path or 'the model'} ({type(module).__name__}): a backward hook is on this module, and a captured "
                "graph has no modules to call it for; use an autograd.Function to change gradients"
            )
