"""Dropout by key against torch's own: `python tests/bench/dropout.py [--threads N] [--runs 15] [--cpu-time]`.

Both take turns in one process; printed are medians in milliseconds for forward, and for forward and backward. On a busy
machine the time of the processor says more than that of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from autopar.runtime import random_ops  # noqa: F401 - defines torch.ops.autopar

KEY = torch.tensor([0x1234567890ABCDEF, 0])


def own(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.autopar.dropout(x, KEY, 0.1)


def shard(x: torch.Tensor) -> torch.Tensor:
    """As a rank sees half of the columns of a value twice as wide."""
    return torch.ops.autopar.dropout(x, KEY, 0.1, x.shape[1], list(x.shape), [2 * x.shape[1], 1])


def theirs(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1)


def milliseconds(
    fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, backward: bool, clock: Callable[[], float]
) -> float:
    leaf = x.detach().requires_grad_(backward)
    begin_s = clock()
    out = fn(leaf)
    if backward:
        out.backward(x)
    return (clock() - begin_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--millions", type=float, default=10)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    rows = int(options.millions * 1e6) // 1024
    print(f"{rows} x 1024 elements, {options.threads} threads, median of {options.runs} paired runs, ms")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(rows, 1024).to(dtype)
        for backward in (False, True):
            times: dict[str, list[float]] = {"F.dropout": [], "autopar": [], "autopar, a shard": []}
            for run in range(options.runs + 1):
                for (_, list_), fn in zip(times.items(), (theirs, own, shard), strict=True):
                    taken = milliseconds(fn, x, backward, clock)
                    if run:
                        list_.append(taken)
            what = "forward + backward" if backward else "forward"
            medians = ", ".join(f"{name} {statistics.median(ms):.1f}" for name, ms in times.items())
            print(f"{str(dtype).removeprefix('torch.'):9} {what:18} {medians}", flush=True)


if __name__ == "__main__":
    main()
