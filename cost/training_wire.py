"""Seconds of the communication of a training step that its compute waits for.

Enters: a `Run`, seconds of its layers (`Pass`). Leaves: seconds of a layer's collectives, of pipeline sends, of the
data axis. Refused, with a `PlanError`: an expert degree that does not divide the data axis.

What runs beside compute is felt where it sticks out, and in a share of what is hidden (`Fitted.overlap_slowdown`).
Neighbouring stages inside a node send over its links. Pipelines that leave a node side by side share what the node has;
a lone one has at most one port.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost.collective import collective_s
from autopar.cost.fitted import Fitted
from autopar.cost.layer_time import Pass
from autopar.cost.op_time import felt_s
from autopar.cost.training_run import Run, merge
from autopar.cost.transformer import ELEMENT_BYTES
from autopar.errors import PlanError
from autopar.mesh import Axis

PORT_BYTES_PER_S = 12.5e9
"""[spec] a network port of 100 Gb/s: what a lone device reaches where a node shares fewer or slower ports."""

BUCKET_PARAMETERS, RANK_PARAMETERS = 40e6, 1e6
"""[spec] parameters of a bucket of gradients that are reduced once a step, and the least of them a rank: what
Megatron-LM's documentation of its distributed data parallelism gives as defaults."""


def in_line_s(run: Run, kind: str, size_bytes: float, axis: Axis, fitted: Fitted) -> float:
    """Seconds of a collective that compute waits for."""
    return 0.0 if axis.size == 1 else collective_s(kind, size_bytes, axis, run.profile) + fitted.collective_sync_s


def activation_message_bytes(run: Run) -> float:
    """Bytes of the hidden states of one micro-batch."""
    return run.shard.tokens(run.model) * run.model.hidden * ELEMENT_BYTES


def layer_s(run: Run, one: Pass, fitted: Fitted, moe: bool) -> tuple[float, float]:
    """Seconds of a layer's collectives, forward and backward. one: the layer's compute."""
    axes, whole = run.axes, activation_message_bytes(run)
    if run.sp:
        pair = sum(in_line_s(run, kind, whole, axes["tp"], fitted) for kind in ("all_gather", "reduce_scatter"))
        forward = backward = 2 * pair
        if run.overlap:  # each in pieces that run beside those of the product it feeds or follows
            forward = felt_s(one.forward_s - one.attention_s, forward, fitted)
            backward = felt_s(one.input_s, backward, fitted)
    else:
        forward = backward = 2 * in_line_s(run, "all_reduce", whole, axes["tp"], fitted)
    if run.cp > 1:  # keys and values go round while attention works on those that have come
        model = run.model
        kv = 2 * run.shard.tokens(model) * max(model.kv_heads / run.tp, 1) * model.head_size * ELEMENT_BYTES
        ring = (run.cp - 1) * in_line_s(run, "send", kv, axes["cp"], fitted)
        forward += felt_s(one.attention_s, ring, fitted)
        backward += felt_s(2.5 * one.attention_s, 2 * ring, fitted)
    if moe and run.ep > 1:
        routed = whole / run.tp * run.model.top_k
        pair = 2 * in_line_s(run, "all_to_all", routed, _expert_axis(run), fitted)
        forward, backward = forward + pair, backward + pair
    return forward, backward


@dataclass(frozen=True, slots=True)
class Sends:
    """Seconds of one send between neighbouring stages, inside a node and to the next one. ranks: along the pipeline;
    stages beyond the last rank begin again at the first."""

    ranks: Axis
    near_s: float
    far_s: float

    @staticmethod
    def of(run: Run, fitted: Fitted) -> Sends:
        ranks = run.axes["pp"]
        near = math.prod(n for level, n in ranks.spans if level == 0)
        size = activation_message_bytes(run) / run.tp
        inside, link = run.profile.link(0).among(2), run.profile.link(1)
        alone = max(link.bandwidth_bytes_per_s, PORT_BYTES_PER_S)
        rate = min(link.bandwidth_bytes_per_s * near, alone)
        return Sends(ranks, *(size / r + fitted.send_sync_s for r in (inside.bandwidth_bytes_per_s, rate)))

    def into_s(self, stage: int) -> float:
        """From the stage before to this one."""
        way = self.ranks.between((stage - 1) % self.ranks.size, stage % self.ranks.size)
        return self.far_s if any(level > 0 for level, _ in way.spans) else self.near_s


def data_s(run: Run, stage: int, forward_s: float, backward_s: float, fitted: Fitted) -> float:
    """What a step feels of the data axis' collectives of a stage.

    forward_s, backward_s: seconds of the stage's compute for one micro-batch. Collectives are one a layer, or fewer,
    so that none is small. ZeRO-3
    gathers and reduces in every micro-batch, ZeRO-2 as in FSDP reduces in every one; the first gather and the last
    reduction have nothing to hide behind. Else gradients are reduced, and weights gathered, once a step.
    """
    axis = run.axes["data"]
    if axis.size == 1:
        return 0.0
    if run.zero == 3 and run.flat_ring and len(axis.spans) > 1:
        axis = Axis("data", axis.size, None, ((axis.spans[-1][0], axis.size),), 1)
    weights = run.weights(stage)
    pieces = max(int(run.layers(stage)), 1)
    if not run.sharded_trainer:
        pieces = max(min(pieces, round(weights / max(BUCKET_PARAMETERS, RANK_PARAMETERS * axis.size))), 1)

    def wire(kind: str, size_bytes: float) -> float:
        return float(pieces * collective_s(kind, size_bytes / pieces, axis, run.profile))

    gather = wire("all_gather", weights * ELEMENT_BYTES)
    scatter = wire("reduce_scatter", weights * run.reduce_bytes)
    if run.sharded_trainer:
        again, once = (gather, 0.0) if run.zero == 3 else (0.0, gather)
        if not run.prefetch:
            return run.microbatches * (2 * again + scatter) + once
        micro = felt_s(forward_s, again, fitted) + felt_s(backward_s, again + scatter, fitted)
        return run.microbatches * micro + once + (gather + scatter) / pieces
    if run.zero == 0:
        gather, scatter = 0.0, wire("all_reduce", weights * run.reduce_bytes)
    if run.overlap:  # beside the first forward and the last backward
        return felt_s(forward_s, gather, fitted) + felt_s(backward_s, scatter, fitted)
    return gather + scatter


def _expert_axis(run: Run) -> Axis:
    """The nearest `ep` ranks of the data axis; where they do not divide it, of tp and data together."""
    axes = run.axes
    for axis in (axes["dp"], axes["data"], merge("stage", axes["tp"], axes["data"])):
        spans, left = [], run.ep
        for level, ranks in axis.spans:
            part = math.gcd(left, ranks)
            if part > 1:
                spans.append((level, part))
                left //= part
        if left == 1:
            return Axis("ep", run.ep, None, tuple(spans), 1)
    raise PlanError(f"ep={run.ep} does not divide the {run.tp * run.cp * run.dp} ranks of a stage")
