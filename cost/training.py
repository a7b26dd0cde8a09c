"""Seconds of one training step of a transformer under a printed configuration.

Enters: a `Run`: sizes, degrees, schedule, and where it runs. Leaves: a `StepTime` with its parts.
Refused, with a `PlanError`: degrees that do not multiply to the devices, fewer layers than stages, unknown schedules.

    stage    sum over its layers of forward, input gradient and weight gradient (`transformer`), collectives of tensor
             and context parallelism in line, what recompute runs again
    step     (m - 1) slowest stage + all stages once        1F1B and GPipe with m micro-batches
             m slowest + (p - 1)/v of a stage               interleaved over v chunks
             m slowest + what the schedule leaves idle      zero bubble
    then     gradients reduced and parameters gathered over the data axis, hidden behind compute where they can be;
             the optimizer's traffic; fixed costs of a step

A hidden collective still costs a share, `overlap_slowdown`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost.collective import collective_s
from autopar.cost.compute import memory_bound_s
from autopar.cost.fitted import FITTED, Fitted
from autopar.cost.hardware import Profile
from autopar.cost.layer_time import Pass, embedding, head, layer
from autopar.cost.transformer import ELEMENT_BYTES, Shard, Transformer
from autopar.errors import PlanError
from autopar.mesh import Axis, Mesh, factor_axes

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-2p", "zb-v")


@dataclass(frozen=True, slots=True)
class Run:
    """One training configuration.

    nodes, devices: topology. tp, pp, cp, dp, ep: degrees, ep inside dp. zero: 0 to 3. sp: sequence parallel.
    micro_sequences: of a micro-batch of one data-parallel rank. microbatches: a step and rank. schedule: of
    `SCHEDULES`.
    virtual: chunks a stage. recompute: "none", "selective" or "full". precision: of the products. flash, dropout: as in
    `Shard`. reduce_bytes: width of a reduced gradient. stage_layers: layers of each of pp * virtual chunks.
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
    recompute: str = "none"
    precision: str = "bf16"
    attention: str = "flash"
    fused: bool = False
    dropout: bool = False
    reduce_bytes: int = 4
    stage_layers: tuple[int, ...] = ()

    @property
    def shard(self) -> Shard:
        return Shard(
            self.micro_sequences,
            self.tp,
            self.cp,
            self.ep,
            self.sp,
            self.precision,
            self.attention,
            self.fused,
            self.dropout,
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step and its parts, which add up to it.

    compute_s: of the slowest stage, all micro-batches. exposed_s: collectives in line. bubble_s: waiting of the slowest
    stage. reduce_s: of data parallelism, where it shows. update_s: optimizer and fixed costs.
    """

    compute_s: float
    exposed_s: float
    bubble_s: float
    reduce_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.reduce_s + self.update_s


@functools.lru_cache(maxsize=4096)
def axes_of(nodes: int, devices: int, degrees: tuple[tuple[str, int], ...]) -> Mapping[str, Axis]:
    """The axis of each degree, nearest devices first in the order tp, cp, ep, dp, pp; size 1 where there is none."""
    mesh = factor_axes(Mesh((nodes, devices)), {k: v for k, v in degrees if v > 1})
    found = {axis.role: axis for axis in mesh.axes}
    return {name: found.get(name) or Axis(name, 1, None, (), 1) for name, _ in degrees}


def step_time(run: Run, fitted: Fitted = FITTED) -> StepTime:
    """Seconds of one step. Raises: PlanError: see the module."""
    if run.tp * run.pp * run.cp * run.dp != run.nodes * run.devices:
        raise PlanError(
            f"tp x pp x cp x dp = {run.tp} x {run.pp} x {run.cp} x {run.dp} is not {run.nodes * run.devices} devices"
        )
    if run.schedule not in SCHEDULES:
        raise PlanError(f"schedule '{run.schedule}' has no closed form here; known are {', '.join(SCHEDULES)}")
    profile = run.profile
    axes = axes_of(run.nodes, run.devices, (("tp", run.tp), ("cp", run.cp), ("ep", 1), ("dp", run.dp), ("pp", run.pp)))
    pieces = _Pieces.of(run, axes, profile, fitted)
    stages = [_Stage.of(run, i, axes, profile, fitted, pieces) for i in range(run.pp)]
    m = run.microbatches
    slowest = max(stages, key=lambda s: s.micro_s)
    bubble = _bubble_s(run, stages, slowest)
    compute = m * slowest.compute_s
    exposed = m * slowest.exposed_s
    fullest = max(stages, key=lambda s: s.parameters)
    reduce_s = _reduce_s(run, fullest, axes, profile, fitted)
    update = _update_s(run, fullest, profile, fitted)
    noise = fitted.straggler_fraction * math.log2(max(run.nodes, 1))
    return StepTime(compute * (1 + noise), exposed * (1 + noise), bubble * (1 + noise), reduce_s, update)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Seconds of one layer of each kind, of the embedding and of the head; collectives and sends."""

    layers: tuple[tuple[float, Pass, float, float, float], ...]
    """(share of the layers, seconds, collectives forward and backward, parameters) of each kind of layer."""
    embedding: Pass
    head: Pass
    embedding_wire_s: float
    head_wire_s: float
    near_send_s: float
    far_send_s: float
    near: int
    """Neighbouring stages that are inside one node."""

    @staticmethod
    def of(run: Run, axes: Mapping[str, Axis], profile: Profile, fitted: Fitted) -> _Pieces:
        model, shard = run.model, run.shard
        kinds = []
        for moe, share in _kinds(model):
            if not share:
                continue
            one = layer(model, shard, profile, fitted, moe)
            forward, backward = _layer_collectives(run, one, axes, profile, fitted, moe)
            experts = model.experts if moe else 1
            body = model.layer_parameters(moe) - experts * model.expert_parameters
            kinds.append((share, one, forward, backward, (body + experts * model.expert_parameters / run.ep) / run.tp))
        whole = shard.tokens(model) * model.hidden * ELEMENT_BYTES
        near_s = far_s = 0.0
        near = 1
        if run.pp > 1:
            inside = [n for level, n in axes["pp"].spans if level == 0]
            near = inside[0] if inside else 1
            size = whole / run.tp
            near_s = size / profile.link(0).bandwidth_bytes_per_s + fitted.send_sync_s
            # pipelines that cross nodes side by side share what the node has; one alone has at most one port
            sharing = run.devices / near
            link = profile.link(1)
            rate = min(
                link.bandwidth_bytes_per_s * run.devices / sharing, max(link.bandwidth_bytes_per_s, PORT_BYTES_PER_S)
            )
            far_s = size / rate + fitted.send_sync_s
        kind = "reduce_scatter" if run.sp else "all_reduce"
        return _Pieces(
            tuple(kinds),
            embedding(model, shard, profile),
            head(model, shard, profile, fitted),
            _in_line(kind, whole, axes["tp"], profile, fitted),
            _in_line("all_reduce", whole, axes["tp"], profile, fitted),
            near_s,
            far_s,
            near,
        )

    def send_s(self, index: int) -> float:
        """From stage index - 1 to stage index."""
        return self.far_send_s if index % self.near == 0 else self.near_send_s


PORT_BYTES_PER_S = 12.5e9


@dataclass(frozen=True, slots=True)
class _Stage:
    """Seconds of one stage for one micro-batch, and its parameters on one rank."""

    forward_s: float
    input_s: float
    weight_s: float
    exposed_s: float
    parameters: float
    layers: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    @property
    def micro_s(self) -> float:
        return self.compute_s + self.exposed_s

    @staticmethod
    def of(run: Run, index: int, axes: Mapping[str, Axis], profile: Profile, fitted: Fitted, pieces: _Pieces) -> _Stage:
        model = run.model
        count = chunk_layers(run, index)
        first, last = index == 0, index == run.pp - 1
        if run.schedule == "zb-v":  # the V folds back: the first rank has the head too
            last = first
        total, again, exposed, parameters = Pass(), 0.0, 0.0, 0.0
        for share, one, forward, backward, weights in pieces.layers:
            n = count * share
            rerun = {"none": 0.0, "selective": one.attention_s, "full": one.forward_s}[run.recompute]
            total += Pass(n * one.forward_s, n * one.input_s, n * one.weight_s)
            again += n * rerun
            exposed += n * (forward + backward + (forward if run.recompute == "full" else 0.0))
            parameters += n * weights
        if first:
            total += pieces.embedding
            parameters += (model.embedding_parameters + model.positions * model.hidden) / run.tp
            exposed += pieces.embedding_wire_s
        if last:
            total += pieces.head
            exposed += pieces.head_wire_s
            if not (first and model.tied):
                parameters += model.embedding_parameters / run.tp
        if run.pp > 1:
            before = pieces.send_s(index) if index or run.virtual > 1 else 0.0
            after = pieces.send_s(index + 1) if not index == run.pp - 1 or run.virtual > 1 else 0.0
            exposed += run.virtual * (before + after)
        accumulate = _accumulate_s(run, parameters, profile, fitted) if run.microbatches > 1 else 0.0
        return _Stage(total.forward_s, total.input_s + again, total.weight_s + accumulate, exposed, parameters, count)


def _kinds(model: Transformer) -> list[tuple[bool, float]]:
    """(has experts, share of the layers)."""
    if model.experts == 1:
        return [(False, 1.0)]
    share = sum(model.has_experts(i) for i in range(model.layers)) / model.layers
    return [(True, share), (False, 1 - share)]


def chunk_layers(run: Run, index: int) -> float:
    if not run.stage_layers:
        return run.model.layers / run.pp
    return float(sum(run.stage_layers[index :: run.pp]))


def _in_line(kind: str, size_bytes: float, axis: Axis, profile: Profile, fitted: Fitted) -> float:
    """Seconds of a collective that compute waits for."""
    return 0.0 if axis.size == 1 else collective_s(kind, size_bytes, axis, profile) + fitted.collective_sync_s


def _layer_collectives(
    run: Run, one: Pass, axes: Mapping[str, Axis], profile: Profile, fitted: Fitted, moe: bool
) -> tuple[float, float]:
    """Seconds of a layer's collectives in line, forward and backward."""
    model, shard = run.model, run.shard
    whole = shard.tokens(model) * model.hidden * ELEMENT_BYTES
    if run.sp:
        pair = sum(_in_line(kind, whole, axes["tp"], profile, fitted) for kind in ("all_gather", "reduce_scatter"))
        forward, backward = 2 * pair, 2 * pair
    else:
        forward = backward = 2 * _in_line("all_reduce", whole, axes["tp"], profile, fitted)
    if run.cp > 1:
        kv = 2 * shard.tokens(model) * max(model.kv_heads / run.tp, 1) * model.head_size * ELEMENT_BYTES
        ring = (run.cp - 1) * (collective_s("send", kv, axes["cp"], profile) + fitted.collective_sync_s)
        forward += max(ring - one.attention_s, 0.0) + fitted.overlap_slowdown * ring
        backward += max(2 * ring - 2.5 * one.attention_s, 0.0) + fitted.overlap_slowdown * 2 * ring
    if moe and run.ep > 1:
        routed = whole / run.tp * model.top_k
        ep = _inner(axes["dp"], run.ep)
        pair = 2 * _in_line("all_to_all", routed, ep, profile, fitted)
        forward, backward = forward + pair, backward + pair
    return forward, backward


def _inner(axis: Axis, size: int) -> Axis:
    """The nearest `size` ranks of an axis."""
    spans, left = [], size
    for level, ranks in axis.spans:
        part = math.gcd(left, ranks)
        if part > 1:
            spans.append((level, part))
            left //= part
    if left != 1:
        raise PlanError(f"ep={size} does not divide the data axis of {axis.size}")
    return replace(axis, size=size, spans=tuple(spans))


def _bubble_s(run: Run, stages: list[_Stage], slowest: _Stage) -> float:
    if run.pp == 1:
        return 0.0
    others = sum(s.micro_s for s in stages) - slowest.micro_s
    mean = others / (run.pp - 1)
    if run.schedule in ("none", "gpipe", "1f1b"):
        return others
    if run.schedule == "interleaved-1f1b":
        return others / run.virtual
    if run.schedule == "zb-h1":
        return others - (run.pp - 1) * 2 * sum(s.weight_s for s in stages) / run.pp
    # ZB-2p and ZB-V fill what is left unless the halves differ more than they can move.
    return max(0.0, mean)


def _accumulate_s(run: Run, parameters: float, profile: Profile, fitted: Fitted) -> float:
    """Adding a micro-batch's weight gradient to the sum: read both, write one."""
    return fitted.accumulate_fraction * memory_bound_s(parameters * (2 + 2 * run.reduce_bytes), profile)


def _reduce_s(run: Run, stage: _Stage, axes: Mapping[str, Axis], profile: Profile, fitted: Fitted) -> float:
    """What of the data axis' collectives the step feels."""
    axis = axes["dp"]
    if run.dp * run.cp == 1:
        return 0.0
    if axis.size == 1:
        axis = axes["cp"]
    gradients, weights = stage.parameters * run.reduce_bytes, stage.parameters * ELEMENT_BYTES
    pieces = max(int(stage.layers), 1)

    def wire(kind: str, size: float, times: int) -> float:
        return times * collective_s(kind, size / times, axis, profile)

    m = run.microbatches
    if run.zero >= 3 or (run.zero == 2 and run.pp == 1):
        gather = wire("all_gather", weights, pieces)
        scatter = wire("reduce_scatter", gradients, pieces)
        regather = gather if run.zero == 3 else 0.0
        once = gather if run.zero == 2 else 0.0
        forward, backward = stage.forward_s, stage.input_s + stage.weight_s
        micro = 0.0
        if run.zero == 3:
            micro += _felt(forward, gather, fitted)
        micro += _felt(backward, regather + scatter, fitted)
        edges = (gather + scatter) / pieces
        return m * micro + once + edges
    if run.zero == 0:
        gather, scatter = 0.0, wire("all_reduce", gradients, pieces)
    else:
        gather, scatter = wire("all_gather", weights, pieces), wire("reduce_scatter", gradients, pieces)
    if run.pp > 1:
        return gather + scatter
    return gather + scatter


def _felt(compute_s: float, wire_s: float, fitted: Fitted) -> float:
    """What is felt of a collective beside compute: what sticks out, and a share of what is hidden."""
    return max(wire_s - compute_s, 0.0) + fitted.overlap_slowdown * min(wire_s, compute_s)


def _update_s(run: Run, stage: _Stage, profile: Profile, fitted: Fitted) -> float:
    shards = run.dp if run.zero else 1
    local = stage.parameters / shards
    # gradient, master, two moments read; master and moments written; the copy for compute; norm and clearing
    traffic = 4 * 4 + 3 * 4 + 2 + 3 * run.reduce_bytes
    return memory_bound_s(local * traffic, profile) + fitted.step_s
