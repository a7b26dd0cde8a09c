"""Write the table of tests/end_to_end/test_architectures.py: error, degrees and division of every case.

Run from the root:  python -m tests.bench.architectures --out tests/bench/architectures.md [NAMES]
"""

import argparse
import os
import platform
import time
from pathlib import Path

import torch

from autopar.errors import AutoparError
from tests.end_to_end import test_architectures as cases_of
from tests.warm import warm_launchers

GROUPS = {"train": cases_of.TRAIN, "eval": cases_of.EVAL, "bfloat16": cases_of.HALF, "four": cases_of.FOUR}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all when none is given")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--out", help="a Markdown file")
    asked = parser.parse_args()
    with warm_launchers():
        _run(asked)


def _run(asked: argparse.Namespace) -> None:
    rows = []
    for group in asked.groups.split(","):
        for name, mode in dict.fromkeys((case[0], case[1]) for case in GROUPS[group]):
            if asked.names and name not in asked.names:
                continue
            rows += _rows([case for case in GROUPS[group] if case[:2] == [name, mode]], 4 if group == "four" else 2)
            if asked.out:  # after each, so that a run that is ended early leaves what it found
                Path(asked.out).write_text("\n".join([*_head(), *rows, ""]), encoding="utf-8")
            print(rows[-1], flush=True)


def _rows(cases: list, world: int) -> list[str]:
    try:
        results = list(zip(cases, *cases_of.run(cases, world, 1800).results(), strict=True))
    except AutoparError as error:
        return [f"| {cases[0][0]} | {cases[0][1]} | {cases[0][2]} | | {type(error).__name__}: {error} | | | | | | |"]
    rows = []
    for case, *found in results:
        name, mode, dtype, _, options = case
        pin = " x ".join(f"{k}={v}" for k, v in options.get("pin", options).items()) or "free"
        if refused := [r["refused"] for r in found if "refused" in r]:
            rows.append(f"| {name} | {mode} | {dtype} | {pin} | {refused[0]} | | | | | | |")
            continue
        cells = [_largest(found, category) for category in ("loss", "outputs", "grads", "params_after_step", "buffers")]
        degrees = " ".join(f"{k} {v}" for k, v in found[0]["degrees"].items() if v > 1) or "1"
        work, share = max(r["work"] for r in found), max(r["share"] for r in found)
        bound = found[0]["bounds"]["grads"]
        verdict = "yes" if not list(cases_of.faults(case, found)) else "NO"
        whole = ", ".join(found[0]["no_rule"]) or "none"
        rows.append(
            f"| {name} | {mode} | {dtype} | {pin} | {' | '.join(cells)} | {bound:.1e} | {degrees} | {work:.2f} | "
            f"{share:.2f} | {whole} | {verdict} |"
        )
    return rows


def _largest(found: list, category: str) -> str:
    return f"{max(r['errors'][category] for r in found):.1e}"


def _head() -> list[str]:
    return [
        "# Architectures: one device against the mesh",
        "",
        f"`python -m tests.bench.architectures --out tests/bench/architectures.md`, {time.strftime('%Y-%m-%d')}, "
        f"{platform.machine()}, {os.cpu_count()} cores, gloo ranks with one thread each, torch {torch.__version__}.",
        "",
        "Errors are those of `verify`: the largest difference of a tensor over its largest magnitude; float64 against",
        "one device, bfloat16 against float64. `bound`: of gradients. Parameters after an AdamW step are not judged",
        "in bfloat16. `work`, `held`: operations counted and parameters held by the busiest rank, over one device's.",
        "`no rule`: ops with operands that are kept whole for want of a rule. `memory=0.8`: the planner must do with",
        "four fifths of what its free plan takes.",
        "",
        "| model | mode | dtype | plan | loss | outputs | gradients | parameters | buffers | bound | degrees | work | "
        "held | no rule | right |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main()
