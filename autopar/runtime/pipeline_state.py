"""Parameters that lie on the stages of a pipeline, taken together: full state, the norm of all gradients, and whether
one of them is infinite.

torch's `clip_grad_norm_` sees the gradients of this rank's stages only, and would clip every stage by its own norm.
What it calls for the norm is replaced by a function that adds up the stages, each shared parameter once; it is looked
up at every call, so any way of importing `clip_grad_norm_` is served. Modules without stages get torch's own answer.
`torch.nn.utils.get_total_norm` holds on to torch's function and gives the norm of this rank's stages. In the same way
`torch.amp.GradScaler` is told of infinities in other stages: all of them skip a step, or none.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from autopar.runtime.parameters import whole_copy
from autopar.runtime.process_mesh import Line


def full_tensors_of_stages(
    held: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, str],
    owners: Mapping[str, tuple[int, ...]],
    line: Line,
) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank; ties stay one object. A collective call.

    Args:    held: this rank's state by name. shapes, owners: by parameter, of the whole model. ties: alias -> name.
    """
    done: dict[str, torch.Tensor] = {}
    for name in sorted(owners):
        mine = held.get(name)
        value = None
        if mine is not None:
            value = whole_copy(mine).to(line.device_mesh.device_type).contiguous()
        source = line.ranks[owners[name][0]]
        message: list[Any] = [value.dtype if value is not None else None]
        dist.broadcast_object_list(message, source, group=line.group)
        if value is None:
            value = torch.empty(shapes[name], dtype=message[0], device=line.device_mesh.device_type)
        if value.numel():
            dist.broadcast(value, source, group=line.group)
        done[name] = value
    out = {name: done[ties.get(name, name)] for name in (*owners, *(a for a, n in ties.items() if n in owners))}
    rest = {name: value.detach().clone() for name, value in held.items() if name not in out}
    return {**out, **rest}


class _StageNorm:
    """The norm of the gradients of one pipelined module."""

    def __init__(self, module: nn.Module, line: Line, owners: Mapping[str, tuple[int, ...]]) -> None:
        self.module, self.line, self.owners = weakref.ref(module), line, owners

    def gradients(self) -> dict[int, bool]:
        """By id: is this gradient counted here? A shared parameter is counted by its first owner."""
        module = self.module()
        if module is None:
            return {}
        return {
            id(p.grad): self.owners.get(n, (self.line.index,))[0] == self.line.index
            for n, p in module.named_parameters()
            if p.grad is not None
        }

    def total(
        self, grads: list[torch.Tensor], norm_type: float, *rest: Any, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """grads: those counted here. dtype: of the answer: that of all gradients, which scales each copy alike."""
        mine = _TORCHS(grads, norm_type, *rest)
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        mine = mine.to(self.line.device_mesh.device_type)
        known = [torch.empty((), dtype=torch.float64, device=mine.device) for _ in self.line.ranks]
        dist.all_gather(known, mine.double(), group=self.line.group)
        norms = torch.stack(known)
        total = norms.max() if math.isinf(norm_type) else torch.linalg.vector_norm(norms, norm_type)
        return total.to(dtype or (mine.dtype if grads else torch.get_default_dtype()))


_TORCHS: Callable[..., torch.Tensor] = clip_grad._get_total_norm
_MODULES: list[_StageNorm] = []


def count_norms_over_stages(module: nn.Module, line: Line, owners: Mapping[str, tuple[int, ...]]) -> None:
    """From now on `clip_grad_norm_` of this module's gradients counts all stages, and `GradScaler` looks at all."""
    _MODULES[:] = [m for m in _MODULES if m.module() is not None]
    _MODULES.append(_StageNorm(module, line, owners))
    clip_grad._get_total_norm = _total_norm
    torch.amp.GradScaler._unscale_grads_ = _unscale_grads  # type: ignore[method-assign,assignment]


_TORCHS_UNSCALE: Callable[..., dict[torch.device, torch.Tensor]] = torch.amp.GradScaler._unscale_grads_


def _unscale_grads(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *rest: Any
) -> dict[torch.device, torch.Tensor]:
    """What torch finds (1 for an infinity, by device), over all stages."""
    found = _TORCHS_UNSCALE(scaler, optimizer, *rest)
    module = _module_of(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if module is None:
        return found
    device = torch.device(module.line.device_mesh.device_type)
    flags = [flag.to(device) for flag in found.values()]
    worst = torch.stack(flags).max() if flags else torch.zeros((), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=module.line.group)
    return {place: worst.to(place) for place in found} or {device: worst}


def _total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **more: Any) -> torch.Tensor:
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    found = _module_of(grads)
    if found is None:
        return _TORCHS(grads, norm_type, *rest, **more)
    counted = found.gradients()
    mine = [g for g in grads if counted.get(id(g), True)]
    dtype = functools.reduce(torch.promote_types, (g.dtype for g in grads)) if grads else None
    return found.total(mine, float(norm_type), *rest, *more.values(), dtype=dtype)


def _module_of(grads: Iterable[torch.Tensor]) -> _StageNorm | None:
    """The pipelined module whose gradients these are; a rank without any asks for the only one there is."""
    wanted = {id(g) for g in grads}
    alive = [m for m in _MODULES if m.module() is not None]
    if not wanted:
        return alive[0] if len(alive) == 1 else None
    return next((m for m in alive if wanted & m.gradients().keys()), None)
