"""Parameters and buffers of the parallel module: this rank's shards as DTensors under the model's own names.

What enters: the captured state and a layout for each parameter. What leaves: a tree of modules that holds them. Rank
    0's values win
where ranks differ, as in DistributedDataParallel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import PlanError
from autopar.layout import Layout, Parts, shard_of
from autopar.runtime.offload import on_host
from autopar.runtime.process_mesh import ProcessMesh, torch_placements


def shard_parameter(
    full: torch.Tensor, parts: Parts, layout: Layout, mesh: ProcessMesh, trainable: bool, host: bool = False
) -> nn.Parameter:
    """This rank's shard of a full tensor. On meta the shard is made empty, and must be loaded or initialised.
    host: it lies in host memory, wherever the program runs.
    """
    at = mesh.coordinate
    if full.is_meta:
        shape = shard_of(full, parts, layout, mesh.logical.sizes, at).shape
        local = torch.empty(shape, dtype=full.dtype, device=mesh.device)
    else:
        value = full.detach().to(mesh.device, copy=True).contiguous()
        if mesh.device_mesh is not None:
            dist.broadcast(value, 0)
        local = shard_of(value, parts, layout, mesh.logical.sizes, at).clone()
    local = on_host(local, mesh.device) if host else local
    if mesh.device_mesh is None:
        return nn.Parameter(local, requires_grad=trainable)
    return nn.Parameter(as_dtensor(local, parts, layout, mesh), requires_grad=trainable)


def as_dtensor(local: torch.Tensor, parts: Parts, layout: Layout, mesh: ProcessMesh) -> DTensor:
    """Name a shard as part of a global tensor, on the mesh of the memory it lies in; differentiable, sends nothing."""
    shape = torch.Size(parts.shape)
    stride = torch.empty(shape, device="meta").stride()
    ranks = mesh.device_mesh if local.device.type == mesh.device.type else mesh.host_mesh
    assert ranks is not None
    placements = torch_placements(layout, parts) or (Replicate(),)  # a pipeline stage of one device has no axes
    return DTensor.from_local(local, ranks, placements, run_check=False, shape=shape, stride=stride)


def locals_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The shards a program computes with; their gradients come back in the parameters' own placements.

    One node of the autograd graph a device: `DTensor.to_local` makes one each, which costs 0.2 ms a parameter and step.
    """
    local = [p.to_local() if isinstance(p, DTensor) and not p.requires_grad else p for p in parameters]
    places: dict[torch.device, list[int]] = {}
    for i, value in enumerate(local):
        if isinstance(value, DTensor):
            places.setdefault(value.device, []).append(i)
    for at in places.values():
        for i, shard in zip(at, _Locals.apply(*(local[i] for i in at)), strict=True):
            local[i] = shard
    return local


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.lie = [(p.device_mesh, p.placements, p.shape, p.stride()) for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple(p.to_local().detach() for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(
            None if g is None else DTensor.from_local(g, mesh, at, run_check=False, shape=shape, stride=stride)
            for g, (mesh, at, shape, stride) in zip(grads, ctx.lie, strict=True)
        )


def place(root: nn.Module, path: str, value: torch.Tensor, *, persistent: bool = True) -> None:
    """Register a parameter or buffer under a dotted name, making the modules on the way."""
    *folders, leaf = path.split(".")
    at = root
    for name in folders:
        if name not in at._modules:
            at.add_module(name, nn.Module())
        at = at._modules[name]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        at.register_parameter(leaf, value)
    else:
        at.register_buffer(leaf, value, persistent=persistent)


class Stored:
    """Where the shards of parameters lie in memory."""

    def __init__(self) -> None:
        self._memory: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        return Stored()

    def refuse_replaced(self, stored: Mapping[str, torch.Tensor]) -> None:
        """torch lets `p.data = value` pass on a DTensor, and goes on with the old values."""
        for path, parameter in stored.items():
            if isinstance(parameter, DTensor):
                memory = parameter.untyped_storage()._cdata
                known, before = self._memory.get(path, (None, memory))
                if known is None or known() is not parameter:
                    self._memory[path] = weakref.ref(parameter), memory
                elif memory != before:
                    raise PlanError(
                        f"{path}: p.data = ... (as nn.utils.vector_to_parameters does) leaves the values of a DTensor "
                        "as they were; write them in place, under torch.no_grad(): p.copy_(...)"
                    )


class OldParameters:
    """The single-device parameters that `parallelize` replaced: an optimizer that steps them is a mistake."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hook: object = None

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._check)
        for p in parameters:
            key = id(p)
            self._refs[key] = weakref.ref(p, lambda _, key=key: self._refs.pop(key, None))

    def _check(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                ref = self._refs.get(id(p))
                if ref is not None and ref() is p:
                    raise PlanError(
                        f"{type(optimizer).__name__} holds the parameters that the model had before "
                        f"autopar.parallelize; make it from the parallel module: {type(optimizer).__name__}"
                        "(m.parameters(), ...)"
                    )


OLD_PARAMETERS = OldParameters()


def whole_copy(value: torch.Tensor) -> torch.Tensor:
    """The global tensor as a plain one that later steps leave alone."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    full, local = value.detach().full_tensor(), value.to_local()
    return full.clone() if full.data_ptr() == local.data_ptr() else full  # torch hands out what is whole already


def full_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather each DTensor; equal objects (ties) are gathered once and stay one object."""
    done: dict[int, torch.Tensor] = {}
    out = {}
    for name, value in state.items():
        if id(value) not in done:
            done[id(value)] = whole_copy(value)
        out[name] = done[id(value)]
    return out
