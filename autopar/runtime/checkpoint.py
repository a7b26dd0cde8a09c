"""Shards of fused projections in `torch.distributed.checkpoint`.

A rank's shard of a fused projection (queries, keys and values in one weight) is one piece of each of them. DTensor says
so (`_StridedShard`), but its part of the checkpoint protocol names one piece a rank, which would overlap another
rank's. Enters: any DTensor. Leaves: one piece for each contiguous run. Refused: nothing; shards of one piece, and those
that do not divide evenly, are left to torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Run = tuple[int, int, int]
"""(first global index, length, first local index)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor that lies on this rank, and where it begins in the local one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The piece as a view of the local tensor."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def pieces_of(tensor: DTensor) -> list[Piece]:
    """The boxes of a DTensor on this rank; empty when torch's own answer (one box) is right."""
    if not any(isinstance(p, _StridedShard) for p in tensor.placements):
        return []
    runs = []
    for dim in range(tensor.ndim):
        index = _indices(tensor, dim)
        if index is None:
            return []
        runs.append(_runs(index))
    boxes = [
        Piece(tuple(r[0] for r in box), tuple(r[1] for r in box), tuple(r[2] for r in box))
        for box in itertools.product(*runs)
    ]
    return boxes if len(boxes) > 1 else []


def _indices(tensor: DTensor, dim: int) -> torch.Tensor | None:
    """Global indices along `dim` that this rank holds; None when the shards are uneven."""
    at = tensor.device_mesh.get_coordinate()
    index = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, (Shard, _StridedShard)) or placement.dim % tensor.ndim != dim:
            continue
        blocks = placement.split_factor if isinstance(placement, _StridedShard) else 1
        ranks = int(tensor.device_mesh.size(axis))
        if at is None or index.numel() % int(blocks * ranks):
            return None
        index = index.reshape(blocks, ranks, -1)[:, at[axis]].reshape(-1)
    return index


def _runs(index: torch.Tensor) -> list[Run]:
    breaks = (torch.nonzero(index.diff() != 1).reshape(-1) + 1).tolist()
    edges = [0, *breaks, index.numel()]
    return [(int(index[a]), b - a, a) for a, b in itertools.pairwise(edges) if b > a]


def install() -> None:
    """Teach DTensor's part of the checkpoint protocol, once a process."""
    global _installed
    if _installed:
        return
    _installed = True
    write, chunks, shard = DTensor.__create_write_items__, DTensor.__create_chunk_list__, DTensor.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, object: Any) -> Any:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        pieces = pieces_of(self)
        if not pieces:
            return write(self, fqn, object)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for piece, chunk in zip(pieces, _chunks(pieces), strict=True)
        ]

    def create_chunk_list(self: DTensor) -> Any:
        pieces = pieces_of(self)
        return _chunks(pieces) if pieces else chunks(self)  # type: ignore[no-untyped-call]

    def get_tensor_shard(self: DTensor, index: Any) -> torch.Tensor:
        found = [p for p in pieces_of(self) if p.offsets == tuple(index.offset or ())]
        return found[0].of(self.to_local()) if found else shard(self, index)  # type: ignore[no-untyped-call]

    # Optimizer states are DTensors that torch makes from the parameters, so a subclass would not reach them.
    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


_installed = False


def _chunks(pieces: Sequence[Piece]) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces]
