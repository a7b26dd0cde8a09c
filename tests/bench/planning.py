"""Seconds and memory from start to printed plan, each plan in a process of its own.

usage: python tests/bench/planning.py [--rounds 1]     (about two minutes on two cores)

Prints, for each command: wall seconds (median of the rounds), peak resident memory, the solver's gap and step time.
The bars: llama3-8b on 8x8 in 15 s and 2 GB, on 4x4x4 in 30 s; llama3-405b on 2048x8 in 60 s with a gap of at most 1 %.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

PLANS = (
    ("llama3-8b", "8x8", 16, 15.0, 2e9),
    ("llama3-8b", "4x4x4", 16, 30.0, None),
    ("llama3-405b", "2048x8", 2048, 60.0, None),
)


def run(model: str, mesh: str, batch: int) -> tuple[float, float, dict]:
    """(wall seconds, peak bytes, the plan) of one `autopar plan`."""
    options = ["--device", "h100-sxm", "--seq", "8192", "--batch", str(batch), "--precision", "bf16", "--json"]
    begun = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "plan", model, "--mesh", mesh, *options], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    # the largest child so far: the commands are run from the smallest to the largest
    peak = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024.0
    return time.perf_counter() - begun, peak, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    for model, mesh, batch, bar_s, bar_bytes in PLANS:
        results = [run(model, mesh, batch) for _ in range(rounds)]
        wall = statistics.median(r[0] for r in results)
        peak = max(r[1] for r in results)
        plan = results[-1][2]
        bars = f"bar {bar_s:.0f} s" + (f", {bar_bytes / 1e9:.0f} GB" if bar_bytes else "")
        print(
            f"{model} {mesh}: {wall:.1f} s, {peak / 1e9:.2f} GB ({bars}); gap {plan['solver']['gap']:.2%} by "
            f"{plan['solver']['name']}; degrees {plan['degrees']}, zero {plan['zero']}, "
            f"predicted step {plan['predicted']['step_time_s']:.3f} s, mfu {plan['predicted']['mfu']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
