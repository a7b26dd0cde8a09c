"""`autopar simulate`: one step of a plan, run in the event simulator from the figures that the plan holds.

Enters: a `Plan`. Leaves: `Simulated`: its timeline, seconds and bytes by stage, as JSON data and as a table.
Refused, with a `PlanError`: a plan whose stages do not fit its schedule.

A plan of a pipeline says what each of its stages takes. One without stages (or made before plans said so) prices each
op for a whole batch, forward and backward together, and collectives, optimizer and memory for the slowest stage. Then
an op's seconds go to the stage that runs it, a micro-batch takes its share of them, and of a training step a third each
goes to forward, input gradient and weight gradient (a quarter, twice that and a quarter where all is recomputed). What
is exposed of collectives, and the optimizer, are shared out like the ops' seconds.
Sends between stages take what the plan says of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost.picture import summary
from autopar.cost.simulate import StageTimes, simulate
from autopar.cost.timeline import Floats, Held, Timeline
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.schedule import Schedule, build
from autopar.schedule.asynchronous import staleness
from autopar.schedule.check import check
from autopar.solver.pipeline_figures import with_sends
from autopar.solver.sends import Send

if TYPE_CHECKING:
    from rich.console import RenderableType

THIRDS = (1 / 3, 1 / 3, 1 / 3)
RECOMPUTED = (1 / 4, 1 / 2, 1 / 4)


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """A plan's step.

    Fields:  forward_s, input_grad_s, weight_grad_s: [stages] of one micro-batch. activation_bytes, constant_bytes:
             [stages] of one micro-batch, and of weights, gradients and optimizer states.
    """

    plan: Plan
    timeline: Timeline
    forward_s: Floats
    input_grad_s: Floats
    weight_grad_s: Floats
    activation_bytes: Floats
    constant_bytes: Floats

    @property
    def held(self) -> tuple[Held, ...]:
        """Bytes over time on a device of each pipeline rank."""
        return self.timeline.held_by_rank(self.activation_bytes, constant_bytes=self.constant_bytes)

    def to_dict(self) -> dict[str, Any]:
        """JSON data: seconds and bytes; staleness: the most updates that a stage's gradients are behind."""
        schedule, plan = _schedule(self.plan), self.plan  # an asynchronous timeline is of several calls
        held = self.timeline.held_by_stage(self.activation_bytes, constant_bytes=self.constant_bytes)
        figures = dict(summary(self.timeline))
        ranks = [{**r, "peak_memory_bytes": h.peak_bytes} for r, h in zip(figures["ranks"], self.held, strict=True)]
        return {
            **figures,
            "predicted_step_time_s": plan.predicted["step_time_s"],
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "virtual_stages": plan.virtual_stages,
            "ranks": ranks,
            "stages": [
                {
                    "stage": s,
                    "rank": schedule.placement[s],
                    "devices": list(plan.stages[s % schedule.depth]["devices"]),
                    "blocks": len(plan.stages[s % schedule.depth]["blocks"]),
                    "forward_s": float(self.forward_s[s % schedule.depth]),
                    "backward_s": float((self.input_grad_s + self.weight_grad_s)[s % schedule.depth]),
                    "peak_memory_bytes": h.peak_bytes,
                    "staleness": max(staleness(schedule, s, j) for j in range(plan.microbatches)),
                }
                for s, h in enumerate(held)
            ],
        }

    def table(self) -> RenderableType:
        """For people."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from autopar.console import seconds, size

        data = self.to_dict()
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("stage", "rank", "devices", "blocks", "forward", "backward", "in flight", "memory"):
            table.add_column(name, justify="right")
        if self.timeline.schedule.asynchronous:
            table.add_column("updates behind", justify="right")
        by_stage = check(_schedule(self.plan)).in_flight_by_stage if self.plan.model["training"] else None
        for row in data["stages"]:
            table.add_row(
                str(row["stage"]),
                str(row["rank"]),
                _ranges(row["devices"]),
                str(row["blocks"]),
                seconds(row["forward_s"]),
                seconds(row["backward_s"]),
                "-" if by_stage is None else str(by_stage[row["stage"]]),
                size(row["peak_memory_bytes"]),
                *([str(row["staleness"])] if self.timeline.schedule.asynchronous else []),
            )
        idle = ", ".join(f"{100 * rank['bubble']:.1f} %" for rank in data["ranks"])
        head = (
            f"step {seconds(data['step_time_s'])} ({seconds(data['predicted_step_time_s'])} in the plan); "
            f"{self.plan.schedule}, {self.plan.microbatches} micro-batches"
        )
        return Group(Text(head), table, Text(f"idle by rank: {idle}"))


def simulate_plan(plan: Plan) -> Simulated:
    """One step of a plan. Raises: PlanError."""
    schedule = _schedule(plan)
    stages, m = len(plan.stages), plan.microbatches
    share, times = _times(plan, schedule)
    forward_s, input_grad_s, weight_grad_s = (
        np.asarray(x, dtype=np.float64) for x in (times.forward_s, times.input_grad_s, times.weight_grad_s)
    )
    sends = [Send(**send) for send in plan.predicted.get("sends", ())]
    timeline = simulate(schedule, with_sends(times, sends, schedule.depth))
    memory = plan.predicted["memory"]

    peaks = np.broadcast_to(np.asarray(plan.predicted["peak_memory_bytes"] or [0.0], dtype=np.float64), (stages,))
    held = check(schedule).in_flight_by_stage if plan.model["training"] else [1] * schedule.stages
    most = np.array(held[:stages], dtype=np.float64)
    saved = memory.get("activations", 0.0)
    if isinstance(saved, (tuple, list)) and len(saved) == stages:  # what each stage holds
        activation = np.array(saved) / np.maximum(most, 1)
    else:  # of a whole batch and all stages
        activation = np.minimum(_total(saved) * share / m, peaks / np.maximum(most, 1))
    if not plan.model["training"]:
        activation[:] = 0.0
    return Simulated(plan, timeline, forward_s, input_grad_s, weight_grad_s, activation, peaks - activation * most)


def _times(plan: Plan, schedule: Schedule) -> tuple[Floats, StageTimes]:
    """[stages] share of the ops' seconds, and what each stage takes."""
    stages, training = len(plan.stages), plan.model["training"]
    known = plan.predicted.get("stage_seconds")
    if known is not None:
        parts = [np.array(known[name]) for name in ("forward", "input_grad", "weight_grad")]
        total = sum(parts)
        share = total / total.sum() if total.any() else np.full(stages, 1 / stages)
        back = parts[1:] if training else [np.zeros(stages), np.zeros(stages)]
        optimizer_s = np.array(known["optimizer"]) if training else 0.0
        return share, StageTimes(
            forward_s=parts[0], input_grad_s=back[0], weight_grad_s=back[1], optimizer_s=optimizer_s
        )
    op_s = np.zeros(stages)
    for name, stage in stage_of_ops(plan).items():
        op_s[stage] += plan.ops[name]["time_s"] + plan.ops[name]["communication_s"]
    share = op_s / op_s.sum() if op_s.any() else np.full(stages, 1 / stages)
    figures = plan.predicted["breakdown_s"]
    placement = np.array(schedule.placement[:stages])
    slowest = float(np.bincount(placement, share).max())  # whose figures the plan has
    optimizer_s = _total(figures.get("optimizer", 0.0)) / slowest * share
    busy_s = _total(figures.get("compute", 0.0)) + _total(figures.get("exposed_communication", 0.0))
    recomputed = "full" in plan.recompute.values()
    thirds = (RECOMPUTED if recomputed else THIRDS) if training else (1.0, 0.0, 0.0)
    forward_s, input_grad_s, weight_grad_s = (busy_s / slowest * share / plan.microbatches * part for part in thirds)
    return share, StageTimes(
        forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s,
        optimizer_s=optimizer_s if training else 0.0,
    )  # fmt: skip


def stage_of_ops(plan: Plan) -> dict[str, int]:
    """The stage of each op of a plan, found by names alone: the plan's ops stand in the program's order.

    An op whose module path lies in a block's is that block's. The ops between have blocks named before or after one,
    which take what comes next and fits no module.
    """
    blocks = [(block, index) for index, stage in enumerate(plan.stages) for block in stage["blocks"]]
    found: dict[str, int] = {}
    at = 0
    for name in plan.ops:
        path = name.rsplit("/", 2)[0]
        inside = next((i for i in range(at, len(blocks)) if _holds(blocks[i][0], path, name)), None)
        if inside is not None:
            at = inside
        elif at + 1 < len(blocks) and not _between(blocks[at][0]) and _between(blocks[at + 1][0]):
            at += 1
        found[name] = blocks[at][1] if blocks else 0
        if blocks and isinstance(blocks[at][0], Mapping) and blocks[at][0]["last_op"] == name:
            at = min(at + 1, len(blocks) - 1)
    return found


def _holds(block: Any, path: str, name: str) -> bool:
    if isinstance(block, Mapping):
        return bool(block["first_op"] == name)
    module = block.partition("#")[0]
    return bool(path == module or path.startswith(module + "."))


def _between(block: Any) -> bool:
    return isinstance(block, str) and block.partition(":")[0] in ("before", "after") and ":" in block


def _schedule(plan: Plan) -> Schedule:
    ranks = plan.degrees["pp"]
    schedule = build(plan.schedule if ranks > 1 else "gpipe", ranks, plan.virtual_stages, plan.microbatches)
    if schedule.depth != len(plan.stages):
        raise PlanError(
            f"stages: {len(plan.stages)}, but {plan.schedule} on pp={ranks} with virtual_stages={plan.virtual_stages} "
            f"has {schedule.depth}"
        )
    return schedule if plan.model["training"] else schedule.forward_only()


def _total(figure: Any) -> float:
    """A figure of a plan, which may be a number or one for each of several things."""
    if isinstance(figure, Mapping):
        return sum(map(_total, figure.values()))
    return float(sum(map(_total, figure)) if isinstance(figure, (tuple, list)) else figure)


def _ranges(devices: list[int]) -> str:
    """`0-3` of consecutive devices, else the first and how many."""
    first, last = min(devices, default=0), max(devices, default=0)
    if len(devices) <= 2:
        return ",".join(map(str, devices))
    return f"{first}-{last}" if last - first + 1 == len(devices) else f"{first}, ... ({len(devices)})"
