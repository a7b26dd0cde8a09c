"""An output of all micro-batches as one tensor.

Enters: what this rank's stages gave for each micro-batch. Leaves: the joined value, on every rank that asks for it.
Micro-batches of a schedule with replicas end on different ranks: each rank sends what it has, and all join the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autopar.layout import chunk
from autopar.runtime.pipeline_program import Result
from autopar.runtime.pipeline_step import Step
from autopar.runtime.process_mesh import Line
from autopar.schedule.table import Schedule

Parts = Mapping[int, torch.Tensor]
"""By micro-batch."""


def joined(result: Result, parts: Parts, schedule: Schedule, line: Line | None, step: Step) -> torch.Tensor:
    """All micro-batches of an output; on every rank of the line, but where it is `shared` (zero elsewhere)."""
    if line is None or len(line.ranks) == 1:
        return join(result, parts)
    if result.shared:
        return _share(result, parts, schedule, step)
    if schedule.replicas == 1:
        return sent(owned(result, parts, step), result, schedule.placement[result.stage], line, step)
    found = {}
    for first, others in _groups(result, schedule):
        mine = {k: parts[k] for k in others if k in parts}
        owner = schedule.placement[schedule.path(first)[result.stage]]
        shape = _flat(result, schedule, first) if result.placement.kind == "S" else result.shape
        found[first] = sent(owned(result, mine, step, shape), result, owner, line, step)
    return join(result, found)


def owned(result: Result, parts: Parts, step: Step, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The joined value on the rank that has it, room for it on the others; as it travels, so bool as bytes."""
    shape = result.shape if shape is None else tuple(shape)
    dtype = torch.uint8 if result.dtype == torch.bool else result.dtype
    if not parts:
        return torch.empty(shape, dtype=dtype, device=step.device)
    return join(result, parts).reshape(shape).to(dtype).contiguous()


def sent(packed: torch.Tensor, result: Result, owner: int, line: Line, step: Step) -> torch.Tensor:
    """The owner's value, on every rank."""
    if packed.numel():
        step.guard(
            lambda: dist.broadcast(packed, line.ranks[owner], group=line.group),
            f"an output of stage {result.stage}",
        )
    return packed.to(result.dtype)


def _share(result: Result, parts: Parts, schedule: Schedule, step: Step) -> torch.Tensor:
    """This rank's part of a sum over the line."""
    if not parts or (result.placement.kind in "IR" and 0 not in parts):
        return torch.zeros((), dtype=result.dtype, device=step.device).expand(result.shape)
    if result.placement.kind == "S" and schedule.replicas > 1:
        nothing = torch.zeros((), dtype=result.dtype, device=step.device)
        rest = {k: nothing.expand(_flat(result, schedule, k)) for k in range(schedule.microbatches) if k not in parts}
        return join(result, {**parts, **rest})
    return join(result, parts)


def _groups(result: Result, schedule: Schedule) -> list[tuple[int, range]]:
    """Micro-batches that are sent together, each with the first of them: a replica's where they are added up."""
    count = schedule.microbatches
    if result.placement.kind == "S":
        return [(k, range(k, k + 1)) for k in range(count)]
    replicas = schedule.replicas if result.placement.kind == "P" else 1
    return [(k, range(k, count, schedule.replicas)) for k in range(min(replicas, count))]


def _flat(result: Result, schedule: Schedule, k: int) -> tuple[int, ...]:
    """Sizes of the parts of one micro-batch's piece."""
    sizes = list(result.flat)
    sizes[result.placement.part] = chunk(sizes[result.placement.part], schedule.microbatches, k)[1]
    return tuple(sizes)


def join(result: Result, parts: Parts) -> torch.Tensor:
    """Sum, concatenation or the first of the micro-batches' values, as they lie."""
    values = [parts[k] for k in sorted(parts)]
    if result.placement.kind == "P":
        total = values[0]
        for other in values[1:]:
            total = total + other
        return total
    if result.placement.kind != "S":
        return values[0]
    part = result.placement.part
    opened = []
    for tensor in values:
        sizes = list(result.flat)
        others = math.prod(n for j, n in enumerate(sizes) if j != part)
        sizes[part] = tensor.numel() // others if others else 0
        opened.append(tensor.reshape(sizes))
    together = torch.cat(opened, part)
    return together.reshape(result.shape) if together.numel() == math.prod(result.shape) else together
