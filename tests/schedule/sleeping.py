"""Run on each rank: pipelines whose stages only sleep, so that the time of a step is the schedule's and nothing else.

A stage's value goes through three nodes that sleep: one in its forward, one where its input's gradient is made, one
where its parameter's is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.layout import P
from autopar.program import Source
from autopar.runtime.pipeline_program import PipelineProgram, Result, StageValues, Value
from autopar.runtime.pipeline_rounds import events
from autopar.runtime.pipeline_step import Step
from autopar.runtime.process_mesh import Line
from autopar.schedule import Schedule, build


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleep: Callable[[], None]) -> torch.Tensor:
        ctx.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sleep()
        return grad, None


def run_schedules(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """payload: {"cases": [[name, virtual stages, micro-batches], ...], "times": [F, I, W] of a stage, "runs": n}.

    Returns: for each case, of the shortest run: the seconds of the step, the most micro-batches this rank held, and how
    long each sleep of it took: [work (F, I, W), stage, micro-batch, seconds].
    """
    found = []
    for name, virtual, microbatches in payload["cases"]:
        schedule = build(name, dist.get_world_size(), virtual, microbatches)
        times = payload["times"]
        found.append(min((_run(schedule, times) for _ in range(payload["runs"])), key=lambda r: r["step_s"]))
    return found


def _run(schedule: Schedule, times: list[float]) -> dict[str, Any]:
    rank = dist.get_rank()
    slept: list[tuple[int, int, int, float]] = []
    value = Value("x", (1,), torch.float32, True)
    made = [tuple(_stage(schedule, s, k, value) for s in range(schedule.stages)) for k in range(schedule.microbatches)]

    def function(stage: int, microbatch: int) -> Any:
        def sleep(work: int) -> None:
            begun = time.perf_counter()
            time.sleep(times[work])
            slept.append((work, stage, microbatch, time.perf_counter() - begun))

        def run(weight: torch.Tensor, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
            sleep(0)
            return (sum((Slow.apply(x, partial(sleep, 1)) for x in received), Slow.apply(weight, partial(sleep, 2))),)

        return run

    program = PipelineProgram(
        sources=tuple(Source(f"w{s}", "parameter", f"w{s}", True) for s in range(schedule.stages)),
        stages=tuple(made),
        run={(s, k): function(s, k) for k in range(schedule.microbatches) for s in schedule.held(rank)},
        results={0: Result(schedule.stages - 1, P, (1,), (1,), torch.float32, True)},
        outputs=1,
        loss=0,
        reductions={},
        owners={},
        constants={},
    )
    leaves = {f"w{s}": torch.zeros(1, requires_grad=True) for s in schedule.held(rank)}
    line = Line(rank, tuple(range(schedule.ranks)), dist.group.WORLD, None)  # type: ignore[arg-type]
    step = Step(program, line, schedule.placement, leaves, keep=True)
    mine = events(schedule, lambda k: [(s - 1, s, True) for s in schedule.path(k)[1:]], rank)
    dist.barrier()
    begun = time.perf_counter()
    step.run(mine, lambda sink, k: torch.ones(1))
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    assert all(float(w.grad) == sum(s in schedule.path(k) for k in range(schedule.microbatches))
               for s, w in ((int(n[1:]), leaf) for n, leaf in leaves.items()))  # fmt: skip
    return {"step_s": float(took), "in_flight": step.most_in_flight, "slept": slept}


def _stage(schedule: Schedule, stage: int, microbatch: int, value: Value) -> StageValues:
    path = schedule.path(microbatch)
    source = Source(f"w{stage}", "parameter", f"w{stage}", True)
    if stage not in path:
        return StageValues(stage, (source,), (), (), (), (), None)
    receives = ((stage - 1, value),) if stage != path[0] else ()
    sends = ((value, (stage + 1,)),) if stage != path[-1] else ()
    gives = ((0,), ((1,),)) if stage == path[-1] else ((), ())
    return StageValues(stage, (source,), receives, sends, *gives, None)
