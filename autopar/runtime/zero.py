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

The parameters change in an optimizer step (torch's public post-step hook says so: fused and foreach steps move no
version counter), in `load_state_dict`, when they are written in place one by one (`p.clamp_(...)` moves the DTensor's
counter), through `p.data` (whose reader may write: see `_tell_of_data`), and when `parameters_changed()` says so.
Gradients that are still parts when an optimizer steps are reduced
before it does. Where `.grad` is there already, and is no part (after `zero_grad(set_to_none=False)`), every backward
reduces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.layout import Layout, Parts, local_parts
from autopar.runtime.offload import fetch, put
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.transfer import Move, transfer_together


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
    """The gathered parameters of one module. `sync` is False inside `no_sync()`. keep: between calls, too; else from
    the first step of an optimizer on: averages of weights are written in ways that nobody sees.
    """

    def __init__(self, mesh: ProcessMesh, accumulate: int, keep: bool = True) -> None:
        self.mesh, self.accumulate, self.keep, self.sync = mesh, accumulate, keep, True
        self._held: dict[tuple[str, Layout], Whole] = {}
        self._awaited: set[Whole] = set()
        self._arrived: list[tuple[Whole, torch.Tensor]] = []
        self._read = False
        self._readers: list[weakref.ref[torch.Tensor]] = []

    def tensors(self, once: Mapping[str, tuple[torch.Tensor, torch.Tensor, Lifetime]]) -> dict[str, torch.Tensor]:
        """What the program reads, by path, of (parameter, its shard, lifetime); differentiable by the parameters.

        One node of the autograd graph, so that gathers, and the reductions of what a backward hands over at once,
        share buckets.
        """
        if not once:
            return {}
        wholes, sources = [], []
        for path, (parameter, shard, lifetime) in once.items():
            key = (path, lifetime.read)
            if key not in self._held:
                self._held[key] = Whole(lifetime, self)
            self._held[key].follow(parameter)
            wholes.append(self._held[key])
            sources.append(parameter if lifetime.level == 1 and isinstance(parameter, DTensor) else shard)
        return dict(zip(once, _Gather.apply(self, wholes, *sources), strict=True))

    def gathered(self, wholes: Sequence[Whole], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are kept and still hold are used again."""
        keys = [whole.key_of(shard) for whole, shard in zip(wholes, shards, strict=True)]
        missing = [i for i, whole in enumerate(wholes) if whole.value is None or whole.key != keys[i]]
        values = [whole.value for whole in wholes]
        with torch.inference_mode(False), torch.no_grad():  # kept for training, whatever this call is
            sent = [wholes[i].sent(shards[i]) for i in missing]
            steps = [wholes[i].steps for i in missing]
            for i, value in zip(missing, self._moved(sent, steps), strict=True):
                values[i] = value
                if wholes[i].lifetime.kept and self.keep:
                    wholes[i].value, wholes[i].key = value, keys[i]
        return values  # type: ignore[return-value]

    def reduced(self, wholes: Sequence[Whole], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The shards' gradients of whole ones."""
        dtypes = [whole.lifetime.dtypes for whole in wholes]
        values = [g.to(d[1]) if d else g for g, d in zip(gradients, dtypes, strict=True)]
        back = [[(g, "P", at, uncut) for g, at, _, uncut in reversed(whole.steps)] for whole in wholes]
        return self._moved(values, back)

    def _moved(self, values: list[torch.Tensor], steps: Sequence[Sequence[Move]]) -> list[torch.Tensor]:
        """Each value by its own steps one after another; the first ones together, then the second ones, ..."""
        for turn in range(max(map(len, steps), default=0)):
            having = [i for i, of in enumerate(steps) if turn < len(of)]
            moved = transfer_together([values[i] for i in having], [steps[i][turn] for i in having])
            for i, value in zip(having, moved, strict=True):
                values[i] = value
        return values

    def added(
        self,
        wholes: Sequence[Whole],
        gradients: Sequence[torch.Tensor | None],
        dtypes: Sequence[torch.dtype],
        sync: bool,
    ) -> list[torch.Tensor | None]:
        """What one backward adds to each `.grad`: the shard's sum, or at level 1 a whole gradient as a part."""
        out: list[torch.Tensor | None] = [None] * len(wholes)
        now = []
        for i, (whole, gradient) in enumerate(zip(wholes, gradients, strict=True)):
            if gradient is not None and whole.stays_part(sync):
                out[i] = whole.part(gradient)
            elif gradient is not None:
                now.append(i)
        reduced = self.reduced([wholes[i] for i in now], [gradients[i] for i in now])  # type: ignore[misc]
        for i, gradient in zip(now, reduced, strict=True):
            out[i] = wholes[i].shard_gradient(gradient.to(dtypes[i]))
        self._awaited |= {whole for whole, part in zip(wholes, out, strict=True) if part is not None and whole.due}
        return out

    def arrived(self, whole: Whole, parameter: torch.Tensor) -> None:
        """A part was added to `.grad`; once the last of those that are due is, all are reduced together."""
        if whole.due:
            self._awaited.discard(whole)
            self._arrived.append((whole, parameter))
        if not self._awaited:
            arrived, self._arrived = self._arrived, []
            self.settle(arrived)

    def settle(self, wholes: Sequence[tuple[Whole, torch.Tensor]]) -> None:
        """Reduce the parts that `.grad`s hold, where they do."""
        held = [(whole, parameter, whole.held(parameter)) for whole, parameter in wholes]
        for whole, _, _ in held:
            whole.due = False
            self._awaited.discard(whole)
        parts = [(whole, parameter, part.to_local()) for whole, parameter, part in held if part is not None]
        sums = self.reduced([w for w, _, _ in parts], [whole.on_device(part) for whole, _, part in parts])
        for (whole, parameter, _), gradient in zip(parts, sums, strict=True):
            parameter.grad = whole.shard_gradient(gradient.to(parameter.dtype))

    def handed_out(self, data: torch.Tensor) -> None:
        """Somebody may write to a parameter through this tensor, unseen, as long as it lives."""
        self._read = True
        self._readers.append(weakref.ref(data))

    def may_have_changed(self) -> bool:
        """On this rank, since this was last asked; all ranks must drop what they have gathered, or none."""
        self._readers = [ref for ref in self._readers if ref() is not None]
        read, self._read = self._read or bool(self._readers), False
        return read

    def drop(self) -> None:
        """Parameters have changed: gather them again at their next use."""
        for whole in self._held.values():
            whole.value = None


class Whole:
    """One gathered parameter, and how its gradients are reduced."""

    def __init__(self, lifetime: Lifetime, owner: Wholes) -> None:
        self.lifetime, self.owner = lifetime, owner
        self.value: torch.Tensor | None = None
        self.key: tuple[int, ...] = ()
        self.backwards = 0
        self.unsynced = self.due = self.hooked = False
        self.parameter: weakref.ref[torch.Tensor] | None = None
        self.axes, self.steps = _steps(owner.mesh, lifetime)

    def follow(self, parameter: torch.Tensor) -> None:
        if self.parameter is None or self.parameter() is not parameter:
            self.parameter, self.value, self.hooked = weakref.ref(parameter), None, False
            FOLLOWED.add(self, parameter)
        if self.lifetime.level == 1 and parameter.requires_grad and not self.hooked:
            parameter.register_post_accumulate_grad_hook(_tell_arrived(weakref.ref(self)))
            self.hooked = True

    def key_of(self, shard: torch.Tensor) -> tuple[int, ...]:
        """What moves when the parameter is written in place by hand (`p.clamp_(...)` under `no_grad`)."""
        parameter = self.parameter() if self.parameter is not None else None
        return (shard.data_ptr(), shard._version, parameter._version if parameter is not None else 0)

    def sent(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard in the dtype, and on the device, that it is gathered in."""
        value = shard.detach()
        value = value.to(self.lifetime.dtypes[0]) if self.lifetime.dtypes else value
        return fetch(value, self.owner.mesh.device) if self.lifetime.host else value

    def stays_part(self, sync: bool) -> bool:
        """Is the gradient that a backward brings to be added up whole? Sets `due` if all are to be reduced then."""
        parameter = self.dtensor()
        if self.lifetime.level != 1 or parameter is None:
            return False
        held = self.held(parameter)
        if held is None:
            self.backwards, self.unsynced = 0, False
        self.backwards += 1
        self.unsynced = self.unsynced or not sync
        due = sync and (self.unsynced or not self.backwards % self.owner.accumulate)
        if held is None and (due or parameter.grad is not None):
            return False
        self.due = due  # once it is added up: hooks on the parameter have seen each part by then, and each once
        return True

    def part(self, gradient: torch.Tensor) -> DTensor:
        """A whole gradient as it is added to `.grad`."""
        parameter = self.dtensor()
        assert parameter is not None
        whole = gradient.to(parameter.dtype)
        whole = put(whole) if self.lifetime.host else whole.clone() if whole is gradient else whole
        return as_part(whole, parameter, self.partial(parameter))

    def held(self, parameter: torch.Tensor) -> DTensor | None:
        """`.grad`, if it is a part that this object can reduce."""
        grad = parameter.grad
        mine = isinstance(grad, DTensor) and isinstance(parameter, DTensor) and self.partial(parameter)
        return grad if mine and tuple(grad.placements) == mine else None  # type: ignore[return-value,union-attr]

    def partial(self, parameter: DTensor) -> tuple[Any, ...]:
        """Placements of a whole gradient: each rank holds a part of the sum."""
        names, placements = parameter.device_mesh.mesh_dim_names or (), list(parameter.placements)
        for axis in self.axes:
            placements[names.index(axis)] = Partial()
        return tuple(placements)

    def shard_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A reduced gradient as the node of the graph that handed the shard out takes it."""
        gradient = put(gradient) if self.lifetime.host else gradient
        parameter = self.dtensor()
        if self.lifetime.level != 1 or parameter is None:
            return gradient
        return as_part(gradient, parameter, tuple(parameter.placements))

    def dtensor(self) -> DTensor | None:
        parameter = self.parameter() if self.parameter is not None else None
        return parameter if isinstance(parameter, DTensor) else None

    def on_device(self, value: torch.Tensor) -> torch.Tensor:
        return fetch(value, self.owner.mesh.device) if self.lifetime.host else value


def _tell_arrived(ref: weakref.ref[Whole]) -> Callable[[torch.Tensor], None]:
    def arrived(parameter: torch.Tensor) -> None:
        whole = ref()
        if whole is not None:
            whole.owner.arrived(whole, parameter)

    return arrived


class _Gather(torch.autograd.Function):
    """From shards, and at level 1 from the DTensors themselves: their gradients may be parts."""

    @staticmethod
    def forward(ctx: Any, owner: Wholes, wholes: list[Whole], *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.wholes, ctx.sync = owner, wholes, owner.sync
        ctx.dtypes = [source.dtype for source in sources]
        ctx.set_materialize_grads(False)  # an asynchronous pipeline may have none yet, on no rank of the group
        shards = [s.to_local().detach() if isinstance(s, DTensor) else s for s in sources]
        values = [value.detach() for value in owner.gathered(wholes, shards)]
        ctx.mark_non_differentiable(*(v for v, s in zip(values, sources, strict=True) if not s.requires_grad))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.owner.added(ctx.wholes, grads, ctx.dtypes, ctx.sync)


def as_part(local: torch.Tensor, like: DTensor, placements: tuple[Any, ...]) -> DTensor:
    """A DTensor of the shape of another one."""
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _steps(mesh: ProcessMesh, lifetime: Lifetime) -> tuple[list[str], list[Move]]:
    """The axes to gather over, inner ones first, and how."""
    axes, moves = [], []
    at = lifetime.stored
    for a in reversed(range(len(at))):
        if at[a].kind == "S" and lifetime.read[a].kind != "S":
            part, without = at[a].part, (*at[:a], lifetime.read[a], *at[a + 1 :])
            uncut = local_parts(lifetime.parts, without, mesh.logical.sizes, mesh.coordinate).dims
            axes.append(mesh.logical.axes[a].name)
            moves.append((mesh.groups[axes[-1]], f"S{part}", "R", uncut))
            at = without
    return axes, moves


class _Followed:
    """Which gathered tensors belong to a parameter that an optimizer steps."""

    def __init__(self) -> None:
        self._wholes: dict[int, list[weakref.ref[Whole]]] = {}
        self._hooked = False

    def add(self, whole: Whole, parameter: torch.Tensor) -> None:
        if not self._hooked:
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
            _tell_of_data(self)
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

    def read(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """`parameter.data` was read."""
        for whole in (ref() for ref in self._wholes.get(id(parameter), ())):
            if whole is not None and whole.parameter is not None and whole.parameter() is parameter:
                whole.owner.handed_out(data)

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        parts: dict[Wholes, list[tuple[Whole, torch.Tensor]]] = {}
        for parameter, whole in self._of(optimizer):
            if whole.lifetime.level == 1:
                parts.setdefault(whole.owner, []).append((whole, parameter))
        for owner, wholes in parts.items():
            owner.settle(wholes)

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for _, whole in self._of(optimizer):
            whole.value, whole.owner.keep = None, True


def _tell_of_data(followed: _Followed) -> None:
    """Let a DTensor tell when its `.data` is read: what is written to that moves no version counter of the parameter,
    as an average of weights that is swapped in by `p.data.copy_(average)`.
    """
    plain = torch.Tensor.data

    def read(self: DTensor) -> torch.Tensor:
        data: torch.Tensor = plain.__get__(self)  # type: ignore[attr-defined]
        followed.read(self, data)
        return data

    DTensor.data = property(read, lambda self, value: plain.__set__(self, value))  # type: ignore[assignment,attr-defined]


FOLLOWED = _Followed()
