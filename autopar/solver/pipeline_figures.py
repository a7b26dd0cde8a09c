"""What a pipeline is predicted to take: the step of its schedule, simulated.

Enters: the plan of one stage's devices, seconds by stage, what stages send. Leaves: the figures of a `Plan.predicted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost.simulate import StageTimes, simulate
from autopar.layout import largest_local_parts
from autopar.plan import Plan
from autopar.rules.analyse import Analysis
from autopar.rules.decisions import Decisions
from autopar.schedule.asynchronous import staleness, versions_kept
from autopar.schedule.table import Schedule
from autopar.solver.sends import Send


def predicted(plan: Plan, seconds: Sequence[float], schedule: Schedule, sends: Sequence[Send]) -> dict[str, Any]:
    """The inner plan's figures for a pipeline.

    Args:    seconds: of a whole batch by stage.
    """
    old = dict(plan.predicted)
    total = sum(seconds) or 1.0
    seconds = [s * old["step_time_s"] / total for s in seconds]  # moves between ops are shared out like the ops
    third = np.array(seconds) / schedule.microbatches / 3  # forward, and the two halves of the backward
    alone = StageTimes(forward_s=third, input_grad_s=third, weight_grad_s=third)
    timeline = simulate(schedule, alone)
    calls = timeline.schedule.microbatches // schedule.microbatches  # an asynchronous timeline is of several
    rank_s = float(timeline.busy_s.max()) / calls
    step = simulate(schedule, with_sends(alone, sends, schedule.depth)).step_time_s
    ratio = old["step_time_s"] / step if step else 1.0
    share = rank_s / old["step_time_s"] if old["step_time_s"] else 1.0
    parts = {k: v * share for k, v in old["breakdown_s"].items()}
    bubble = max(0.0, timeline.step_time_s - rank_s)
    return {
        **old,
        "step_time_s": step,
        "tokens_per_s": old["tokens_per_s"] * ratio,
        "tflops_per_device": old["tflops_per_device"] * ratio / schedule.ranks,
        "mfu": old["mfu"] * ratio / schedule.ranks,
        "breakdown_s": {**parts, "bubble": bubble, "stage_sends": max(0.0, step - rank_s - bubble)},
        "sends": [send.to_dict() for send in sends],
        **_versions(schedule),
    }


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


def weight_bytes(plan: Plan, analysis: Analysis, decisions: Decisions, sizes: tuple[int, ...]) -> dict[str, float]:
    """Bytes of one rank's copy of each parameter, by node: gathered at ZeRO levels 1 and 2, else as it is stored."""
    found = {}
    for source in analysis.program.sources:
        if source.kind == "parameter":
            layouts = [decisions.sources[source.node]]
            if plan.params[source.path]["zero"] in (1, 2):
                layouts = [decisions.strategies[op].ins[at] for op, at in analysis.users[source.node]] or layouts
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
