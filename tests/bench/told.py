"""Ranks that step when told to, so that benchmarks can take turns between programs in processes of their own.

In shared processes, what one program frees decides where another's memory lies and which of them pays for fresh pages:
up to 0.2 s of a step in 3, the other way round in another order. The allocator keeps what it has, too: what glibc gives
back at the end of its heap, and takes again in the next step, follows from where blocks happen to lie.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}
"""In bytes: glibc returns nothing to the system."""


class Ranks:
    """The rank processes of one program; all of them wait between its steps."""

    def __init__(self, script: str, world: int, *options: object) -> None:
        """Run `script OPTIONS --told` on `world` ranks of this machine; it calls `serve`."""
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--rdzv-backend", "c10d"]
        what = [script, *map(str, options), "--told"]
        self.process = subprocess.Popen(
            [sys.executable, *launch, "--rdzv-endpoint", "127.0.0.1:0", *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **KEEP, "OMP_NUM_THREADS": "1"},
        )

    def step(self) -> dict[str, float]:
        """step: seconds that passed, work: processor seconds of all ranks, loss: of the rank that has one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # of ranks that have ended: they print nothing either
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the ranks of {' '.join(self.process.args[-6:])} ended")  # type: ignore[index]
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(made: Callable[[int], Callable[[], float | None]]) -> None:
    """On each rank: a step for each line that rank 0 is sent. made: rank -> its step, which gives the loss or None."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = made(dist.get_rank())
    while _told():
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        loss = step()
        work_s = time.process_time() - worked
        dist.barrier()
        step_s = time.perf_counter() - started
        everyone = torch.tensor([work_s, float(loss is not None), loss or 0.0], dtype=torch.float64)
        dist.all_reduce(everyone)
        if dist.get_rank() == 0:
            work, losses, total = everyone.tolist()
            print(json.dumps({"step": step_s, "work": work, "loss": total / max(losses, 1)}), flush=True)
    dist.destroy_process_group()


def _told() -> bool:
    told = [bool(sys.stdin.readline())] if dist.get_rank() == 0 else [False]
    dist.broadcast_object_list(told)
    return told[0]
