"""`python -m tests.fuzz --seconds 60 --seed 0`: random models x random plans on simulated ranks against one device.

Prints the counts and pairs a second; a failure is shrunk and printed as a file that runs. Exit status 1 on a mismatch,
or when too little was split to mean anything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.fuzz.campaign import Counts, run
from tests.fuzz.shrink import Failure, failure_file, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pairs", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", default="2,3,4,8", help="numbers of ranks to draw from (2, 3, 4, 6, 8, 12)")
    parser.add_argument("--plans", type=int, default=20, help="plans for each model")
    parser.add_argument("--model", type=int, help="only this model")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--failures", type=int, default=10, help="stop after so many")
    parser.add_argument("--shrink-seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="folder for failure files; without it they are printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.jobs == 1:
        counts = _work((0, 1, options))
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:  # a worker that dies is an error, not a hang
            counts = _sum(list(pool.map(_work, [(i, options.jobs, options) for i in range(options.jobs)])))
    print(counts.report())
    if counts.failures:
        return 1
    if options.model is None and not counts.enough:
        print("too little was split to mean anything: run longer", file=sys.stderr)
        return 1
    return 0


def _work(work: tuple[int, int, argparse.Namespace]) -> Counts:
    first, step, options = work
    torch.set_num_threads(1)
    one = options.model is not None
    counts = run(
        options.seed,
        seconds=options.seconds,
        pairs=options.plans if one else options.pairs / step,
        worlds=tuple(int(w) for w in options.worlds.split(",")),
        plans=options.plans,
        first=options.model if one else first,
        step=step,
        found=lambda subject, plan, mismatch: _show(shrink(subject, plan, mismatch, options.shrink_seconds), options),
        most_failures=options.failures,
        progress=_tell,
    )
    for index, _, recipe, plan, mismatch in counts.failures:
        if plan is None:
            _show(Failure(recipe, None, mismatch), options)
        print(f"model {index}: {mismatch}", flush=True)
    return counts


def _tell(counts: Counts) -> None:
    if counts.models % 25 == 0:
        print(f"{counts.models} models, {counts.pairs} pairs, {counts.seconds:.0f} s", file=sys.stderr, flush=True)


def _show(failure: Failure, options: argparse.Namespace) -> None:
    text = failure_file(
        failure, f"python -m tests.fuzz --seed {options.seed} --worlds {options.worlds} --plans {options.plans}"
    )
    if options.out is None:
        print(text, flush=True)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"failure_{os.getpid()}_{len(list(options.out.glob('*.py')))}.py"
    path.write_text(text)
    print(f"wrote {path}: {failure.mismatch}", flush=True)


def _sum(parts: list[Counts]) -> Counts:
    total = Counts(seconds=max(p.seconds for p in parts))
    for part in parts:
        total.models += part.models
        total.pairs += part.pairs
        total.contractions_split += part.contractions_split
        total.shaky += part.shaky
        total.split += part.split
        total.unusable += part.unusable
        total.refused += part.refused
        total.failures += part.failures
    return total
