"""The random ops of a program, as torch ops: `torch.ops.autopar.key`, `dropout`, `keep`, `uniform`, `normal`.

    %key = autopar.key(salt)              this op's key in this call; the only one that reads state
    %y   = autopar.dropout(%x, %key, p)   everything else is a function of its arguments

A backward or a recomputation that gets the same key draws the same numbers, so nothing but the key is saved. `first`,
`sizes` and `strides` say where a shard lies (see `random.Box`); without them the tensor is the whole value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import random
from autopar.runtime.random import Box

_WHERE = "int first=0, int[] sizes=[], int[] strides=[]"
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("key(int salt, int first=0) -> Tensor")
_LIBRARY.define(f"dropout(Tensor x, Tensor key, float p, {_WHERE}) -> Tensor")
_LIBRARY.define(f"keep(SymInt[] size, Tensor key, float p, *, Device device, {_WHERE}) -> Tensor")
_LIBRARY.define(f"uniform(SymInt[] size, Tensor key, *, ScalarType dtype, Device device, {_WHERE}) -> Tensor")
_LIBRARY.define(f"normal(SymInt[] size, Tensor key, *, ScalarType dtype, Device device, {_WHERE}) -> Tensor")

Ints = Sequence[int]


def _dropout(x: Tensor, key: Tensor, p: float, first: int = 0, sizes: Ints = (), strides: Ints = ()) -> Tensor:
    return random.dropout(key, Box.of(first, sizes, strides, x.numel()), p, x)


def _keep(
    size: Ints, key: Tensor, p: float, *, device: torch.device, first: int = 0, sizes: Ints = (), strides: Ints = ()
) -> Tensor:
    out = torch.empty(size, dtype=torch.bool, device=device)
    return random.keep(key, Box.of(first, sizes, strides, out.numel()), p, out)


def _uniform(
    size: Ints,
    key: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    first: int = 0,
    sizes: Ints = (),
    strides: Ints = (),
) -> Tensor:
    out = torch.empty(size, dtype=dtype, device=device)
    return random.uniform(key, Box.of(first, sizes, strides, out.numel()), out)


def _normal(
    size: Ints,
    key: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    first: int = 0,
    sizes: Ints = (),
    strides: Ints = (),
) -> Tensor:
    out = torch.empty(size, dtype=dtype, device=device)
    return random.normal(key, Box.of(first, sizes, strides, out.numel()), out)


def _made(size: Ints, key: Tensor, *, dtype: torch.dtype, device: torch.device, **where: Any) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_LIBRARY.impl("key", random.current_key, "CompositeExplicitAutograd")
_LIBRARY.impl("dropout", _dropout, "CompositeExplicitAutograd")
_LIBRARY.impl("keep", _keep, "CompositeExplicitAutograd")
_LIBRARY.impl("uniform", _uniform, "CompositeExplicitAutograd")
_LIBRARY.impl("normal", _normal, "CompositeExplicitAutograd")

torch.library.register_fake("autopar::key", lambda salt, first=0: torch.empty(2, dtype=torch.int64), lib=_LIBRARY)
torch.library.register_fake("autopar::dropout", lambda x, *where, **named: x.new_empty(x.shape), lib=_LIBRARY)
torch.library.register_fake(
    "autopar::keep",
    lambda size, key, p, *, device, **where: torch.empty(size, dtype=torch.bool, device=device),
    lib=_LIBRARY,
)
torch.library.register_fake("autopar::uniform", _made, lib=_LIBRARY)
torch.library.register_fake("autopar::normal", _made, lib=_LIBRARY)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, key, *ctx.where = inputs
    ctx.save_for_backward(key)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (key,) = ctx.saved_tensors
    return torch.ops.autopar.dropout(grad, key, *ctx.where), None, None, None, None, None


torch.library.register_autograd("autopar::dropout", _dropout_backward, setup_context=_save, lib=_LIBRARY)
