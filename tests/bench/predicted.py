"""Plans of one model on this machine: predicted with the profile of `autopar calibrate` against measured steps.

usage: python -m tests.bench.predicted [--profile machine.json] [--rounds 15] [--seconds 600] [--json out.json]

A GPT of 4 million parameters trains under each of `PLANS`, on 1, 2 and 4 gloo processes of one thread. All of them are
set up first and wait; then rounds run every plan twice and time the second step (the first one brings a plan's memory
back into the caches), so that what else the machine does hits all. Seconds are those of a whole step: forward,
backward, AdamW; of all rounds the lower quintile, as `autopar calibrate` takes it: others only ever slow a step down.
Without --profile the machine is calibrated. No round begins after --seconds. The allocator of all
ranks keeps its pages (see `tests/bench/told.py`): which plan pays for fresh ones is chance.

Prints a table, Spearman's rank correlation, and what the plan that is predicted to be best takes over the best one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"vocab": 2048, "context": 128, "layers": 4, "heads": 8, "width": 256, "ff_width": 1024, "tied": False}
BATCH = 16
PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"recompute": "selective"}, {"recompute": "full"}],
    2: [
        {"dp": 2, "zero": 0},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"tp": 2, "sp": False},
        {"pp": 2, "schedule": "gpipe", "microbatches": 4},
        {"pp": 2, "schedule": "1f1b", "microbatches": 2},
        {"pp": 2, "schedule": "1f1b", "microbatches": 8},
        {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "microbatches": 4},
        {"pp": 2, "schedule": "zb-h1", "microbatches": 4},
    ],
    4: [
        {"dp": 4, "zero": 0},
        {"dp": 4, "zero": 3},
        {"tp": 4, "sp": False},
        {"dp": 2, "tp": 2, "zero": 0, "sp": False},
        {"pp": 4, "schedule": "1f1b", "microbatches": 8},
        {"pp": 2, "dp": 2, "schedule": "1f1b", "microbatches": 4, "zero": 0},
        {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 4, "sp": False},
    ],
}
"""Ranks -> pins."""


def model() -> Any:
    from autopar.models.gpt import GPT, GPTConfig

    return GPT(GPTConfig(fused_qkv=True, **SIZES), batch=BATCH)


def pinned(plan: dict[str, Any]) -> dict[str, Any]:
    return {"recompute": "none", **plan}


def name_of(plan: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.items()) or "alone"


def predict(profile: str) -> dict[tuple[int, int], float]:
    """Seconds by (ranks, position in `PLANS`)."""
    import autopar
    from autopar.pipeline import choose, prepare
    from autopar.request import make_request

    whole = model()
    args, kwargs = whole.example_inputs()
    prepared = prepare(whole, args, kwargs, name="gpt", outputs="auto")
    found = {}
    for ranks, plans in PLANS.items():
        for i, plan in enumerate(plans):
            mesh = autopar.Mesh(ranks, device=profile)
            asked = make_request(mesh, pinned(plan), None, None, "adamw", "auto", None, "auto", False, False, None)
            chosen = choose(prepared, asked.topology, asked.profile, asked.settings, recompute=("none",))
            found[ranks, i] = chosen.predicted["step_time_s"]
    return found


def run(payload: dict[str, Any]) -> None:
    """Run each plan of a rank's world once a round, and write the seconds."""
    import torch
    from torch import distributed

    import autopar

    torch.set_num_threads(1)
    ranks, folder = distributed.get_world_size(), Path(payload["folder"])
    steps = []
    for plan in PLANS[ranks]:
        whole = model()
        (ids, labels), _ = whole.example_inputs()
        m = autopar.parallelize(whole, autopar.Mesh(ranks, device="cpu"), pin=pinned(plan))
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4)
        steps.append((m, optimizer, ids, labels))
    for number in itertools.count():
        if not _turn(folder, ranks, number, distributed):
            return
        found = []
        for m, optimizer, ids, labels in steps:
            for _ in range(2):
                distributed.barrier()
                begun = time.perf_counter()
                m(ids, labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                distributed.barrier()
            found.append(time.perf_counter() - begun)
        if distributed.get_rank() == 0:
            written = folder / f"times-{ranks}-{number}"
            written.write_text(json.dumps(found))
            written.rename(folder / f"done-{ranks}-{number}")


def _turn(folder: Path, ranks: int, number: int, distributed: Any) -> bool:
    """Wait without work until it is this world's turn; False at the end of all rounds."""
    import torch

    more = torch.ones(1)
    if distributed.get_rank() == 0:
        while not (folder / f"go-{ranks}-{number}").exists():
            if (folder / "stop").exists():
                more.zero_()
                break
            time.sleep(0.005)
    distributed.broadcast(more, 0)
    return bool(more)


def measure(folder: Path, rounds: int, seconds: float) -> dict[tuple[int, int], list[float]]:
    """Seconds of every round by (ranks, position in `PLANS`), of as many rounds as begin in so many seconds from the
    start."""
    from autopar.runtime.launch import CAPTURE, run_ranks_local

    failed: list[Exception] = []
    end = time.monotonic() + seconds

    def world(ranks: int) -> None:
        try:
            run_ranks_local("tests.bench.predicted:run", ranks, {"folder": str(folder)}, 3000.0, preload=CAPTURE)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=world, args=(ranks,), daemon=True) for ranks in PLANS]
    for thread in threads:
        thread.start()
    times: dict[int, list[list[float]]] = {ranks: [] for ranks in PLANS}
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() > end:
            break
        for ranks in PLANS:
            (folder / f"go-{ranks}-{number}").touch()
            done = folder / f"done-{ranks}-{number}"
            while not done.exists():
                if failed:
                    raise failed[0]
                time.sleep(0.005)
            if number:  # the first call makes the graphs
                times[ranks].append(json.loads(done.read_text()))
    (folder / "stop").touch()
    for thread in threads:
        thread.join()
    return {
        (ranks, i): [found[i] for found in times[ranks]] for ranks, plans in PLANS.items() for i in range(len(plans))
    }


def report(predicted: dict[tuple[int, int], float], times: dict[tuple[int, int], list[float]]) -> None:
    from autopar.validate_ranks import spearman

    measured = {key: float(np.quantile(each, 0.2)) for key, each in times.items()}
    print("| ranks | plan | measured | predicted | error |\n|---|---|---|---|---|")
    for key in sorted(measured, key=measured.__getitem__):
        ranks, i = key
        error = predicted[key] / measured[key] - 1
        print(
            f"| {ranks} | {name_of(PLANS[ranks][i])} | {measured[key] * 1e3:.0f} ms | {predicted[key] * 1e3:.0f} ms "
            f"| {error:+.0%} |"
        )
    keys = list(measured)
    ours, theirs = (np.array([found[k] for k in keys]) for found in (predicted, measured))
    chosen = measured[min(keys, key=predicted.__getitem__)]
    errors = np.abs(ours / theirs - 1)
    print(
        f"\n{len(keys)} plans: rank correlation {spearman(theirs, ours):.3f}, median error {np.median(errors):.1%}, "
        f"90th percentile {np.quantile(errors, 0.9):.1%}; the plan predicted to be best takes "
        f"{chosen / min(measured.values()) - 1:+.1%} over the best one"
    )
    for name, of in (("fastest", np.min), ("median", np.median)):
        other = np.array([of(times[k]) for k in keys])
        print(f"rank correlation with the {name} of the rounds: {spearman(other, ours):.3f}")


def main() -> None:
    import os
    import tempfile

    from autopar.calibrate import measure as calibrate
    from autopar.calibrate import profile_data
    from tests.bench.told import KEEP

    os.environ.update(KEEP)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json")
    parser.add_argument("--measured", help="a file that --json wrote: predict these again, measure nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.measured:
            data = json.loads(Path(options.measured).read_text())
            measured = {(ranks, i): seconds for ranks, i, seconds in data}  # of every round
        else:
            measured = measure(folder, options.rounds, options.seconds)
            if options.json:
                Path(options.json).write_text(json.dumps([[*key, measured[key]] for key in measured]))
        profile = options.profile or str(folder / "machine.json")
        if not options.profile:
            Path(profile).write_text(json.dumps(profile_data(calibrate(max(PLANS)), max(PLANS))))
        predicted = predict(profile)
    report(predicted, measured)


if __name__ == "__main__":
    main()
