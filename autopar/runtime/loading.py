"""A state dict on its way into a parallel module.

Enters: the module's own state dict, one of another plan or mesh (DTensors), or the single-device model's (plain
tensors). Leaves: this rank's shards in the parameters' own placements, in place of what the dict held. Refused, on
every rank alike: in a pipeline, names that are missing and shapes that differ, whichever stage they belong to;
`assign=True` with another dtype than the plan's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.layout import Layout, Parts, shard_of
from autopar.runtime.parameters import as_dtensor
from autopar.runtime.process_mesh import ProcessMesh


def localize(
    state: dict[str, Any],
    prefix: str,
    held: Mapping[str, torch.Tensor],
    shards: Mapping[str, tuple[Parts, Layout]],
    ties: Mapping[str, str],
    elsewhere: Collection[str],
    mesh: ProcessMesh,
    assign: bool,
) -> tuple[list[str], list[str]]:
    """Change `state` for this rank. held: the module's tensors by name. elsewhere: names held by other ranks alone.

    Returns: names that are missing here and on the ranks that hold them; what is wrong with others.
    """
    given = {key.removeprefix(prefix): key for key in list(state) if key.startswith(prefix)}
    missing, wrong = [], []
    if any(name in elsewhere for name in given):  # a state dict of the whole model; our own has this rank's names only
        missing = [prefix + name for name in elsewhere if name not in given]
    for name, key in given.items():
        lies, mine = shards.get(ties.get(name, name)), held.get(name)
        state[key] = value = _gathered(state[key], mine, lies)  # by all ranks that hold it, wherever it goes
        if name in elsewhere and lies is not None:
            wrong += _wrong(key, value, lies[0].shape)
            del state[key]
        elif isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
            if assign and value.dtype != mine.dtype:
                wrong.append(
                    f"{key} is {value.dtype}, and the plan's {mine.dtype}: leave assign=True out to convert it."
                )
                value = value.to(mine.dtype)  # what is raised leaves the module as the plan wants it
            state[key] = _as_held(value, mine, lies, mesh)
    return missing, wrong


def _wrong(key: str, value: Any, shape: tuple[int, ...]) -> list[str]:
    """In torch's words."""
    if not isinstance(value, torch.Tensor):
        return [
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object from checkpoint '
            f"but received {type(value)}"
        ]
    if tuple(value.shape) != shape:
        return [
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in current "
            f"model is {torch.Size(shape)}."
        ]
    return []


def _gathered(value: Any, mine: torch.Tensor | None, lies: tuple[Parts, Layout] | None) -> Any:
    """A DTensor that does not lie as the module's own is gathered, unless it is to be refused for its shape."""
    if not isinstance(value, DTensor):
        return value
    shape = mine.shape if mine is not None else lies[0].shape if lies is not None else None
    lying = (mine.device_mesh, mine.placements) if isinstance(mine, DTensor) else None
    if tuple(value.shape) != shape or (value.device_mesh, value.placements) == lying:
        return value
    return value.full_tensor()


def _as_held(
    value: torch.Tensor, mine: torch.Tensor, lies: tuple[Parts, Layout] | None, mesh: ProcessMesh
) -> torch.Tensor:
    """A whole value cut as the module's own; as it is where that is for torch to refuse."""
    if isinstance(value, DTensor) or not isinstance(mine, DTensor) or lies is None or value.is_meta:
        return value
    if tuple(value.shape) != lies[0].shape:
        return value
    there = value.to(mine.to_local().device)  # the host's memory, where it is offloaded
    local = shard_of(there, *lies, mesh.logical.sizes, mesh.coordinate)
    return as_dtensor(local.clone(), *lies, mesh)
