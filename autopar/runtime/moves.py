"""The transitions of `layout.TRANSITIONS` on real ranks: differentiable functions over torch.distributed.

A program calls `move(x, axis, source, target, uncut)` and `max_over(x, axis)`; which process group an axis name means
is said by `use_groups`. All shards are of chunk form (ceil sizes, the last ones shorter), so collectives run on shards
padded to the largest one and trim the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the ops below

from autopar.layout import GRADIENT, TRANSITIONS, chunk
from autopar.runtime.offload import fetch, put

_ops = torch.ops._c10d_functional

Uncut = tuple[tuple[int, ...], ...]
"""Parts of each dim as this rank would see them if the axis of the move did not cut."""

Steps = tuple[tuple[str, str, str, Uncut], ...]
"""Moves one after another: axis, source, target, uncut."""


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks that differ only in their coordinate on one axis; `index` is this rank's coordinate. `group` may be a
    name alone, for programs that are lowered where nobody runs them."""

    group: dist.ProcessGroup | str
    size: int
    index: int

    @property
    def name(self) -> str:
        return self.group if isinstance(self.group, str) else self.group.group_name


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


def group_names() -> dict[str, str]:
    """The name of the process group behind each axis."""
    return {axis: group.name for axis, group in _GROUPS.items()}


def parse_placement(text: str) -> tuple[str, int]:
    """`"S3"` -> ("S", 3); `"P"` -> ("P", -1)."""
    return text[0], int(text[1:]) if text[0] == "S" else -1


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
        return _wait(_ops.all_reduce(x.detach().contiguous(), "max", _GROUPS[axis].name))


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


def gradient_of(placement: str) -> str:
    """The placement of a value's gradient."""
    return placement if placement[0] == "S" else GRADIENT[placement]


def transfer(x: torch.Tensor, group: AxisGroup, source: str, target: str, uncut: Uncut) -> torch.Tensor:
    """The forward of a move: a fresh tensor."""
    (kind, part), (to_kind, to_part) = parse_placement(source), parse_placement(target)
    primitive = "nothing" if kind == to_kind != "S" else TRANSITIONS[kind, to_kind].forward
    sizes = tuple(n for dim in uncut for n in dim)
    n, index = group.size, group.index
    if primitive == "nothing":
        return x.clone()
    if primitive == "keep":
        return x.clone() if index == 0 else torch.zeros_like(x)
    if primitive == "all_reduce":
        return _wait(_ops.all_reduce(_sendable(x.contiguous()), "sum", group.name)).to(x.dtype)
    if primitive == "slice":
        return _dims(x.reshape(sizes).narrow(to_part, *chunk(sizes[to_part], n, index)).clone(), uncut)
    local = x.reshape([chunk(s, n, index)[1] if j == part else s for j, s in enumerate(sizes)])
    if primitive == "pad":
        out = x.new_zeros(sizes)
        out.narrow(part, *chunk(sizes[part], n, index)).copy_(local)
        return _dims(out, uncut)
    if primitive == "all_gather":
        rows = _pad(local.movedim(part, 0), 0, _step(sizes[part], n)).contiguous()
        full = _wait(_ops.all_gather_into_tensor(_sendable(rows), n, group.name)).to(x.dtype)
        return _dims(full[: sizes[part]].movedim(0, part), uncut)
    if primitive == "reduce_scatter":
        rows = _pad(local.movedim(to_part, 0), 0, n * _step(sizes[to_part], n)).contiguous()
        mine = _wait(_ops.reduce_scatter_tensor(_sendable(rows), "sum", n, group.name)).to(x.dtype)
        return _dims(mine[: chunk(sizes[to_part], n, index)[1]].movedim(0, to_part), uncut)
    # all_to_all: my rows of `part`, all of `to_part`  ->  all rows of `part`, mine of `to_part`
    step, to_step = _step(sizes[part], n), _step(sizes[to_part], n)
    block = _pad(_pad(local, part, step), to_part, n * to_step)
    block = block.unflatten(to_part, (n, to_step)).movedim(to_part, 0).contiguous()
    flat = _wait(_ops.all_to_all_single(_sendable(block).reshape(n, -1), [1] * n, [1] * n, group.name)).to(x.dtype)
    out = flat.reshape(block.shape).movedim(0, part).flatten(part, part + 1)
    return _dims(out.narrow(part, 0, sizes[part]).narrow(to_part, 0, chunk(sizes[to_part], n, index)[1]), uncut)


def _step(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _sendable(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def _wait(x: torch.Tensor) -> torch.Tensor:
    return _ops.wait_tensor(x)


def _dims(x: torch.Tensor, uncut: Uncut) -> torch.Tensor:
    """Join the parts of each dim again."""
    shape, at = [], 0
    for dim in uncut:
        shape.append(math.prod(x.shape[at : at + len(dim)]))
        at += len(dim)
    return x.reshape(shape).contiguous()
