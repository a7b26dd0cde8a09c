"""autopar/runtime/checkpoint.py: the boxes of a strided shard are exactly the rows it holds."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.runtime.checkpoint import pieces_of


@pytest.fixture(params=range(4))
def mesh(request):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("a", "b"))
    torch.distributed.destroy_process_group()


def shard(full, mesh, placements):
    """The local tensor by definition: each placement cuts every one of its blocks."""
    local = full
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        blocks = placement.split_factor if isinstance(placement, _StridedShard) else 1
        parts = [
            block.chunk(2, placement.dim)[mesh.get_coordinate()[axis]] for block in local.chunk(blocks, placement.dim)
        ]
        local = torch.cat(parts, placement.dim)
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())


@pytest.mark.parametrize(
    "placements",
    [
        (_StridedShard(0, split_factor=3), Replicate()),
        (Shard(1), _StridedShard(0, split_factor=3)),
        (_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=3)),
        (_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=3)),
    ],
)
def test_pieces_cover_the_shard(mesh, placements):
    full = torch.arange(24 * 8).reshape(24, 8)
    tensor = shard(full, mesh, placements)
    pieces = pieces_of(tensor)
    assert len(pieces) > 1
    for piece in pieces:
        where = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        assert torch.equal(piece.of(tensor.to_local()), full[where])
    assert sum(piece.of(tensor.to_local()).numel() for piece in pieces) == tensor.to_local().numel()


def test_one_box_is_left_to_torch(mesh):
    full = torch.arange(24 * 8).reshape(24, 8)
    assert pieces_of(shard(full, mesh, (Shard(0), Shard(1)))) == []
    # Strided by the second axis's ranks and then cut by it: contiguous rows, as FSDP over tensor parallelism has them.
    assert pieces_of(shard(full, mesh, (_StridedShard(0, split_factor=2), Shard(0)))) == []
