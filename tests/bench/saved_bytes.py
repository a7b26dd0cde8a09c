"""Saved activations, predicted and real: what the planner charges against what the lowered forward keeps, one device.

    python -m tests.bench.saved_bytes [--models gpt llama] [--sizes tiny medium] [--detail]

Nothing is computed: models are on meta, graphs are traced on fake tensors. Predicted is the plan's
`memory.activations`; real is `Graphs.saved_bytes`, plus for recomputing levels what one block makes again: what it
would save without recomputing, less what it does save (such values live one block at a time, and are charged so).
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from autopar import Mesh
from autopar.compiled import Compiled
from autopar.cost.hardware import load_profile
from autopar.models import GPT, GPTConfig, Llama, LlamaConfig
from autopar.passes.lower import Graphs
from autopar.pins import parse_pins
from autopar.pipeline import Prepared, carry_out, choose, lower, prepare
from autopar.program import record
from autopar.solver.settings import Settings

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 3, "heads": 4, "width": 64, "vocab": 128, "context": 32},
    "medium": {"layers": 6, "heads": 8, "width": 512, "vocab": 8192, "context": 256},
}
LEVELS = ("none", "selective", "full")


@dataclass(frozen=True)
class Row:
    model: str
    size: str
    level: str
    predicted_bytes: float
    saved_bytes: float
    again_bytes: float
    graphs: Graphs
    prepared: Prepared

    @property
    def real_bytes(self) -> float:
        return self.saved_bytes + self.again_bytes

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of what is real."""
        return self.predicted_bytes / self.real_bytes - 1


def model_of(name: str, size: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    s = SIZES[size]
    common: dict[str, Any] = {"batch": 8, "device": "meta", "dtype": dtype}
    if name == "gpt":
        return GPT(GPTConfig(ff_width=4 * s["width"], **s), **common)
    return Llama(LlamaConfig(kv_heads=s["heads"] // 2, ff_width=3 * s["width"], **s), **common)


def measure(name: str, size: str, levels: tuple[str, ...] = LEVELS) -> list[Row]:
    """A row for each level of recomputation."""
    model, profile = model_of(name, size), load_profile("cpu")
    args, kwargs = model.example_inputs()  # type: ignore[operator]
    prepared = prepare(model, args, kwargs, name=name, outputs="auto")
    rows: list[Row] = []
    whole: Counter[str] = Counter()
    for level in levels:
        settings = Settings(parse_pins({"recompute": level}), 2**60)
        plan = choose(prepared, Mesh("1"), profile, settings, recompute=(level,))
        found, decisions = carry_out(prepared, plan, profile, settings)
        blocks = {b: plan.recompute.get(c.name, "none") for c in prepared.program.classes for b in c.blocks}
        lowered = lower(
            prepared, decisions, found.mesh, profile, (), torch.device("cpu"), backend="aot", recompute=blocks
        )
        assert isinstance(lowered.run, Compiled)
        with FakeTensorMode(allow_non_fake_inputs=True):  # tables that depend on nothing are made when it is lowered
            lowered.run(*fake_inputs(prepared))
        (graphs,) = lowered.run.graphs
        predicted = plan.predicted["memory"]["activations"]
        mine = by_block(graphs)
        whole = whole or mine
        again = max(whole[b] - mine[b] for b in whole)
        rows.append(Row(name, size, level, predicted, graphs.saved_bytes, again, graphs, prepared))
    return rows


def by_block(graphs: Graphs) -> Counter[str]:
    """Saved bytes of each block."""
    out: Counter[str] = Counter()
    for node in graphs.backward.graph.nodes:
        if node.name in graphs.saved:
            out[record(node).block] += graphs.saved[node.name]
    return out


def fake_inputs(prepared: Prepared) -> list[torch.Tensor]:
    """A tensor on the CPU for each placeholder; called under a fake mode, so without memory."""
    parts, dtypes = prepared.analysis.parts, prepared.analysis.dtypes
    return [
        torch.empty(parts[s.node].shape, dtype=dtypes[s.node], requires_grad=s.trainable)
        for s in prepared.program.sources
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "llama"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--detail", action="store_true")
    options = parser.parse_args()
    print(f"{'model':8}{'size':8}{'recompute':12}{'predicted MB':>14}{'real MB':>12}{'error':>8}   saved + made again")
    for name in options.models:
        for size in options.sizes:
            for row in measure(name, size):
                sizes = f"{row.predicted_bytes / 1e6:14.3f}{row.real_bytes / 1e6:12.3f}{100 * row.error:7.1f}%"
                print(
                    f"{name:8}{size:8}{row.level:12}{sizes}   {row.saved_bytes / 1e6:.3f} + {row.again_bytes / 1e6:.3f}"
                )
                if options.detail:
                    for saved, size_bytes in row.graphs.saved.items():
                        print(f"    {saved}: {size_bytes:,}")


if __name__ == "__main__":
    main()
