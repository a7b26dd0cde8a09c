"""What a pipeline is predicted to take: the step of its schedule, simulated.

Enters: the figures of the model on one stage's devices, its seconds in parts, the cells of each stage, what stages
send. Leaves: the figures of a `Plan.predicted`.

What each micro-batch takes is shared out like the seconds of the ops, what is done once a step like those of updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost.simulate import StageTimes, simulate
from autopar.layout import largest_local_parts
from autopar.rules.analyse import Analysis
from autopar.rules.decisions import Decisions
from autopar.schedule.asynchronous import staleness, versions_kept
from autopar.schedule.table import Schedule
from autopar.solver.cut import Cell
from autopar.solver.decide import parameter_zero
from autopar.solver.sends import Send
from autopar.solver.step import Step


def predicted(
    old: Mapping[str, Any], step: Step, stages: Sequence[Sequence[Cell]], schedule: Schedule, sends: Sequence[Send]
) -> dict[str, Any]:
    """The figures for a pipeline.

    Args:    old, step: of the whole model on the devices of one stage.
    """
    parts = np.array([_sums(stage) for stage in stages]).T
    inside_s = step.compute_s + step.exposed_s + step.data_s
    times_s = parts * (inside_s / (parts.sum() or 1.0))
    updates = np.array([sum(c.update_s for c in stage) for stage in stages])
    share = updates / updates.sum() if updates.any() else times_s.sum(0) / (inside_s or 1.0)
    once_s = step.alone_s * share
    update_s = step.update_s * share + step.fixed_s * schedule.ranks / schedule.stages
    forward_s, input_s, weight_s = times_s / schedule.microbatches
    alone = StageTimes(forward_s=forward_s, input_grad_s=input_s, weight_grad_s=weight_s, optimizer_s=update_s + once_s)
    idle_s = simulate(schedule, alone).step_time_s
    step_s = simulate(schedule, with_sends(alone, sends, schedule.depth)).step_time_s
    work = (times_s.sum(0) / schedule.replicas, once_s, update_s)
    by_rank = [np.bincount(schedule.placement, np.tile(x, schedule.replicas), schedule.ranks) for x in work]
    fullest = int(np.argmax(sum(by_rank)))
    busy_s, alone_s, optimizer_s = (float(x[fullest]) for x in by_rank)
    computing = step.compute_s / inside_s if inside_s else 1.0
    bubble_s = max(0.0, idle_s - busy_s - alone_s - optimizer_s)
    ratio = old["step_time_s"] / step_s if step_s else 1.0
    return {
        **old,
        "step_time_s": step_s,
        "tokens_per_s": old["tokens_per_s"] * ratio,
        "tflops_per_device": old["tflops_per_device"] * ratio / schedule.ranks,
        "mfu": old["mfu"] * ratio / schedule.ranks,
        "breakdown_s": {
            "compute": busy_s * computing,
            "exposed_communication": busy_s * (1 - computing) + alone_s,
            "optimizer": optimizer_s,
            "bubble": bubble_s,
            "stage_sends": max(0.0, step_s - busy_s - alone_s - optimizer_s - bubble_s),
        },
        "stage_seconds": {
            "forward": forward_s.tolist(), "input_grad": input_s.tolist(), "weight_grad": weight_s.tolist(),
            "optimizer": (update_s + once_s).tolist(),
        },
        "sends": [send.to_dict() for send in sends],
        **_versions(schedule),
    }  # fmt: skip


def _sums(stage: Sequence[Cell]) -> list[float]:
    return [sum(c.forward_s for c in stage), sum(c.input_grad_s for c in stage), sum(c.weight_grad_s for c in stage)]


def with_sends(times: StageTimes, sends: Sequence[Send], stages: int) -> StageTimes:
    """The same stages with what they send to each other."""
    ahead, back = np.zeros(max(1, stages - 1)), np.zeros(max(1, stages - 1))
    skips = {}
    for send in sends:
        if send.reader == send.source + 1:
            ahead[send.source], back[send.source] = send.time_s, send.back_time_s
        else:
            skips[send.source, send.reader] = max(send.time_s, send.back_time_s)
    return replace(times, send_s=ahead, send_back_s=back, skips=skips)


def weight_bytes(
    analysis: Analysis, decisions: Decisions, sizes: tuple[int, ...], zero: int | None
) -> dict[str, float]:
    """Bytes of one rank's copy of each parameter, by node: gathered at ZeRO levels 1 and 2, else as it is stored.

    zero: the pinned level.
    """
    found = {}
    for source in analysis.program.sources:
        if source.kind == "parameter":
            stored = decisions.sources[source.node]
            used = [decisions.strategies[op].ins[at] for op, at in analysis.users.get(source.node, ())]
            once = parameter_zero(stored, used, zero) in (1, 2)
            layouts = (used or [stored]) if once else [stored]
            elements = max(largest_local_parts(analysis.parts[source.node], x, sizes).numel for x in layouts)
            found[source.node] = float(elements * analysis.dtypes[source.node].itemsize)
    return found


def _versions(schedule: Schedule) -> dict[str, Any]:
    """Of an asynchronous pipeline: versions of the weights that each stage keeps, and how stale its gradients are."""
    if not schedule.asynchronous:
        return {}
    stages = range(schedule.stages)
    return {
        "weight_versions": [versions_kept(schedule, s) for s in stages],
        "staleness": [max(staleness(schedule, s, j) for j in range(schedule.microbatches)) for s in stages],
    }
