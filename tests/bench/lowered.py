"""The full product of what lowered training composes, as a table: errors, bytes by role, what is saved.

usage: python tests/bench/lowered.py [--world 2] [--pairwise] > table.md
ZeRO 0-3 x recompute none, selective, full x accumulation 1, 2 x the model's own float64, bf16 with fp32 master weights;
a small GPT, three steps of AdamW, against one device in float64 (for bf16 beside it one device in bf16).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def row(case: dict[str, Any]) -> str:
    held, errors, rough = case["bytes"], case["errors"], case["rough"]
    predicted = case["predicted"]["parameters_gradients_optimizer"] * (16 / 18 if case["precision"] == "bf16" else 1)
    over = sum(held.values()) / predicted
    bf16 = case["precision"] == "bf16"
    told = [f"{errors[k]:.1e}" + (f" ({rough[k]:.1e})" if bf16 else "") for k in ("losses", "grads")]
    told.append("" if bf16 else f"{errors['parameters']:.1e}")
    factors = [str(case[k]) for k in ("zero", "recompute", "accumulate", "precision")]
    sizes = [f"{held[k]:,}" for k in ("weights", "gradients", "optimizer")]
    return "| " + " | ".join([*factors, *told, *sizes, f"{over:.3f}", f"{case['saved_bytes']:,}"]) + " |"


def main() -> None:
    from autopar.runtime.launch import CAPTURE, run_ranks_local
    from tests.end_to_end.lowered import PRODUCT, pairwise

    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--pairwise", action="store_true", help="the few in which any two values meet")
    options = parser.parse_args()
    world, cases = options.world, pairwise() if options.pairwise else PRODUCT
    payload = {"mesh": str(world), "cases": cases}
    preload = (*CAPTURE, "functorch.compile")
    found = run_ranks_local("tests.end_to_end.lowered:run_cases", world, payload, 3000, preload=preload)[0]
    print(
        "| zero | recompute | accumulate | precision | loss | gradients | parameters | weights | gradients held |",
        end="",
    )
    print(" optimizer | measured / predicted | saved |")
    print("|" + "---|" * 12)
    for case in found:
        print(row(case))


if __name__ == "__main__":
    main()
