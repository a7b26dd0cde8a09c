"""The arguments of `parallelize` and `plan`, checked once.

What enters: what the user passed. What leaves: a frozen `Request`. Refused, with one line that names the argument:
    unknown words, pins
that no plan can hold, a mesh that is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autopar.cost.hardware import Profile, load_profile
from autopar.cost.memory import usable_bytes
from autopar.cost.offload import check_host
from autopar.dump import Dump
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.pins import Pins, parse_pins
from autopar.precision import Precision, parse_precision
from autopar.solver.settings import Settings

BACKENDS = ("auto", "eager", "aot", "inductor")
KERNELS = ("auto", "on", "off")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `parallelize` and `plan`, checked."""

    topology: Mesh
    profile: Profile
    settings: Settings
    outputs: str
    strict: bool
    discover: bool
    dump: Dump | None
    """Where every stage is written; on rank 0 only, and logged everywhere."""
    backend: str = "eager"
    recompute: tuple[str, ...] = RECOMPUTE
    """Levels of recomputation that may be chosen; of the eager backend "none" only."""
    precision: Precision | None = None
    kernels: str = "auto"


def make_request(
    mesh: Any,
    pin: Mapping[str, Any] | None,
    memory: Any,
    precision: Any,
    optimizer: str | int,
    outputs: str,
    batch_dims: Mapping[str, int] | None,
    backend: str,
    strict: bool,
    discover: bool,
    dump_dir: str | None,
    kernels: str = "auto",
) -> Request:
    if kernels not in KERNELS:
        raise PlanError(f"kernels={kernels!r}: must be one of {', '.join(KERNELS)}")
    if backend not in BACKENDS:
        raise PlanError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    topology, pinned = topology_of(mesh)
    pins = parse_pins({**pinned, **(pin or {})})
    profile = load_profile(topology.device).shared_by(topology.levels[0])
    check_data_axis(pins, topology)
    if pins.given.get("offload", "none") != "none":
        check_host(profile)
    asked = parse_precision(precision)
    name = asked.name if asked is not None else None
    kind = "aot" if backend == "auto" else backend
    chunks = pins.given.get("loss_chunks", 1)
    if chunks > 1 and kind != "aot":
        raise PlanError(
            f"pin loss_chunks={chunks}: backend {kind!r} makes logits whole; only 'aot' makes them in chunks"
        )
    settings = Settings(pins, usable_bytes(profile, memory), optimizer, name, batch_dims, chunked=kind == "aot")
    dump = _dump(dump_dir)
    return Request(topology, profile, settings, outputs, strict, discover, dump, kind, precision=asked, kernels=kernels)


def _dump(directory: str | None) -> Dump | None:
    first = not dist.is_initialized() or dist.get_rank() == 0
    return Dump(directory) if first else None


def check_data_axis(pins: Pins, topology: Mesh) -> None:
    """ZeRO needs an axis to shard over: one of data parallelism, or a free one."""
    other = 1
    for role, degree in pins.degrees.items():
        other *= degree if role not in ("dp", "cp") else 1
    if pins.zero and topology.size // other == 1:
        raise PlanError(
            f"pin zero={pins.zero}: ZeRO shards over data axes, and the pins {dict(pins.given)} leave none on a "
            f"mesh of {topology.size}"
        )


def topology_of(mesh: Any) -> tuple[Mesh, dict[str, int]]:
    if isinstance(mesh, Mesh):
        return mesh, {}
    if isinstance(mesh, (str, int)):
        return Mesh(mesh), {}
    if hasattr(mesh, "mesh_dim_names"):
        return Mesh.from_device_mesh(mesh)
    raise MeshError(f"a mesh is an autopar.Mesh or a torch DeviceMesh, not {type(mesh).__name__}")
