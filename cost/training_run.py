"""One training configuration of a transformer, as publications print it.

Enters: sizes, degrees, schedule, precision, and the machine. Leaves: a frozen `Run`, and the axes of its degrees.
Refused, with a `PlanError` that has the numbers: degrees that do not multiply to the devices, unknown schedules and
recompute policies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.hardware import Profile
from autopar.cost.transformer import Shard, Transformer
from autopar.errors import PlanError
from autopar.mesh import Axis, Mesh, factor_axes

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Run:
    """One training configuration.

    Fields:  nodes, devices: of the machine, and a node. racks: groups of nodes with a faster link inside.
             micro_sequences: of a micro-batch of one data-parallel rank. microbatches: of a step and rank.
             tp, pp, cp, dp, ep: degrees; ep lies inside dp. zero: 0 to 3. sp: Megatron's sequence parallelism.
             schedule: one of `SCHEDULES`. virtual: chunks a stage. stage_layers: layers of each of the pp * virtual
             chunks (pp where the schedule has none); () is even.
             recompute: one of `RECOMPUTE`. precision: of the products. attention, fused, dropout: as in `Shard`.
             reduce_bytes: width of a reduced gradient. apart: 16-bit gradients are kept beside the fp32 sum of them.
             widened: 16-bit gradients are copied to fp32 for the update.
             overlap: collectives of tensor and data parallelism, and sends between chunks, run beside compute.
             reduce_each: ZeRO-2 without a pipeline reduces gradients in every micro-batch, as FSDP does.
             moment_bytes: of the optimizer a parameter, beside the master weights: 8 with Adam's two moments.
             waits: the host waits for the device at each recomputed layer.
             prefetch: ZeRO-3 gathers the next layer, and reduces the last one, beside compute. flat_ring: its rings
             cross nodes at every hop, so that each device's port carries the whole buffer.
    Raises:  PlanError: see the module.
    """

    model: Transformer
    profile: Profile
    nodes: int
    devices: int
    micro_sequences: float
    microbatches: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0
    sp: bool = False
    schedule: str = "none"
    virtual: int = 1
    stage_layers: tuple[int, ...] = ()
    recompute: str = "none"
    precision: str = "bf16"
    attention: str = "flash"
    fused: bool = False
    dropout: bool = False
    reduce_bytes: int = 4
    apart: bool = False
    widened: bool = False
    overlap: bool = False
    waits: bool = False
    prefetch: bool = True
    flat_ring: bool = False
    racks: int = 1
    reduce_each: bool = True
    moment_bytes: float = 8

    def __post_init__(self) -> None:
        devices, product = self.nodes * self.devices, self.tp * self.pp * self.cp * self.dp
        if product != devices:
            raise PlanError(
                f"tp x pp x cp x dp = {self.tp} x {self.pp} x {self.cp} x {self.dp} is {product}, not the "
                f"{devices} devices of {self.nodes} nodes"
            )
        for name, value, known in (
            ("schedule", self.schedule, SCHEDULES),
            ("recompute", self.recompute, RECOMPUTE),
        ):
            if value not in known:
                raise PlanError(f"{name} '{value}' is none of {', '.join(known)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The topology, slowest level first."""
        inside = (self.nodes // self.racks, self.devices)
        return inside if self.racks == 1 else (self.racks, *inside)

    @property
    def sharded_trainer(self) -> bool:
        """Parameters are stored in shards, and each layer is gathered where it is used: ZeRO-2 and 3 as in FSDP."""
        return self.zero >= (2 if self.reduce_each else 3) and self.pp == 1

    @property
    def folded(self) -> bool:
        """The stages run down the ranks and up again, so that the first rank has the head too."""
        return self.schedule in ("zb-v", "dualpipe-v")

    @property
    def shard(self) -> Shard:
        return Shard(
            self.micro_sequences, self.tp, self.cp, self.ep, self.sp, self.precision, self.attention, self.fused,
            self.dropout,
        )  # fmt: skip

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The axis of each degree, nearest devices first in the order tp, cp, dp, pp; size 1 where there is none.

        "data" is cp and dp together: the ranks that hold the same weights.
        """
        return _axes(self.shape, self.tp, self.cp, self.dp, self.pp)

    def layers(self, stage: int) -> float:
        """Layers of a stage, all of its chunks."""
        if not self.stage_layers:
            return self.model.layers / self.pp
        return float(sum(self.stage_layers[stage :: self.pp]))

    @property
    def kinds(self) -> tuple[tuple[bool, float], ...]:
        """(has experts, share of the layers) of each kind of layer."""
        return _kinds(self.model)

    def layer_weights(self, moe: bool) -> float:
        """Parameters of a layer on one rank."""
        model = self.model
        rest = model.layer_parameters(False) - model.expert_parameters
        return (rest + model.expert_parameters * (model.experts / self.ep if moe else 1)) / self.tp

    def weights(self, stage: int) -> float:
        """Parameters of a stage on one rank, embedding and head included."""
        model, table = self.model, self.model.embedding_parameters / self.tp
        first, last = stage == 0, stage == (0 if self.folded else self.pp - 1)
        total = self.layers(stage) * sum(share * self.layer_weights(moe) for moe, share in self.kinds)
        total += table + model.positions * model.hidden if first else 0.0
        return total + (table if last and not (first and model.tied) else 0.0)


@functools.lru_cache(maxsize=4096)
def _kinds(model: Transformer) -> tuple[tuple[bool, float], ...]:
    share = sum(map(model.has_experts, range(model.layers))) / model.layers
    return tuple((moe, part) for moe, part in ((True, share), (False, 1 - share)) if part)


@functools.lru_cache(maxsize=4096)
def _axes(shape: tuple[int, ...], tp: int, cp: int, dp: int, pp: int) -> Mapping[str, Axis]:
    degrees = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    laid = {axis.role: axis for axis in factor_axes(Mesh(shape), {k: v for k, v in degrees.items() if v > 1}).axes}
    found = {name: laid.get(name) or Axis(name, 1, None, (), 1) for name in degrees}
    return {**found, "data": merge("data", found["cp"], found["dp"])}


def merge(name: str, *axes: Axis) -> Axis:
    """One axis of all ranks of several."""
    ranks: dict[int, int] = {}
    for level, n in (span for axis in axes for span in axis.spans):
        ranks[level] = ranks.get(level, 1) * n
    return Axis(name, math.prod(ranks.values()), None, tuple(sorted(ranks.items())), 1)
