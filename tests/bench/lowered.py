"""The full product of what lowered training composes, as a table: errors, bytes by role, what is saved.

usage: python tests/bench/lowered.py [--world 2] [--pairwise] [--zero 0 1 2 3] > table.md
ZeRO 0-3 x recompute none, selective, full x accumulation 1, 2 x the model's own float64, bf16 with fp32 master weights,
parameters offloaded (in float64); a small GPT, three steps of AdamW, against one device in float64 (for bf16 beside it
one device in bf16). Weights, gradients and optimizer are bytes of a rank (offloaded: of its host memory), measured over
predicted; saved are bytes that the lowered forward says it keeps, and in the run what autograd was handed.
Every row is held to the bounds of `tests/end_to_end/test_lowered.py`; one that breaks them ends the run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def row(case: dict[str, Any]) -> str:
    held, errors, rough = case["bytes"], case["errors"], case["rough"]
    states = case["predicted"]["host" if case["precision"] == "offload" else "parameters_gradients_optimizer"]
    predicted = states * (16 / 18 if case["precision"] == "bf16" else 1)
    over = sum(held.values()) / predicted
    bf16 = case["precision"] == "bf16"
    told = [f"{errors[k]:.1e}" + (f" ({rough[k]:.1e})" if bf16 else "") for k in ("losses", "grads")]
    told.append("" if bf16 else f"{errors['parameters']:.1e}")
    factors = [str(case[k]) for k in ("zero", "recompute", "accumulate", "precision")]
    sizes = [f"{held[k]:,}" for k in ("weights", "gradients", "optimizer")]
    return (
        "| "
        + " | ".join([*factors, *told, *sizes, f"{over:.3f}", f"{case['saved_bytes']:,}", f"{case['saved_in_run']:,}"])
        + " |"
    )


def main() -> None:
    from autopar.runtime.launch import CAPTURE, run_ranks_local
    from tests.end_to_end.lowered import PRODUCT, pairwise
    from tests.end_to_end.test_lowered import check, check_saved

    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--pairwise", action="store_true", help="the few in which any two values meet")
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1, 2, 3], help="these levels only")
    options = parser.parse_args()
    cases = [c for c in (pairwise() if options.pairwise else PRODUCT) if c["zero"] in options.zero]
    payload = {"mesh": str(options.world), "cases": cases}
    preload = (*CAPTURE, "functorch.compile")
    ranks = run_ranks_local("tests.end_to_end.lowered:run_cases", options.world, payload, 3000, preload=preload)
    print(
        "| zero | recompute | accumulate | precision | loss | gradients | parameters | weights | gradients held |",
        end="",
    )
    print(" optimizer | measured / predicted | saved | saved in the run |")
    print("|" + "---|" * 13)
    for case in ranks[0]:
        print(row(case))
    for found in ranks:
        check(found)
        if not options.pairwise:
            check_saved(found)


if __name__ == "__main__":
    main()
