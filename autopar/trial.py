"""One run of a model for `verify`: some AdamW steps on one batch, and everything that is to be compared.

Enters: a module (the user's, or a `ParallelModule`), a batch, a dtype, a loss function or None, a number of steps.
Leaves: loss, outputs, gradients of the first step, parameters and buffers after all, as whole plain tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.compare import LEARNING_RATE, TINY_GRADIENT, Tensors
from autopar.runtime.module import ParallelModule

Loss = Callable[[Any], torch.Tensor]

LOSS_FIELD = (".loss", "['loss']")
"""How the path of a field named `loss` ends."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The global batch; a fresh copy for each call, since a model may write into its inputs."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device

    def in_dtype(self, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            made = _in_dtype(leaf.detach(), dtype).to(self.device, copy=True)
            return made.requires_grad_(leaf.requires_grad)

        args, kwargs = pytree.tree_map(fresh, (self.args, dict(self.kwargs)))
        return args, kwargs


@dataclass(frozen=True, eq=False)
class Trained:
    loss: float | None
    tensors: Tensors
    random: bool
    """The forward pass drew from torch's generators."""
    narrow: bool
    """A float64 model that computes in a narrower dtype what its loss depends on."""


def train(module: nn.Module, inputs: Inputs, dtype: torch.dtype, loss_fn: Loss | None, steps: int) -> Trained:
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    # foreach would be faster and refuses parameters on different meshes.
    optimizer = torch.optim.AdamW(named.values(), lr=LEARNING_RATE, foreach=False) if named else None
    states, precision = _generator_states(), _Precision()
    for step in range(max(1, steps)):
        args, kwargs = inputs.in_dtype(dtype)
        module.zero_grad()
        if step:
            loss = _loss_of(module(*args, **kwargs), loss_fn)[0]
        else:
            with precision:
                loss, outputs = _loss_of(module(*args, **kwargs), loss_fn)
            random = any(not torch.equal(a, b) for a, b in zip(states, _generator_states(), strict=True))
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        if not step:
            grads = {n: _whole(p.grad) for n, p in named.items() if p.grad is not None}
            for path, leaf in leaves((args, kwargs), ("args", "kwargs")):
                if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
                    grads[path] = _whole(leaf.grad)
            grads = _of_all_stages(module, grads)
            first = None if loss is None else _whole(loss)
        if optimizer is not None and steps and loss is not None:
            if not step:
                _ignore_rounding(optimizer, grads)
            optimizer.step()
    tensors = {
        "loss": {} if first is None else {"loss": first},
        "outputs": outputs,
        "grads": grads,
        "params_after_step": _of_all_stages(module, {n: _whole(p) for n, p in module.named_parameters()}),
        "buffers": {n: _whole(b) for n, b in module.named_buffers()},
    }
    narrow = dtype == torch.float64 and precision.narrow
    return Trained(None if first is None else float(first), tensors, random, narrow)


def _of_all_stages(module: nn.Module, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In a pipeline each rank has the tensors of its own stages: those of all."""
    if not isinstance(module, ParallelModule) or module.plan.degrees["pp"] == 1:
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {n: t.cpu() for n, t in mine.items()})
    return {n: t for each in everyone for n, t in each.items()} | mine


def _ignore_rounding(optimizer: torch.optim.AdamW, grads: Mapping[str, torch.Tensor]) -> None:
    """Raise Adam's epsilon to the gradients that count as zero.

    Adam would make a step of their rounding errors alone: of a bias before a batch norm, or of attention's keys.
    """
    largest = max((float(g.abs().max()) for g in grads.values() if g.numel()), default=0.0)
    for group in optimizer.param_groups:
        group["eps"] = max(group["eps"], TINY_GRADIENT * largest) if math.isfinite(largest) else group["eps"]


class _Precision(TorchFunctionMode):
    """Notes whether a differentiable value is narrower than float64."""

    narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.narrow and isinstance(out, torch.Tensor):
            self.narrow = out.is_floating_point() and out.dtype != torch.float64 and out.requires_grad
        return out


def _loss_of(output: Any, loss_fn: Loss | None) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """(The loss to differentiate, None when nothing is differentiable; the output's tensors, whole, by path)."""
    named = [(path, leaf) for path, leaf in leaves(output, None) if isinstance(leaf, torch.Tensor)]
    tensors = {path: _full(leaf) for path, leaf in named}
    whole = {path: _whole(leaf) for path, leaf in tensors.items()}
    if loss_fn is not None:
        return loss_fn(pytree.tree_map_only(DTensor, _full, output)), whole
    differentiable = {p: t for p, t in tensors.items() if t.requires_grad and t.is_floating_point()}
    scalars = [p for p, t in differentiable.items() if not t.shape]
    fields = [p for p in scalars if p.endswith(LOSS_FIELD)]
    if fields or len(scalars) == 1:
        return differentiable[(fields or scalars)[0]], whole
    squares = [_weighted_squares(t) for t in differentiable.values()]
    return (torch.stack(squares).sum() if squares else None), whole


def _weighted_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of squares with weights from 0.5 to 1.5, so that no two elements have the same part in it."""
    weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64, device=tensor.device)
    return (weights * tensor.reshape(-1).double().square()).sum()


def leaves(tree: Any, roots: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    """(path, leaf) as users write it: `args[0]`, `output.loss`, `output.past_key_values[0]`."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        start, rest = ("output", path) if roots is None else (roots[path[0].idx], path[1:])  # type: ignore[attr-defined]  # of a tuple
        if roots is None and path and isinstance(path[0], pytree.MappingKey) and type(tree) is not dict:
            start, rest = f"output.{path[0].key}", path[1:]
        yield start + pytree.keystr(rest), leaf


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The global tensor, differentiable."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain global copy."""
    return _full(tensor.detach()).clone()


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In place; integers stay, complex numbers take the width of their dtype."""
    return module._apply(lambda t: _in_dtype(t, dtype))  # type: ignore[no-untyped-call]


def _generator_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]  # type: ignore[no-untyped-call]
