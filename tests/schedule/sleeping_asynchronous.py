"""Run on each rank: asynchronous pipelines of a model whose blocks sleep, so that calls follow each other as fast as
the schedule lets them and nothing else counts.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar

WIDTH = 2
SLEPT: list[tuple[int, int, float]] = []
"""Forward 0 or backward 1, block, seconds: of every sleep of this rank."""
TIMES: list[tuple[float, float]] = []
"""Seconds of the forward and of the backward of each block."""


class Sleep(torch.autograd.Function):
    """The identity, which takes a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: int) -> torch.Tensor:
        ctx.block = block
        _sleep(0, block)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _sleep(1, ctx.block)
        return grad.clone(), None


def _sleep(work: int, block: int) -> None:
    begun = time.perf_counter()
    if TIMES:  # not while the model is captured
        time.sleep(TIMES[block][work])
    SLEPT.append((work, block, time.perf_counter() - begun))


class Block(nn.Module):
    def __init__(self, block: int) -> None:
        super().__init__()
        self.block, self.inner = block, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.inner(x), self.block)


class Sleepers(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def run_calls(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """payload: {"cases": [[schedule, micro-batches], ...], "times": [[F, B] of each block], "full", "calls": numbers}.

    Returns: for each case the seconds from call to call, over `calls` calls after the `full` ones that fill the
    pipeline, and the sleeps of this rank in them.
    """
    ranks, found = dist.get_world_size(), []
    autopar.register_rule(Sleep, "b d -> b d")
    for name, microbatches in payload["cases"]:
        torch.manual_seed(0)
        x = torch.randn(microbatches, WIDTH)
        stages = [1] * (ranks - 1) + [2]  # the sum is a block of its own
        pin = {"pp": ranks, "schedule": name, "microbatches": microbatches, "stages": stages}
        TIMES.clear()
        # op by op: a lowered function is what its ops are, and a sleep is none
        mesh = autopar.Mesh(str(ranks))
        model = autopar.parallelize(Sleepers(ranks), mesh, example_args=(x,), pin=pin, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            _train(model, optimizer, x)
        TIMES[:] = payload["times"]
        for _ in range(payload["full"]):
            _train(model, optimizer, x)
        SLEPT.clear()
        begun = time.perf_counter()
        for _ in range(payload["calls"]):
            _train(model, optimizer, x)
        found.append({"call_s": (time.perf_counter() - begun) / payload["calls"], "slept": list(SLEPT)})
        dist.barrier()
    return found


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
