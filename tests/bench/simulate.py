"""Seconds of processor time to build, check and simulate a schedule.

    python -m tests.bench.simulate

First: tables made from their names, waves and sends worked out. Again: what a planner pays for other seconds of the
same table. Processor time, so that other programs on the machine don't count.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.cost.simulate import StageTimes, simulate
from autopar.schedule import build
from autopar.schedule.build import KINDS

SIZES = ((4, 8), (8, 64), (32, 256), (128, 512))


def main() -> None:
    """Print a row a schedule and size."""
    print("| schedule | ranks | stages | micro-batches | actions | first, ms | again, ms |")
    print("|---|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        for ranks, microbatches in SIZES:
            if kind.asynchronous or name == "chimera":
                continue
            begun = time.process_time()
            table = build(name, ranks, kind.virtual or 2, microbatches)
            works = {"input_grad_s": 1.0, "weight_grad_s": 0.8, "send_s": 0.1, "reduce_s": 5.0, "optimizer_s": 1.0}
            simulate(table, StageTimes(forward_s=1.0, **works))
            first_s = time.process_time() - begun
            taken = []
            for i in range(5):
                begun = time.process_time()
                simulate(table, StageTimes(forward_s=np.linspace(1, 1 + i, table.depth), **works))
                taken.append(time.process_time() - begun)
            size = sum(map(len, table.rows))
            print(
                f"| {name} | {ranks} | {table.stages} | {microbatches} | {size:,} | {first_s * 1e3:.1f} | "
                f"{min(taken) * 1e3:.1f} |"
            )


if __name__ == "__main__":
    main()
