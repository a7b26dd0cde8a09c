"""Plans of one model on this machine: predicted with the profile of `autopar calibrate` against measured steps.

usage: python -m tests.bench.predicted [--profile machine.json] [--rounds 15] [--hold FILE] [--json out.json]

A GPT of 4 million parameters trains under each of `PLANS`, on 1, 2 and 4 gloo processes of one thread. All of them are
set up first and wait; then rounds run every plan once, so that what else the machine does hits all. Seconds are medians
of a whole step: forward, backward, AdamW. Without --profile the machine is calibrated. --hold: the rounds begin when
this file is there, so that they can be given a quiet machine.

Prints a table, Spearman's rank correlation, and what the plan that is predicted to be best takes over the best one.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
        {"tp": 2, "sp": False, "recompute": "full"},
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
        {"pp": 4, "schedule": "gpipe", "microbatches": 8},
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


def run(payload: dict[str, Any]) -> list[list[float]]:
    """Seconds of each plan of a rank's world, by round."""
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
    found: list[list[float]] = [[] for _ in steps]
    for number in range(-1, payload["rounds"]):  # one to warm up
        _turn(folder / f"go-{ranks}-{number}", distributed)
        for i, (m, optimizer, ids, labels) in enumerate(steps):
            distributed.barrier()
            begun = time.perf_counter()
            m(ids, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            distributed.barrier()
            if number >= 0:
                found[i].append(time.perf_counter() - begun)
        if distributed.get_rank() == 0:
            (folder / f"done-{ranks}-{number}").touch()
    return found


def _turn(path: Path, distributed: Any) -> None:
    """Wait without work until it is this world's turn."""
    if distributed.get_rank() == 0:
        while not path.exists():
            time.sleep(0.005)
    distributed.barrier()


def measure(folder: Path, rounds: int, hold: str | None) -> dict[tuple[int, int], float]:
    """Median seconds by (ranks, position in `PLANS`)."""
    from autopar.runtime.launch import CAPTURE, run_ranks_local

    results: dict[int, Any] = {}

    def world(ranks: int) -> None:
        payload = {"folder": str(folder), "rounds": rounds}
        try:
            results[ranks] = run_ranks_local("tests.bench.predicted:run", ranks, payload, 3000.0, preload=CAPTURE)
        except Exception as error:
            results[ranks] = error

    threads = [threading.Thread(target=world, args=(ranks,), daemon=True) for ranks in PLANS]
    for thread in threads:
        thread.start()
    for number in range(-1, rounds):
        if number == 0 and hold:
            print("ready", flush=True)
            while not Path(hold).exists():
                time.sleep(0.2)
        for ranks in PLANS:
            (folder / f"go-{ranks}-{number}").touch()
            while not (folder / f"done-{ranks}-{number}").exists():
                failed = [r for r in results.values() if isinstance(r, Exception)]
                if failed:
                    raise failed[0]
                time.sleep(0.005)
    for thread in threads:
        thread.join()
    slowest = {ranks: np.max(np.array(found), axis=0) for ranks, found in results.items()}
    return {
        (ranks, i): statistics.median(slowest[ranks][i]) for ranks, plans in PLANS.items() for i in range(len(plans))
    }


def report(predicted: dict[tuple[int, int], float], measured: dict[tuple[int, int], float]) -> None:
    from autopar.validate import spearman

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


def main() -> None:
    import tempfile

    from autopar.calibrate import measure as calibrate
    from autopar.calibrate import profile_data

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hold")
    parser.add_argument("--json")
    parser.add_argument("--measured", help="a file that --json wrote: predict these again, measure nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.measured:
            data = json.loads(Path(options.measured).read_text())
            measured = {(r, i): s for r, i, s, _ in data}
        else:
            measured = measure(folder, options.rounds, options.hold)
        profile = options.profile or str(folder / "machine.json")
        if not options.profile:
            Path(profile).write_text(json.dumps(profile_data(calibrate(max(PLANS)), max(PLANS))))
        predicted = predict(profile)
    report(predicted, measured)
    if options.json:
        Path(options.json).write_text(json.dumps([[*key, measured[key], predicted[key]] for key in measured]))


if __name__ == "__main__":
    main()
