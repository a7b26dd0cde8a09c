"""Seconds of one training step of a transformer under a printed configuration.

Enters: a `Run`. Leaves: a `StepTime` with its parts. Refused: nothing of its own.

    stage    sum over its layers of forward, input gradient and weight gradient (`layer_time`), collectives of tensor
             and context parallelism in line (`training_wire`), what recompute runs again
    step     m slowest stages, and what the schedule leaves idle: all other stages once; over v chunks a v-th of them;
             less the weight gradients that fill the gap (zero bubble)
    then     gradients reduced and weights gathered over the data axis, the optimizer's traffic, fixed costs of a step

Source: Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2024 (zero bubble).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.cost.compute import memory_bound_s
from autopar.cost.fitted import FITTED, Fitted
from autopar.cost.layer_time import Pass, embedding, head, layer
from autopar.cost.memory import ParameterBytes
from autopar.cost.op_time import felt_s, norm_s, update_s
from autopar.cost.training_run import Run
from autopar.cost.training_wire import Sends, activation_message_bytes, data_s, in_line_s, layer_s


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step and its parts, which add up to it.

    Fields:  compute_s: of the slowest stage, all micro-batches. exposed_s: its communication in line. bubble_s: its
             waiting. reduce_s: of data parallelism, where it shows. update_s: optimizer and fixed costs.
    """

    compute_s: float
    exposed_s: float
    bubble_s: float
    reduce_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.reduce_s + self.update_s


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one stage for one micro-batch. exposed_s: communication in line."""

    forward_s: float
    input_s: float
    weight_s: float
    exposed_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


def step_time(run: Run, fitted: Fitted = FITTED) -> StepTime:
    """Seconds of one step."""
    found = stages(run, fitted)
    slowest, bubble_s = _critical(run, found)
    fullest = max(range(run.pp), key=run.weights)
    owner = found[fullest]
    noise = 1 + fitted.straggler_fraction * math.log2(run.nodes)
    return StepTime(
        run.microbatches * slowest.compute_s * noise,
        run.microbatches * slowest.exposed_s * noise,
        bubble_s * noise,
        data_s(run, fullest, owner.forward_s, owner.input_s + owner.weight_s, fitted),
        _update_s(run, fullest, fitted),
    )


def stages(run: Run, fitted: Fitted = FITTED) -> list[Stage]:
    """Seconds of every stage."""
    model, shard, profile = run.model, run.shard, run.profile
    total, exposed = Pass(), 0.0  # of a mean layer
    again = 0.0
    for moe, share in run.kinds:
        one = layer(model, shard, profile, fitted, moe)
        forward_wire, backward_wire = layer_s(run, one, fitted, moe)
        total += one * share
        again += share * {"none": 0.0, "selective": one.attention_s, "full": one.forward_s}[run.recompute]
        exposed += share * (forward_wire * (2 if run.recompute == "full" else 1) + backward_wire)
    again += fitted.checkpoint_wait_s if run.waits and run.recompute != "none" else 0.0
    ends = embedding(model, shard, profile), head(model, shard, profile, fitted)
    whole, tp = activation_message_bytes(run), run.axes["tp"]
    end_wires = (
        in_line_s(run, "reduce_scatter" if run.sp else "all_reduce", whole, tp, fitted),
        in_line_s(run, "all_reduce", whole, tp, fitted),
    )
    sends = Sends.of(run, fitted)
    at = (0, 0 if run.folded else run.pp - 1)
    known: dict[tuple[object, ...], Stage] = {}  # most stages are alike

    def stage(i: int) -> Stage:
        n = run.layers(i)
        piece, wire = total * n, exposed * n
        for end, its, end_wire in zip(ends, at, end_wires, strict=True):
            if i == its:
                piece, wire = piece + end, wire + end_wire
        wire += _sends_s(run, i, piece.forward_s, sends, fitted)
        weight_s = piece.weight_s + _accumulate_s(run, i, fitted)
        return Stage(piece.forward_s, piece.input_s + again * n, weight_s, wire)

    found = []
    for i in range(run.pp):
        key = (run.layers(i), sends.into_s(i), sends.into_s(i + 1), i == 0, i == run.pp - 1)
        if key not in known:
            known[key] = stage(i)
        found.append(known[key])
    return found


def _sends_s(run: Run, stage: int, forward_s: float, sends: Sends, fitted: Fitted) -> float:
    """Seconds of the sends that a stage waits for, forward and backward."""
    if run.pp == 1:
        return 0.0
    round_trip = run.virtual > 1  # chunks make a ring of the stages
    before = sends.into_s(stage) if stage or round_trip else 0.0
    after = sends.into_s(stage + 1) if stage < run.pp - 1 or round_trip else 0.0
    total = run.virtual * (before + after)
    return felt_s(forward_s, total, fitted) if run.overlap and round_trip else total


def _accumulate_s(run: Run, stage: int, fitted: Fitted) -> float:
    """Adding a micro-batch's weight gradients to their sum: read both, write one."""
    if run.microbatches == 1:
        return 0.0
    return fitted.accumulate_fraction * float(
        memory_bound_s(run.weights(stage) * (2 + 2 * run.reduce_bytes), run.profile)
    )


def _update_s(run: Run, stage: int, fitted: Fitted) -> float:
    """The optimizer, with fp32 master weights and two moments, and fixed costs."""
    local = run.weights(stage) / (run.axes["data"].size if run.zero else 1)
    wide, held = ParameterBytes(4, 2, 4, run.moment_bytes), ParameterBytes(4, 2, run.reduce_bytes, run.moment_bytes)
    moved_s = update_s(local, wide, run.profile) + norm_s(local, held, run.profile)
    return float(moved_s - run.profile.kernel_launch_s) + fitted.step_s


Bubble = Callable[[Run, list[Stage], list[float], int], float]
"""Seconds that a stage waits in a step when all of its own work is never late. The list: seconds of the stages up to
each, from 0 to all."""


def _critical(run: Run, found: list[Stage]) -> tuple[Stage, float]:
    """The stage that sets the pace, and its waiting."""
    upto_s = [0.0, *itertools.accumulate(s.total_s for s in found)]
    waits = [_BUBBLES[run.schedule](run, found, upto_s, i) for i in range(run.pp)]
    slowest = max(range(run.pp), key=lambda i: run.microbatches * found[i].total_s + waits[i])
    return found[slowest], waits[slowest]


def _one_by_one(run: Run, found: list[Stage], upto_s: list[float], stage: int) -> float:
    return upto_s[-1] - found[stage].total_s


def _alternating(run: Run, found: list[Stage], upto_s: list[float], stage: int) -> float:
    # Stages before pass the first micro-batch down and the last one up. The way to the last stage and back is filled by
    # forwards before the first backward comes, and by backwards after the last forward has gone.
    after, away_s, mine = len(found) - stage - 1, upto_s[-1] - upto_s[stage + 1], found[stage]
    forward_s = mine.forward_s + mine.exposed_s / 2
    filled = (forward_s, mine.total_s - forward_s)
    return upto_s[stage] + sum(max(away_s - after * s, 0.0) for s in filled)


def _chunked(run: Run, found: list[Stage], upto_s: list[float], stage: int) -> float:
    return _one_by_one(run, found, upto_s, stage) / run.virtual


def _weights_fill(run: Run, found: list[Stage], upto_s: list[float], stage: int) -> float:
    # Each of the p - 1 steps down and up the pipeline leaves a gap, which two weight gradients shorten.
    filled_s = 2 * (run.pp - 1) / run.pp * sum(s.weight_s for s in found)
    return max(_one_by_one(run, found, upto_s, stage) - filled_s, 0.0)


def _filled(run: Run, found: list[Stage], upto_s: list[float], stage: int) -> float:
    # What no work is there to fill: about one micro-batch of a stage.
    return _one_by_one(run, found, upto_s, stage) / max(run.pp - 1, 1)


_BUBBLES: Mapping[str, Bubble] = {
    "none": _one_by_one,
    "gpipe": _one_by_one,
    "1f1b": _alternating,
    "interleaved-1f1b": _chunked,
    "looped-bfs": _chunked,
    "zb-h1": _weights_fill,
    "zb-2p": _filled,
    "zb-v": _filled,
    "dualpipe-v": _filled,
}
