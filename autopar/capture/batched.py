"""`torch.vmap` in a traced forward, unrolled: one call of the function for each slice.

Enters: nothing. Leaves: a context in which vmap runs its function slice by slice and stacks what it returns, so that
the graph holds plain operators (export would record functorch's own bookkeeping, which no other process can run).
Refused: more than `MOST` slices, and other transforms of torch.func, whose calls `graph.py` refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis
from torch._functorch.vmap import _check_out_dims_is_int_or_int_pytree, _process_batched_inputs
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

MOST = 256
"""Slices that are unrolled; each is a copy of the function's nodes."""


class UnrolledError(CaptureError):
    """A vmap too long to unroll; `explain` adds module and line."""


@contextlib.contextmanager
def vmap_unrolled() -> Iterator[None]:
    """Inside, `torch.vmap(f)(x)` is a stack of `f(x[i])`."""
    before = apis.vmap_impl
    apis.vmap_impl = _unrolled
    try:
        yield
    finally:
        apis.vmap_impl = before


def _unrolled(
    function: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, chunk: Any, *args: Any, **kwargs: Any
) -> Any:
    """What torch's `vmap_impl` returns. Draws are a slice's own, as with randomness="different"."""
    _check_out_dims_is_int_or_int_pytree(out_dims, function)
    count, dims, leaves, spec = _process_batched_inputs(in_dims, args, function)
    if count > MOST:
        raise UnrolledError(f"vmap over {count} slices")
    if randomness == "same":
        raise UnrolledError('vmap with randomness="same"')
    sliced = [[leaf] * count if d is None else leaf.unbind(d) for leaf, d in zip(leaves, dims, strict=True)]
    results = []
    for own in zip(*sliced, strict=True):
        results.append(pytree.tree_flatten(function(*pytree.tree_unflatten(own, spec), **kwargs)))
    out_spec = results[0][1]
    places = pytree._broadcast_to_and_flatten(out_dims, out_spec)
    if places is None:
        raise ValueError(f"vmap: out_dims {out_dims} do not fit what the function returns")
    joined = [_joined([flat[k] for flat, _ in results], place) for k, place in enumerate(places)]
    return pytree.tree_unflatten(joined, out_spec)


def _joined(slices: list[Any], place: int | None) -> Any:
    if place is None:
        return slices[0]
    if not isinstance(slices[0], Tensor):
        raise ValueError(f"vmap: the function must return tensors, not {type(slices[0]).__name__}")
    return torch.stack(slices, place)
