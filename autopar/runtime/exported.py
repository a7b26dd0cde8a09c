"""What a file written by `autopar export` imports: process groups by axis, its two graphs as one differentiable
function, and what its kernels need of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import MeshError, PlanError
from autopar.runtime import random
from autopar.runtime.backward_split import Split, splittable
from autopar.runtime.moves import group_names
from autopar.runtime.process_mesh import check_world
from autopar.runtime.transfer import AxisGroup


def connect(lines: Mapping[str, Sequence[Sequence[int]]], rank: int, size: int) -> dict[str, AxisGroup]:
    """The process groups behind the axes, for this rank; every rank calls this once.

    Args:    lines: for each axis the ranks that differ on that axis alone. rank, size: whose program this is.
    Raises:  MeshError: this process is another rank, or of another number of them.
    """
    if size > 1:
        check_world(size)
        here = dist.get_rank()
        if here != rank:
            raise MeshError(f"this file is the program of rank {rank} of {size}; this process is rank {here}")
    found = {}
    for axis, of_axis in lines.items():
        for ranks in of_axis:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                found[axis] = AxisGroup(group, len(ranks), list(ranks).index(rank))
    return found


Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


def check(parameters: Mapping[str, Tensor], named: Expected, inputs: Sequence[Tensor], ordered: Expected) -> None:
    """Is this what a program was exported for? Asked before anything is sent.

    Raises:  PlanError: a parameter that is missing, another number of inputs, another shape or dtype.
    """
    missing = [name for name in named if name not in parameters]
    if missing:
        raise PlanError(f"{missing[0]} is missing: `parameters` holds this rank's part of {len(named)} tensors by name")
    if isinstance(inputs, Tensor) or len(inputs) != len(ordered):
        told = "one tensor" if isinstance(inputs, Tensor) else str(len(inputs))
        raise PlanError(f"inputs: {told}; this program takes a sequence of {len(ordered)}: {', '.join(ordered)}")
    given = {**{name: parameters[name] for name in named}, **dict(zip(ordered, inputs, strict=True))}
    for name, (shape, dtype) in {**named, **ordered}.items():
        value = given[name]
        if tuple(value.shape) != shape or value.dtype != dtype:
            said = f"{name} is {tuple(value.shape)}, {value.dtype}"
            raise PlanError(f"{said}; this program was exported for {shape}, {dtype}")


@dataclass(frozen=True, eq=False)
class Halves:
    """A backward in two parts: gradients of weights may be made later than those of what a stage received.

    Fields:  inputs: (axes, *needed, *gradients of results) -> gradients of what was received, then what `weights` needs
             of the way to them. weights: (axes, *needed) -> the others. shape: how they fit together.
    """

    inputs: Callable[..., tuple[Any, ...]]
    weights: Callable[..., tuple[Any, ...]]
    shape: Split


@dataclass(frozen=True, eq=False)
class Graphs:
    """A forward and a backward graph as one function that autograd knows.

    Fields:  forward: (axes, *values) -> results, and after them what the backward needs. backward: (axes, *needed,
             *gradients of results) -> a gradient or None for each value. results: how many there are.
             differentiable: which of them get a gradient, in order. halves: of the backward. `axes` maps an axis to the
             name of its group.
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]
    results: int
    differentiable: tuple[int, ...]
    halves: Halves | None = None

    @property
    def splits(self) -> bool:
        """Does the backward leave weight gradients for later when it is asked to?"""
        return self.halves is not None

    def __call__(self, *values: Tensor) -> tuple[Any, ...]:
        found: tuple[Any, ...] = _Run.apply(self, *values)  # type: ignore[no-untyped-call]  # torch's
        return found


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, *values: Tensor) -> tuple[Any, ...]:
        found = graphs.forward(group_names(), *values)
        results = found[: graphs.results]
        ctx.graphs, ctx.axes = graphs, group_names()
        ctx.save_for_backward(*found[graphs.results :])
        fixed = (r for i, r in enumerate(results) if i not in graphs.differentiable)
        ctx.mark_non_differentiable(*(r for r in fixed if isinstance(r, Tensor)))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        graphs, axes = ctx.graphs, ctx.axes
        values = [*ctx.saved_tensors, *(gradients[i] for i in graphs.differentiable)]
        if graphs.halves is None:
            return None, *graphs.backward(axes, *values)
        parts = graphs.backward, graphs.halves.inputs, graphs.halves.weights
        whole, first, second = (lambda given, part=part: part(axes, *given) for part in parts)
        return None, *splittable(whole, first, second, graphs.halves.shape)(values)


def need_interpreter() -> None:
    """For kernels of a CPU, before they are made.

    Raises:  RuntimeError: Triton was imported without its interpreter, or makes functions for a device.
    """
    import triton
    import triton.language as tl

    if isinstance(tl.sum, triton.JITFunction) or not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "kernels on a CPU run in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported"
        )


class OtherLayout(ValueError):
    """A tensor for which a kernel was not printed; the ops that the kernel stands for take it."""


def laid_out(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor in the strides that a kernel was printed for: a caller may lay its inputs out otherwise.

    Raises:  OtherLayout: it was one number along a dim when the program was lowered, and is not now.
    """
    if value.stride() == strides or value.numel() <= 1:
        return value
    if all(a == b or n == 1 for a, b, n in zip(value.stride(), strides, value.shape, strict=True)):
        return value
    once = value
    for dim, (here, wanted) in enumerate(zip(value.stride(), strides, strict=True)):
        if wanted == 0 and value.shape[dim] > 1:
            if here != 0:
                raise OtherLayout(f"a value of {tuple(value.shape)} was one number along dim {dim} when it was lowered")
            once = once.narrow(dim, 0, 1)
    found = torch.empty_strided(once.shape, strides, dtype=value.dtype, device=value.device)
    return found.copy_(once).expand(value.shape)


def key_words(key: Tensor) -> tuple[int, int]:
    """The two words that the elements of a call are hashed with; where its first element lies is in the first one."""
    word, first = key.tolist()
    k0, k1 = random._words(word, 0)
    return random._signed((k0 + random._GOLDEN * first) & 0xFFFFFFFF, 32), k1
