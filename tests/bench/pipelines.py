"""The product of models, meshes, schedules, micro-batches and backends as pipelines, each against one device: errors.

Every case trains three AdamW steps in float64 with accumulation, clipping and ignored labels (see
`tests/end_to_end/pipeline.py`), and is compared in losses, norms, gradients and parameters. What cases have in common
is made once (see `tests/bench/kept.py`): a model is captured once, and the schedules of one model, mesh, number of
micro-batches and backend share what lies inside the stages. These groups come in a shuffled order: what has been run at
any time is a sample of the product, and what the file of results holds already is not run again.

usage: python -m tests.bench.pipelines --out RESULTS.jsonl [--world 2] [--minutes 10] [--table tests/bench/pipelines.md]
Writes a line for each case; `--table` writes the table of all lines of so many ranks in place of the one that is there,
and nothing is run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.runtime.launch import CAPTURE, report, run_ranks_local
from tests.end_to_end import pipeline

MODELS = ("gpt", "hf-llama", "t5", "unet", "gpt-tied")
INSIDE: dict[str, tuple[str, dict[str, int]]] = {
    "pp=2": ("2", {"pp": 2}),
    "pp=4": ("4", {"pp": 4}),
    "pp=2 x tp=2": ("2x2", {"pp": 2, "tp": 2}),
    "pp=2 x dp=2": ("4", {"pp": 2, "dp": 2}),
    "pp=2 x zero=3": ("4", {"pp": 2, "dp": 2, "zero": 3}),
}
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-2p": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "interleaved-zb": 2,
    "zb-v": 0, "dualpipe-v": 0,
}  # fmt: skip
"""By name the stages a rank; 0: the schedule's own."""
BACKENDS = ("eager", "aot")
BATCH, MOST, A_START = 32, 8, 54
BOUND, LOWER = 1e-9, {"hf-llama": 1e-6}
PRELOAD = (*CAPTURE, "transformers.models.llama.modeling_llama")


def product(world: int) -> list[list[Any]]:
    """[model, inside, schedule, micro-batches, backend] of every case on so many ranks."""
    inside = [name for name, (mesh, _) in INSIDE.items() if ranks_of(mesh) == world]
    alike = list(itertools.product(MODELS, inside, range(1, MOST + 1), BACKENDS))
    random.Random(0).shuffle(alike)
    return [[model, at, schedule, count, backend] for model, at, count, backend in alike for schedule in SCHEDULES]


def ranks_of(mesh: str) -> int:
    return 4 if mesh == "2x2" else int(mesh)


def run(payload: dict[str, Any]) -> list[None]:
    """On each rank: the cases, each reported by the rank that differs most."""
    import torch.distributed as dist

    from tests.bench import kept

    kept.keep()
    warnings.filterwarnings("error", message="backend='aot'")  # as in tests: a stage that would run op by op after all
    for model, inside, schedule, microbatches, backend in payload["cases"]:
        started = time.perf_counter()
        kept.begin(model, inside, microbatches, backend)
        mesh, pin = INSIDE[inside]
        virtual = {"virtual_stages": SCHEDULES[schedule]} if SCHEDULES[schedule] else {}
        pin = {**pin, **virtual, "schedule": schedule, "microbatches": microbatches}
        found = pipeline.run_case(model, mesh, BATCH, {"pin": pin, "backend": backend}, evaluate=False)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        if dist.get_rank() == 0:
            told = {"case": [model, inside, schedule, microbatches, backend], **worst(everyone)}
            report({**told, "seconds": round(time.perf_counter() - started, 1)})
    return []


def worst(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest errors over all ranks, or why there are none."""
    refused = next((r["refused"] for r in ranks if "refused" in r), None)
    if refused is not None:
        return {"refused": refused}
    return {
        "loss": max(max(*r["losses"], *r["norms"]) for r in ranks),
        "grads": max(max(r["grads"].values()) for r in ranks),
        "params": max(max(r["params"].values()) for r in ranks),
    }


def campaign(out: Path, world: int, minutes: float) -> None:
    end_s = time.monotonic() + 60 * minutes
    cases = product(world)
    while time.monotonic() < end_s:
        done = {json.dumps(line["case"]) for line in lines_of(out)}
        left = [c for c in cases if json.dumps(c) not in done]
        left = [c for c in left if c[0] == left[0][0]][:A_START]
        if not left:
            break
        told: list[Any] = []

        def tell(line: dict[str, Any], told: list[Any] = told) -> None:
            told.append(line)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)

        limit_s = max(60.0, end_s - time.monotonic())
        try:
            run_ranks_local(
                "tests.bench.pipelines:run", world, {"cases": left}, limit_s, on_event=tell, preload=PRELOAD
            )
        except AutoparError as error:
            if time.monotonic() < end_s - 1:  # not merely out of time
                tell({"case": left[len(told)], "failed": str(error)})


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(lines: list[dict[str, Any]], world: int) -> str:
    """A row for each model and mesh, then one for each schedule."""
    lines = [m for m in lines if ranks_of(INSIDE[m["case"][1]][0]) == world]
    rows = [f"{len(lines)} of the {len(product(world))} cases on {world} ranks have been run.", ""]
    for title, key in (
        ("model, inside", lambda c: f"{c[0]}, {c[1]}"),
        ("schedule, backend", lambda c: f"{c[2]}, {c[4]}"),
    ):
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            groups[key(line["case"])].append(line)
        rows += [
            f"| {title} | cases | refused | failed | micro-batches | loss | gradients | parameters |",
            "|---" * 8 + "|",
        ]
        for name, members in sorted(groups.items()):
            good = [m for m in members if "loss" in m]
            errors = [f"{max((m[what] for m in good), default=0.0):.1e}" for what in ("loss", "grads", "params")]
            counts = [sum(word in m for m in members) for word in ("refused", "failed")]
            of = sorted({m["case"][3] for m in good})
            cells = [name, len(members), *counts, " ".join(map(str, of)), *errors]
            rows.append(f"| {' | '.join(map(str, cells))} |")
        rows.append("")
    for word in ("refused", "failed"):
        rows += [f"- {word}: {m['case']}: {m[word]}" for m in lines if word in m]
    over = [m for m in lines if "loss" in m and max(m["loss"], m["grads"]) > LOWER.get(m["case"][0], BOUND)]
    rows += [f"- over the bound: {m}" for m in over]
    seconds = [m["seconds"] for m in lines if "seconds" in m]
    rows.append(f"\nSeconds a case: median {statistics.median(seconds):.1f}." if seconds else "")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is None:
        campaign(options.out, options.world, options.minutes)
        return
    made, mark, end = table(lines_of(options.out), options.world), f"<!-- {options.world} ranks -->", "<!-- end -->"
    old = options.table.read_text(encoding="utf-8") if options.table.exists() else ""
    before, _, rest = old.partition(mark)
    options.table.write_text(f"{before}{mark}\n\n{made}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    print(made, file=sys.stderr)


if __name__ == "__main__":
    main()
