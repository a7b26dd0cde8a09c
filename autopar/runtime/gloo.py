"""Functional collectives on processors, without torch's registry of pending work.

torch 2.13's `_c10d_functional.all_gather_into_tensor` on gloo corrupts the heap about once in 200,000 calls on two
processes ("malloc(): unaligned tcache chunk detected", under `AsyncAllgatherCoalescedWork`, in `view`, on gloo's
thread); 960,000 calls of what `torch.distributed` itself calls did not [measured].

So here are kernels for tensors on the CPU that call the latter and keep the work themselves. What enters and leaves is
as the ops have it; `install` puts them in place, for everybody who calls those ops in this process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the ops
from torch.distributed.distributed_c10d import _resolve_process_group

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT}
_OPS |= {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND}
_OPS |= {"bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}

# torch 2.13 renamed two of them, and warns of the old names
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_pending: dict[int, tuple[torch.Tensor, dist.Work]] = {}
"""By the address of the first byte: what is on its way, and the work that ends with it there."""


def all_reduce(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), op, group)


def all_reduce_(x: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    return _started(x, dist.all_reduce(x, _OPS[op.lower()], _group(group), async_op=True))


def all_gather_into_tensor(x: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    return all_gather_into_tensor_out(x, size, group, out=_rows(x, x.shape[0] * size if x.dim() else size))


def all_gather_into_tensor_out(x: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    return _started(out, _gather(out, x.contiguous(), group=_group(group), async_op=True))


def reduce_scatter_tensor(x: torch.Tensor, op: str, size: int, group: Any) -> torch.Tensor:
    out = _rows(x, x.shape[0] // size)
    return _started(out, _reduce_scatter(out, x.contiguous(), op=_OPS[op.lower()], group=_group(group), async_op=True))


def all_to_all_single(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    out = _rows(x, sum(received))
    work = dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), _group(group), async_op=True)
    return _started(out, work)


def wait_tensor(x: torch.Tensor) -> torch.Tensor:
    """What is not on its way is there; a view of what is waits for all of it."""
    at = x.data_ptr()
    if at not in _pending and _pending:
        at = next((start for start, (whole, _) in _pending.items() if start <= at < start + whole.nbytes), at)
    found = _pending.pop(at, None)
    if found is not None:
        found[1].wait()
    return x


def _started(out: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
    if work is not None:
        if out.numel():
            _pending[out.data_ptr()] = out, work
        else:
            work.wait()
    return out


def _rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _group(group: Any) -> dist.ProcessGroup:
    return group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)


_KERNELS = (
    all_reduce, all_reduce_, all_gather_into_tensor, all_gather_into_tensor_out, reduce_scatter_tensor,
    all_to_all_single, wait_tensor,
)  # fmt: skip
_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")


@functools.cache
def install() -> None:
    """Use these kernels from now on; once is enough."""
    for kernel in _KERNELS:
        _LIBRARY.impl(kernel.__name__, kernel, "CPU")
