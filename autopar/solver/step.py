"""Seconds of a step as a solution has them, with what runs beside compute.

Enters: a `Built` problem and a solution's options. Leaves: `Step`. Refused: nothing.

The solver's costs add up, so that parameters' collectives count there as if all of them were hidden: by the share that
is felt beside compute, and the first gather and last reduction, which nothing hides, in full. Here what sticks out is
added,

    felt = share x wire + (1 - share) max(wire - compute, 0)       forward and backward each

and what runs beside nothing (gathers of ZeRO 1 and 2, reductions after all micro-batches), the wait for the slowest of
many nodes, the host, when it is slower than the device, and the fixed costs of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.solver.build import Built

GATHERED = 1e-2
"""Below this share of all its seconds the forward of a transition sends nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds, which add up to the step. exposed_s: communication that compute waits for; data_s: what is felt of that
    of parameters and their gradients; alone_s: that of them before and after all micro-batches; update_s: optimizer;
    fixed_s: fixed costs.
    """

    compute_s: float
    exposed_s: float
    data_s: float
    alone_s: float
    update_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.data_s + self.alone_s + self.update_s + self.fixed_s


def step_of(built: Built, options: Sequence[int], objective_s: float) -> Step:
    """objective_s: what the options cost by the problem."""
    counts = Counter(built.representative.values())
    forward_s = compute_s = 0.0
    kernels = 0
    for name, choice in built.op_choice.items():
        price, option, count = built.op_prices[name], options[choice], counts[name]
        ahead = float(price.compute_s[option] - price.backward_s[option]) * count
        again = ahead if name in built.recomputed else 0.0
        forward_s += ahead
        compute_s += float(price.compute_s[option]) * count + again
        kernels += count * (name in built.launched)
    stored = [(built.storage_prices[n], options[c], counts[n]) for n, c in built.storage_choice.items()]
    update_s = sum(float(price.update_s[option]) * count for price, option, count in stored)
    norm_s = sum(float(price.norm_s[option]) * count for price, option, count in stored)
    fitted, share = built.software.fitted, _share(built)
    hidden_s, ahead_s, back_s, alone_s = _data_s(built, options, share)
    exposed_s = max(0.0, objective_s - compute_s - update_s - hidden_s - alone_s)
    beside = (ahead_s, forward_s), (back_s, compute_s - forward_s)
    data_s = hidden_s + (1 - share) * sum(max(wire - compute, 0.0) for wire, compute in beside)
    host_s = fitted.host_kernel_s * kernels * (3 if built.analysis.program.training else 1)
    nodes = math.prod(built.mesh.topology.shape[:-1])
    late = 1 + fitted.straggler_fraction * math.log2(nodes)
    return Step(max(compute_s, host_s) * late, exposed_s * late, data_s, alone_s, update_s + norm_s, fitted.step_s)


def with_idle_cores(predicted: Mapping[str, Any], crowding: float) -> dict[str, Any]:
    """The figures of a pipeline whose ranks share cores: while some wait, the others are faster.

    crowding: as in `Profile`, at which the figures were made, with all ranks at work. A step takes the time of all work
    on all cores, or that of the longest wait when each rank has a core of its own.
    """
    parts = predicted["breakdown_s"]
    busy_s = predicted["step_time_s"] - parts["bubble"]
    step_s = max(busy_s, predicted["step_time_s"] / crowding)
    faster = predicted["step_time_s"] / step_s if step_s else 1.0
    rates = {name: predicted[name] * faster for name in ("tokens_per_s", "tflops_per_device", "mfu")}
    return {**predicted, **rates, "step_time_s": step_s, "breakdown_s": {**parts, "bubble": step_s - busy_s}}


def _share(built: Built) -> float:
    return built.software.fitted.overlap_slowdown if built.software.overlap else 1.0


def _data_s(built: Built, options: Sequence[int], share: float) -> tuple[float, float, float, float]:
    """Seconds of parameters' collectives: what the problem has of those beside compute, on the wire in the forward, and
    in the backward; and of those beside nothing.
    """
    total = forward = backward = alone = 0.0
    for stored in built.stored_edges:
        edge = built.problem.edges[stored.edge]
        row = stored.rows[edge.source_layout[options[edge.source]]]
        column = stored.columns[edge.target_layout[options[edge.target]]]
        if row != column:
            cost_s, ahead_s = (
                x * stored.count for x in (stored.routing.between(row, column), stored.routing.forward_s(row, column))
            )
            gathers = ahead_s / share > GATHERED * cost_s
            wire = stored.routing.wire
            if wire.alone or (wire.after and not gathers):
                alone += cost_s
                continue
            once = ahead_s / share
            shown = wire.shown if gathers else 0.0
            reduced = max(0.0, cost_s - stored.forwards * ahead_s - shown * once) / (share + shown)
            total += cost_s
            forward += once
            backward += reduced + (stored.forwards - 1) * once
    return total, forward, backward, alone


def passing_bytes(built: Built, options: Sequence[int]) -> float:
    """What of the memory row is no activation: gathered parameters, and what a loss needs while it runs."""
    total = sum(float(size[options[built.op_choice[name]]]) for name, size in built.loss_bytes.items())
    for stored in built.stored_edges:
        edge = built.problem.edges[stored.edge]
        if edge.memory_bytes is not None:
            at = edge.source_layout[options[edge.source]], edge.target_layout[options[edge.target]]
            total += float(edge.memory_bytes[at])
    return total
