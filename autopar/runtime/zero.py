"""ZeRO 1 and 2: parameters gathered once a step, and gradients reduced once a backward (2) or once a step (1).

What enters: a parameter's shard, how it lies and how the program reads it. What leaves: the tensor that the program
computes with; its gradient comes back as a part (P) and leaves as the shard's. A program at level 3 gathers for itself.

    level   gathered                            gradient
    2       once, until the parameters change   reduce-scattered in each backward
    1       the same                            added up whole; reduce-scattered in every `accumulate`-th backward, or
                                                in the first one outside `no_sync()`; until then `.grad` is this rank's
                                                part of a sum (a DTensor that is `Partial`), so that what sets it to
                                                zero, or reads it, does what it says (torch refuses to set it to
                                                zero by `_foreach_zero_`: set it to None, or pass foreach=False)

A parameter that lies in host memory (`Lifetime.host`) is copied to the device on the way, and its gradient back; it
need not be gathered for that.

The parameters change in an optimizer step (torch's public post-step hook says so: version counters of DTensors do not
move), in `load_state_dict`, and when `parameters_changed()` says so. Gradients that are still parts when an optimizer
steps are reduced before it does. Where `.grad` is there already, and is no part (after `zero_grad(set_to_none=False)`),
every backward reduces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.layout import Layout, Parts, local_parts
from autopar.runtime.moves import transfer
from autopar.runtime.offload import fetch, put
from autopar.runtime.process_mesh import ProcessMesh


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How one parameter is gathered for a program."""

    parts: Parts
    stored: Layout
    read: Layout
    """R (I without a gradient) on the axes that are gathered, else as stored."""
    level: int
    dtypes: tuple[torch.dtype, torch.dtype] | None = None
    """Under mixed precision: what is gathered and read, and what gradients are added up and reduced in."""
    host: bool = False
    """It is stored, and updated, in host memory."""
    kept: bool = True
    """Until the parameters change; else for one call."""


class Wholes:
    """The gathered parameters of one module. `sync` is False inside `no_sync()`."""

    def __init__(self, mesh: ProcessMesh, accumulate: int) -> None:
        self.mesh, self.accumulate, self.sync = mesh, accumulate, True
        self._held: dict[tuple[str, Layout], Whole] = {}

    def tensor(self, path: str, parameter: torch.Tensor, shard: torch.Tensor, lifetime: Lifetime) -> torch.Tensor:
        """What the program reads; differentiable by the parameter."""
        key = (path, lifetime.read)
        if key not in self._held:
            self._held[key] = Whole(lifetime, self)
        whole = self._held[key]
        whole.follow(parameter)
        if lifetime.level == 1 and isinstance(parameter, DTensor):
            return _Accumulate.apply(parameter, whole)
        return _Gather.apply(shard, whole)

    def drop(self) -> None:
        """Parameters have changed: gather them again at their next use."""
        for whole in self._held.values():
            whole.value = None


class Whole:
    """One gathered parameter, and how its gradients are reduced."""

    def __init__(self, lifetime: Lifetime, owner: Wholes) -> None:
        self.lifetime, self.owner = lifetime, owner
        self.value: torch.Tensor | None = None
        self.key: tuple[int, int] = (0, 0)
        self.backwards = 0
        self.unsynced = self.due = False
        self.parameter: weakref.ref[torch.Tensor] | None = None
        self.steps = _steps(owner.mesh, lifetime)

    def follow(self, parameter: torch.Tensor) -> None:
        if self.parameter is None or self.parameter() is not parameter:
            self.parameter, self.value = weakref.ref(parameter), None
            FOLLOWED.add(self, parameter)
            if self.lifetime.level == 1 and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_settle_if_due(weakref.ref(self)))

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        key = (shard.data_ptr(), shard._version)
        if self.value is None or self.key != key:
            with torch.inference_mode(False), torch.no_grad():  # kept for training, whatever this call is
                value = shard.detach()
                value = value.to(self.lifetime.dtypes[0]) if self.lifetime.dtypes else value
                value = fetch(value, self.owner.mesh.device) if self.lifetime.host else value
                for axis, part, uncut in self.steps:
                    value = transfer(value, self.owner.mesh.groups[axis], f"S{part}", "R", uncut)
            if not self.lifetime.kept:
                return value
            self.value, self.key = value, key
        return self.value

    def added(self, parameter: DTensor, gradient: torch.Tensor, sync: bool) -> DTensor:
        """At level 1: what is to be added to `.grad` for a whole gradient: itself as a part, or the shard's sum."""
        held = self.held(parameter)
        if held is None:
            self.backwards, self.unsynced = 0, False
        self.backwards += 1
        self.unsynced = self.unsynced or not sync
        due = sync and (self.unsynced or not self.backwards % self.owner.accumulate)
        if held is None and (due or parameter.grad is not None):
            return self.shard_gradient(parameter, gradient)
        self.due = due  # once it is added up: hooks on the parameter have seen each part by then, and each once
        whole = gradient.to(parameter.dtype)
        whole = put(whole) if self.lifetime.host else whole.clone() if whole is gradient else whole
        return as_part(whole, parameter, self.partial(parameter))

    def settle(self, parameter: torch.Tensor) -> None:
        """Reduce the part that `.grad` holds, if it does."""
        held, self.due = self.held(parameter), False
        if held is not None and isinstance(parameter, DTensor):
            parameter.grad = self.shard_gradient(parameter, self.on_device(held.to_local()))

    def held(self, parameter: torch.Tensor) -> DTensor | None:
        """`.grad`, if it is a part that this object can reduce."""
        grad = parameter.grad
        mine = isinstance(grad, DTensor) and isinstance(parameter, DTensor) and self.partial(parameter)
        return grad if mine and tuple(grad.placements) == mine else None  # type: ignore[return-value,union-attr]

    def partial(self, parameter: DTensor) -> tuple[Any, ...]:
        """Placements of a whole gradient: each rank holds a part of the sum."""
        names, placements = parameter.device_mesh.mesh_dim_names or (), list(parameter.placements)
        for axis, _, _ in self.steps:
            placements[names.index(axis)] = Partial()
        return tuple(placements)

    def shard_gradient(self, parameter: DTensor, gradient: torch.Tensor) -> DTensor:
        gradient = self.reduced(gradient).to(parameter.dtype)
        gradient = put(gradient) if self.lifetime.host else gradient
        return as_part(gradient, parameter, tuple(parameter.placements))

    def on_device(self, value: torch.Tensor) -> torch.Tensor:
        return fetch(value, self.owner.mesh.device) if self.lifetime.host else value

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        """The shard's gradient."""
        gradient = gradient.to(self.lifetime.dtypes[1]) if self.lifetime.dtypes else gradient
        for axis, part, uncut in reversed(self.steps):
            gradient = transfer(gradient, self.owner.mesh.groups[axis], "P", f"S{part}", uncut)
        return gradient


def _settle_if_due(ref: weakref.ref[Whole]) -> Callable[[torch.Tensor], None]:
    def settle(parameter: torch.Tensor) -> None:
        whole = ref()
        if whole is not None and whole.due:
            whole.settle(parameter)

    return settle


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, whole: Whole) -> torch.Tensor:
        ctx.whole, ctx.dtype = whole, shard.dtype
        ctx.set_materialize_grads(False)  # an asynchronous pipeline may have none yet, on no rank of the group
        return whole.gathered(shard).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if grads[0] is None:
            return None, None
        grad = ctx.whole.reduced(grads[0]).to(ctx.dtype)
        return put(grad) if ctx.whole.lifetime.host else grad, None


class _Accumulate(torch.autograd.Function):
    """As `_Gather`, from the DTensor itself: its gradient may be a part."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, whole: Whole) -> torch.Tensor:
        ctx.whole, ctx.sync = whole, whole.owner.sync
        ctx.set_materialize_grads(False)  # as above
        return whole.gathered(parameter.to_local().detach()).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if grads[0] is None:
            return None, None
        parameter = ctx.whole.parameter()
        return ctx.whole.added(parameter, grads[0], ctx.sync), None


def as_part(local: torch.Tensor, like: DTensor, placements: tuple[Any, ...]) -> DTensor:
    """A DTensor of the shape of another one."""
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _steps(mesh: ProcessMesh, lifetime: Lifetime) -> Sequence[tuple[str, int, tuple[tuple[int, ...], ...]]]:
    """(axis, part, uncut sizes) of each gather, inner axes first."""
    out = []
    at = lifetime.stored
    for a in reversed(range(len(at))):
        if at[a].kind == "S" and lifetime.read[a].kind != "S":
            part, without = at[a].part, (*at[:a], lifetime.read[a], *at[a + 1 :])
            uncut = local_parts(lifetime.parts, without, mesh.logical.sizes, mesh.coordinate).dims
            out.append((mesh.logical.axes[a].name, part, uncut))
            at = without
    return out


class _Followed:
    """Which gathered tensors belong to a parameter that an optimizer steps."""

    def __init__(self) -> None:
        self._wholes: dict[int, list[weakref.ref[Whole]]] = {}
        self._hooked = False

    def add(self, whole: Whole, parameter: torch.Tensor) -> None:
        if not self._hooked:
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
            self._hooked = True
        key = id(parameter)
        if key not in self._wholes:
            self._wholes[key] = []
            weakref.finalize(parameter, self._wholes.pop, key, None)
        self._wholes[key].append(weakref.ref(whole))

    def _of(self, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Whole]]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held = [(p, ref()) for p in parameters for ref in self._wholes.get(id(p), ())]
        return [(p, whole) for p, whole in held if whole is not None]

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter, whole in self._of(optimizer):
            if whole.lifetime.level == 1:
                whole.settle(parameter)

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for _, whole in self._of(optimizer):
            whole.value = None


FOLLOWED = _Followed()
