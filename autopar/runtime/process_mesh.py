"""A logical mesh on real processes: the DeviceMesh behind the parameters and the group behind each axis name.

The DeviceMesh lists the axes in cutting order (fastest first), so that DTensor's left-to-right sharding is ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate, Shard

from autopar.errors import MeshError
from autopar.layout import Layout, Parts
from autopar.mesh import LogicalMesh
from autopar.runtime import checkpoint, gloo
from autopar.runtime.transfer import AxisGroup


@dataclass(frozen=True, eq=False)
class Line:
    """The ranks that hold the stages of a pipeline and agree with this one on every other axis.

    Fields:  index: this rank's place. ranks: global ranks by place. group: of them. device_mesh: of all ranks, the
             pipeline its last dim.
    """

    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    device_mesh: DeviceMesh


@dataclass(frozen=True, eq=False)
class ProcessMesh:
    """What this rank knows of the mesh. `device_mesh` is None on a mesh of one device. In a pipeline `logical`, `rank`,
    `device_mesh` and `groups` are those of this rank's stages alone, and `line` joins them. `host_mesh` is the same
    mesh for parameters that lie in host memory; None where that is the device's own."""

    logical: LogicalMesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None = None
    groups: Mapping[str, AxisGroup] = field(default_factory=dict)
    line: Line | None = None
    host_mesh: DeviceMesh | None = None

    @property
    def coordinate(self) -> tuple[int, ...]:
        return self.logical.coordinate(self.rank)

    @property
    def world(self) -> int:
        return self.logical.size


def ensure_process_group(size: int) -> None:
    """Under torchrun, start the process group that is not there yet."""
    if size > 1 and not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # gloo beside NCCL: offloaded parameters lie in host memory, and their norms and states are gathered there
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def connect_world(size: int) -> torch.device:
    """Check the world size before any collective; the device that collectives use."""
    if size > 1:
        check_world(size)
    return _device() if size > 1 else torch.device("cpu")


def _device() -> torch.device:
    """That of the running process group: a GPU where it has a backend for them."""
    if "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def with_host(mesh: ProcessMesh) -> ProcessMesh:
    """The mesh with a second one for host memory, over which norms, states and checkpoints of what lies there are put
    together. A collective call.

    Raises:  MeshError: the process group cannot send from host memory.
    """
    if mesh.device_mesh is None or mesh.device.type == "cpu":
        return mesh
    if "cpu:" not in dist.get_backend_config():
        raise MeshError(
            f"offload keeps parameters in host memory, but the process group has only {dist.get_backend_config()}; "
            "start it with torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"
        )
    every = mesh.line.device_mesh if mesh.line is not None else mesh.device_mesh
    names = every.mesh_dim_names or ()
    host = DeviceMesh("cpu", every.mesh.cpu(), mesh_dim_names=names)
    return replace(mesh, host_mesh=host if mesh.line is None else host[names[:-1]])


def connect(logical: LogicalMesh) -> ProcessMesh:
    """Join the running process group to a logical mesh. A mesh of one device needs none.

    Raises:  MeshError: the process group has another size than the mesh, or there is none.
    """
    if logical.size == 1:
        return ProcessMesh(logical, 0, torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu"))
    check_world(logical.size)
    rank, device = dist.get_rank(), _device()
    names = tuple(a.name for a in logical.axes)
    device_mesh = DeviceMesh(device.type, torch.from_numpy(logical.rank_array()), mesh_dim_names=names)
    at = logical.coordinate(rank)
    groups = {a.name: AxisGroup(device_mesh.get_group(a.name), a.size, at[i]) for i, a in enumerate(logical.axes)}
    return ProcessMesh(logical, rank, device, device_mesh, groups)


def connect_pipeline(logical: LogicalMesh, inner: LogicalMesh) -> ProcessMesh:
    """Join a pipeline. logical: all axes, the pipeline last; inner: those inside a stage.

    Raises:  MeshError: as `connect`.
    """
    check_world(logical.size)
    rank, device = dist.get_rank(), _device()
    array, names = torch.from_numpy(logical.rank_array()), tuple(a.name for a in logical.axes)
    if not inner.axes:  # a stage of one device is a mesh too: its parameters are DTensors like all others
        array, names = array[None], ("one", *names)
    device_mesh = DeviceMesh(device.type, array, mesh_dim_names=names)
    at = logical.coordinate(rank)
    stage = device_mesh[names[:-1]]
    groups = {a.name: AxisGroup(device_mesh.get_group(a.name), a.size, at[i]) for i, a in enumerate(inner.axes)}
    line = Line(at[-1], logical.group(len(logical.axes) - 1, at), device_mesh.get_group(names[-1]), device_mesh)
    return ProcessMesh(inner, inner.rank(at[:-1]), device, stage, groups, line)


def check_world(size: int) -> None:
    """Asked before anything is sent. Raises: MeshError when the running process group is not of this size."""
    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            f"the mesh has {size} devices, but no process group runs; start the script with torchrun "
            f"--nproc-per-node {size}, or call torch.distributed.init_process_group"
        )
    if dist.get_world_size() != size:
        raise MeshError(
            f"the mesh has {size} devices, but {dist.get_world_size()} processes run; start {size}, or pass a mesh "
            f"of {dist.get_world_size()}"
        )
    if "cpu:gloo" in dist.get_backend_config():
        gloo.install()


def torch_placements(layout: Layout, parts: Parts) -> tuple[TorchPlacement, ...]:
    """DTensor placements of a layout of I, R and S."""
    out: list[TorchPlacement] = []
    for placement in layout:
        if placement.kind != "S":
            out.append(Replicate())
            continue
        dim = parts.dim_of(placement.part)
        outer = math.prod(parts.flat[parts.starts[dim] : placement.part])
        out.append(Shard(dim) if outer == 1 else _strided(dim, outer))
    return tuple(out)


def expressible(layout: Layout, parts: Parts, sizes: tuple[int, ...]) -> bool:
    """Can a DTensor lie like this? Each dim is cut in one part, evenly, or it has one part only."""
    cuts: dict[int, tuple[int, int]] = {}
    for placement, ranks in zip(layout, sizes, strict=True):
        if placement.kind == "P":
            return False
        if placement.kind == "S":
            dim = parts.dim_of(placement.part)
            part, n = cuts.get(dim, (placement.part, 1))
            if part != placement.part:
                return False
            cuts[dim] = (part, n * ranks)
    for dim, (part, n) in cuts.items():
        single = len([s for s in parts.dims[dim] if s > 1]) == 1
        first = math.prod(parts.flat[parts.starts[dim] : part]) == 1
        count = sum(p.kind == "S" and p.part == part for p in layout)
        if not single and (parts.flat[part] % n or (not first and count > 1)):
            return False
    return True


def _strided(dim: int, blocks: int) -> TorchPlacement:
    from torch.distributed.tensor.placement_types import _StridedShard

    checkpoint.install()
    return _StridedShard(dim, split_factor=blocks)
