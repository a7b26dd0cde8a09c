"""The transitions of `layout.TRANSITIONS` on real ranks: differentiable functions over torch.distributed.

A program calls `move(x, axis, source, target, uncut)` and `max_over(x, axis)`; which process group an axis name means
is said by `use_groups`. What is sent is said in `transfer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from autopar.runtime.offload import fetch, put
from autopar.runtime.transfer import AxisGroup, Uncut, gradient_of, maximum, transfer

Steps = tuple[tuple[str, str, str, Uncut], ...]
"""Moves one after another: axis, source, target, uncut."""


_GROUPS: dict[str, AxisGroup] = {}


@contextmanager
def use_groups(groups: Mapping[str, AxisGroup]) -> Iterator[None]:
    """Run programs with these groups behind the axis names."""
    saved = dict(_GROUPS)
    _GROUPS.clear()
    _GROUPS.update(groups)
    try:
        yield
    finally:
        _GROUPS.clear()
        _GROUPS.update(saved)


def groups_in_use() -> dict[str, AxisGroup]:
    """The groups behind the axes, as `use_groups` has them."""
    return dict(_GROUPS)


def group_names() -> dict[str, str]:
    """The name of the process group behind each axis."""
    return {axis: group.name for axis, group in _GROUPS.items()}


def move(x: torch.Tensor, axis: str, source: str, target: str, uncut: Uncut = ()) -> torch.Tensor:
    """Change how `x` lies on one axis.

    Args:
        x: this rank's tensor under `source`.
        source, target: "I", "R", "P" or "S<part>", with parts numbered over all dims of `uncut`.
        uncut: part sizes of each dim, this axis not cutting.
    Returns: this rank's tensor under `target`; its backward is the table's.
    """
    return _Move.apply(x, axis, source, target, uncut)


def load(
    x: torch.Tensor,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    steps: Steps,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A stored parameter as the program reads it: cast, brought to the device, then moved step by step.

    Args:
        dtype: what the result is in, and what is sent. reduce_dtype: what the gradient is reduced in.
        steps: (axis, source, target, uncut) of each move, as in `move`; may be empty.
        device: where the program runs, when `x` lies in host memory.
    Returns: a fresh tensor; its gradient comes back in the dtype of `x`, and where `x` lies.
    """
    return _Load.apply(x, dtype, reduce_dtype, steps, device)


def max_over(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Elementwise maximum over the ranks of an axis; carries no gradient."""
    with torch.no_grad():
        return maximum(x, _GROUPS[axis])


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: str, source: str, target: str, uncut: Uncut) -> torch.Tensor:
        ctx.move = (_GROUPS[axis], source, target, uncut)
        return transfer(x, *ctx.move)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        group, source, target, uncut = ctx.move
        return transfer(grads[0], group, gradient_of(target), gradient_of(source), uncut), None, None, None, None


class _Load(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        steps: Steps,
        device: torch.device | None,
    ) -> torch.Tensor:
        ctx.moves = [(_GROUPS[axis], source, target, uncut) for axis, source, target, uncut in steps]
        ctx.dtypes, ctx.fetched = (x.dtype, reduce_dtype), device is not None
        if device is not None:  # cast first: what is sent is narrower
            x = fetch(x.to(dtype), device)
        else:
            x = x.to(dtype) if x.dtype != dtype or ctx.moves else x.clone()
        for step in ctx.moves:
            x = transfer(x, *step)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dtype, reduce_dtype = ctx.dtypes
        grad = grads[0].to(reduce_dtype) if ctx.moves else grads[0]
        for group, source, target, uncut in reversed(ctx.moves):
            grad = transfer(grad, group, gradient_of(target), gradient_of(source), uncut)
        grad = put(grad) if ctx.fetched else grad
        return grad.to(dtype), None, None, None, None
