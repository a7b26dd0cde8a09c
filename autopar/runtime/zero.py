"""ZeRO 1 and 2: parameters gathered once a step, and gradients reduced once a backward (2) or once a step (1).

What enters: a parameter's shard, how it lies and how the program reads it. What leaves: the tensor that the program
computes with; its gradient comes back as a part (P) and leaves as the shard's. A program at level 3 gathers for itself.

    level   gathered                            gradient
    2       once, until the parameters change   reduce-scattered in each backward
    1       the same                            added up whole; reduce-scattered in every `accumulate`-th backward, or
                                                in the first one outside `no_sync()`; `.grad` lacks it until then

The parameters change in an optimizer step (torch's public post-step hook says so: version counters of DTensors do not
move), in `load_state_dict`, and when `parameters_changed()` says so. Gradients still held back when an optimizer steps
are reduced before it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.layout import Layout, Parts, local_parts
from autopar.runtime.moves import transfer
from autopar.runtime.parameters import local_of
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


class Wholes:
    """The gathered parameters of one module. `sync` is False inside `no_sync()`."""

    def __init__(self, mesh: ProcessMesh, accumulate: int) -> None:
        self.mesh, self.accumulate, self.sync = mesh, accumulate, True
        self._held: dict[tuple[str, Layout], Whole] = {}

    def tensor(self, path: str, parameter: torch.Tensor, lifetime: Lifetime) -> torch.Tensor:
        """What the program reads; differentiable by the parameter."""
        key = (path, lifetime.read)
        if key not in self._held:
            self._held[key] = Whole(lifetime, self)
        whole = self._held[key]
        whole.follow(parameter)
        return _Gather.apply(local_of(parameter), whole)

    def drop(self) -> None:
        """Parameters have changed: gather them again at their next use."""
        for whole in self._held.values():
            whole.value = None

    def forget(self) -> None:
        """Gradients are set to zero: drop what is held back."""
        for whole in self._held.values():
            whole.forget()


class Whole:
    """One gathered parameter, and its gradients that are not reduced yet."""

    def __init__(self, lifetime: Lifetime, owner: Wholes) -> None:
        self.lifetime, self.owner = lifetime, owner
        self.value: torch.Tensor | None = None
        self.key: tuple[int, int] = (0, 0)
        self.gradient: torch.Tensor | None = None
        self.backwards = 0
        self.unsynced = False
        self.parameter: weakref.ref[torch.Tensor] | None = None
        self.steps = _steps(owner.mesh, lifetime)
        mesh = owner.mesh
        self.shape = local_parts(lifetime.parts, lifetime.stored, mesh.logical.sizes, mesh.coordinate).shape

    def follow(self, parameter: torch.Tensor) -> None:
        if self.parameter is None or self.parameter() is not parameter:
            self.parameter, self.value = weakref.ref(parameter), None
            FOLLOWED.add(self, parameter)
        if parameter.grad is None:  # set to None since: what is held back of it is not wanted either
            self.forget()

    def forget(self) -> None:
        self.gradient, self.backwards, self.unsynced = None, 0, False

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        key = (shard.data_ptr(), shard._version)
        if self.value is None or self.key != key:
            with torch.inference_mode(False), torch.no_grad():  # kept for training, whatever this call is
                value = shard.detach()
                value = value.to(self.lifetime.dtypes[0]) if self.lifetime.dtypes else value
                for axis, part, uncut in self.steps:
                    value = transfer(value, self.owner.mesh.groups[axis], f"S{part}", "R", uncut)
            self.value, self.key = value, key
        return self.value

    def reduced(self, gradient: torch.Tensor, sync: bool) -> torch.Tensor:
        """The shard's gradient; zeros where it is held back."""
        gradient = gradient.to(self.lifetime.dtypes[1]) if self.lifetime.dtypes else gradient
        if self.lifetime.level != 1:
            return self.scatter(gradient)
        self.gradient = gradient.clone() if self.gradient is None else self.gradient.add_(gradient)
        self.backwards += 1
        self.unsynced = self.unsynced or not sync
        if not sync or (not self.unsynced and self.backwards % self.owner.accumulate):
            return gradient.new_zeros(self.shape)
        taken = self.take()
        assert taken is not None
        return taken

    def take(self) -> torch.Tensor | None:
        """Reduce what is held back."""
        gradient, self.gradient, self.backwards, self.unsynced = self.gradient, None, 0, False
        return None if gradient is None else self.scatter(gradient)

    def scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        for axis, part, uncut in reversed(self.steps):
            gradient = transfer(gradient, self.owner.mesh.groups[axis], "P", f"S{part}", uncut)
        return gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, whole: Whole) -> torch.Tensor:
        ctx.whole, ctx.sync, ctx.dtype = whole, whole.owner.sync, shard.dtype
        return whole.gathered(shard).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.whole.reduced(grads[0], ctx.sync).to(ctx.dtype), None


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
            shard = whole.take()
            if shard is not None and parameter.grad is not None:  # None was set on purpose
                grad = parameter.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).add_(shard)

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for _, whole in self._of(optimizer):
            whole.value = None


FOLLOWED = _Followed()
