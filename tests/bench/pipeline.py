"""Seconds a step of pipelines: hand-written `torch.distributed.pipelining` programs and autopar, interleaved.

A GPT of about 30 million parameters with the same cut, schedule and micro-batches on both sides; a step is forward,
backward and AdamW. Every round runs each of them once, so that what else the machine does hits all; which of a pair
goes first alternates. Each has rank processes of its own; the others wait. Losses of the two are compared first.

usage: python tests/bench/pipeline.py [--world 2] [--rounds 12] [--schedules gpipe,1f1b,interleaved-1f1b] [--batch 8]
           [--microbatches 4]   (other schedules: looped-bfs, interleaved-zb, zb-v, dualpipe-v)
Prints a table of medians, spreads (10th to 90th percentile) and ratios (median of the rounds' ratios), of the seconds
that pass and of those that the processors of all ranks work, and a JSON line of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench import step_time
from tests.bench.told import Ranks, serve

LAYERS = 8
VIRTUAL = {
    "gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "interleaved-zb": 2, "zb-v": 2, "dualpipe-v": 2,
}  # fmt: skip
"""Stages a rank."""
V = ("zb-v", "dualpipe-v")
"""The second stage of rank 0 is the last one."""
step_time.WIDTH, step_time.LAYERS, step_time.VOCAB, step_time.SEQ = 512, LAYERS, 4096, 128


class Part(nn.Module):
    """One stage: the blocks from `first` to `last`, the embeddings before the first and the head after the last."""

    def __init__(self, whole: step_time.GPT, first: int, last: int) -> None:
        super().__init__()
        self.blocks = whole.blocks[first:last]
        if first == 0:
            self.tokens, self.positions = whole.tokens, whole.positions
        if last == LAYERS:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids, labels = (torch.randint(0, step_time.VOCAB, (size, step_time.SEQ), generator=generator) for _ in range(2))
    return ids, labels


def by_hand(schedule: str, world: int, rank: int, batch: int, microbatches: int) -> Callable[[], float | None]:
    """A step of the hand-written program; gives the loss on the rank of the last stage, None on the others."""
    from torch.distributed import pipelining

    whole, stages = step_time.GPT(), world * VIRTUAL[schedule]
    each = LAYERS // stages
    mine = [rank, stages - 1 - rank] if schedule in V else [s for s in range(stages) if s % world == rank]
    parts = [Part(whole, s * each, (s + 1) * each) for s in mine]
    cpu = torch.device("cpu")
    made = [pipelining.PipelineStage(p, s, stages, cpu) for s, p in zip(mine, parts, strict=True)]

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    kinds: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
        "looped-bfs": pipelining.ScheduleLoopedBFS,
        "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
        "zb-v": pipelining.ScheduleZBVZeroBubble,
        "dualpipe-v": pipelining.ScheduleDualPipeV,
    }
    run = kinds[schedule](made if VIRTUAL[schedule] > 1 else made[0], microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4)
    ids, labels = batch_of(batch)

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        args = (ids,) if 0 in mine else ()
        last = stages - 1 in mine
        run.step(*args, **({"target": labels, "losses": losses} if last else {}), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).mean()) if last else None

    return step


def ours(schedule: str, world: int, rank: int, batch: int, microbatches: int) -> Callable[[], float | None]:
    """A step of autopar's program; gives the loss on one rank, None on the others."""
    import autopar

    virtual = VIRTUAL[schedule]
    each = [LAYERS // (world * virtual)] * (world * virtual)
    each[0] += 1  # the blocks before and after the layers
    each[-1] += 1
    pin: dict[str, Any] = {"pp": world, "schedule": schedule, "microbatches": microbatches, "stages": each}
    if schedule not in V:
        pin["virtual_stages"] = virtual
    example = batch_of(batch)
    model = autopar.parallelize(step_time.GPT(), autopar.Mesh(str(world), device="cpu"), example_args=example, pin=pin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float | None:
        loss = model(*example)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss) if rank == world - 1 else None

    return step


SIDES = {"ours": ours, "by-hand": by_hand}
Times = dict[str, tuple[list[float], list[float]]]


def measure(schedule: str, options: argparse.Namespace) -> Times:
    """Seconds that pass ("step") and that all ranks' processors work ("work"): (ours, by hand)."""
    sizes = ("--world", options.world, "--batch", options.batch, "--microbatches", options.microbatches)
    what = ("--schedules", schedule, *sizes)
    both = [Ranks(__file__, options.world, "--side", side, *what) for side in SIDES]
    for _ in range(2):
        mine, theirs = (ranks.step()["loss"] for ranks in both)
        assert abs(mine - theirs) < 1e-4 * theirs, (schedule, mine, theirs)
    found: Times = {key: ([], []) for key in ("step", "work")}
    for turn in range(options.rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            told = both[side].step()
            for key, times in found.items():
                times[side].append(told[key])
    for ranks in both:
        ranks.end()
    return found


def report(found: Times, what: str, world: int) -> None:
    head = "median s | 10 % to 90 %"
    print(f"| {world} ranks, {what} | ours, {head} | by hand, {head} | ratio | 10 % to 90 % | rounds |")
    print("|---" * 8 + "|")
    ratios = {}
    for name, sides in found.items():
        ratio = [a / b for a, b in zip(*sides, strict=True)]  # of each round: rounds share what else the machine does
        ratios[name] = round(statistics.median(ratio), 4)
        cells = [f"{statistics.median(side):.3f} | {_tenths(side)}" for side in sides]
        print(f"| {name} | {' | '.join(cells)} | {ratios[name]:.3f} | {_tenths(ratio)} | {len(ratio)} |")
    print(json.dumps(ratios))


def _tenths(values: list[float]) -> str:
    tenths = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
    return f"{tenths[0]:.3f} to {tenths[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("world", 2), ("rounds", 12), ("batch", 8), ("microbatches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved-1f1b")
    parser.add_argument("--side", choices=SIDES, help="of a rank")
    parser.add_argument("--told", action="store_true", help="a rank, told when to step")
    options = parser.parse_args()
    if options.told:
        sizes = (options.batch, options.microbatches)
        serve(lambda rank: SIDES[options.side](options.schedules, options.world, rank, *sizes))
        return
    schedules = options.schedules.split(",")
    if unknown := [schedule for schedule in schedules if schedule not in VIRTUAL]:
        parser.error(f"--schedules {','.join(unknown)}: the schedules are {', '.join(VIRTUAL)}")
    found = {schedule: measure(schedule, options) for schedule in schedules}
    for what in ("step", "work"):
        report({schedule: times[what] for schedule, times in found.items()}, what, options.world)


if __name__ == "__main__":
    main()
