"""Copies between a device and the host memory that offloaded parameters lie in, as torch ops.

    %d = autopar.fetch(%w, device)     a stored shard as the program reads it, on the device
    %h = autopar.put(%g)               a gradient on its way back to the parameter

Enters: a tensor. Leaves: a fresh one, where host and device are one memory (a CPU), too: what a CPU runs is what a GPU
runs. On GPUs the shards lie in pinned memory; a fetch is queued, a put waits until the gradient is there, since the
optimizer reads it on the host. Refused: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("fetch(Tensor x, Device device) -> Tensor")
_LIBRARY.define("put(Tensor x) -> Tensor")


def _fetch(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=True, copy=True)


def _put(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


_LIBRARY.impl("fetch", _fetch, "CompositeExplicitAutograd")
_LIBRARY.impl("put", _put, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::fetch", lambda x, device: torch.empty_like(x, device=device), lib=_LIBRARY)
torch.library.register_fake("autopar::put", lambda x: torch.empty_like(x, device="cpu"), lib=_LIBRARY)

FETCH = torch.ops.autopar.fetch.default


def fetch(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; queued when `x` is pinned. Carries no gradient of its own."""
    return FETCH(x, device)


def put(x: Tensor) -> Tensor:
    """A copy in host memory, complete when this returns. Carries no gradient of its own."""
    return torch.ops.autopar.put.default(x)


def on_host(x: Tensor, device: torch.device) -> Tensor:
    """The same values in host memory of their own, pinned where a GPU is to read them."""
    x = x.to("cpu", copy=True)
    return x.pin_memory() if device.type == "cuda" else x
