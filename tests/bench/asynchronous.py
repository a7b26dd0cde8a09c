"""Loss of a small GPT trained through a pipeline of four stages, synchronous and asynchronous, as a picture.

    python -m tests.bench.asynchronous [--steps 400] [--rates 5e-3] [--out tests/bench/asynchronous.png]

A panel for each learning rate: the larger the steps, the more it matters that gradients are old. In a panel same
weights, same mini-batches, same AdamW; four local processes. Text is drawn from a random chain in which a symbol
depends on the two before it, so the least loss is known: the chain's entropy. The loss of a mini-batch stands at its
own number, however many calls later an asynchronous pipeline gave it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.models import GPT, GPTConfig
from autopar.runtime.launch import CAPTURE, run_ranks_local

STAGES, BATCH, SEQ, VOCAB = 4, 16, 32, 16
SMOOTH = 15
RUNS = (
    ("1F1B: none", "1f1b", 4),
    ("2BW: 1 on every stage", "2bw", 4),
    ("PipeDream, 4 micro-batches: 1, 1, 1, 0 at most", "async-1f1b", 4),
    ("PipeDream, 1 micro-batch: 3, 2, 1, 0 by stage", "async-1f1b", 1),
)
"""(label, schedule, micro-batches)."""
COLOURS = ("#222222", "#4c78a8", "#4f9d69", "#e68613")


def chain() -> torch.Tensor:
    """[VOCAB, VOCAB, VOCAB] chances of the next symbol after two."""
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(3 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64), -1)


def text(chances: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [rows, length]."""
    found = [torch.randint(VOCAB, (rows,), generator=generator) for _ in range(2)]
    while len(found) < length:
        found.append(torch.multinomial(chances[found[-2], found[-1]], 1, generator=generator)[:, 0])
    return torch.stack(found, 1)


def entropy(chances: torch.Tensor) -> float:
    """Nats a symbol, in the long run."""
    pairs = torch.full((VOCAB, VOCAB), VOCAB**-2, dtype=torch.float64)
    for _ in range(500):
        pairs = torch.einsum("ab,abc->bc", pairs, chances)
    return float(-(pairs[..., None] * chances * chances.log()).sum())


def train(payload: Mapping[str, Any]) -> list[list[float]]:
    """On each rank. Returns: for each run the loss of each mini-batch."""
    torch.set_num_threads(1)
    return [_train(schedule, microbatches, payload["rate"], payload["steps"]) for _, schedule, microbatches in RUNS]


def _train(schedule: str, microbatches: int, rate: float, steps: int) -> list[float]:
    torch.manual_seed(0)
    config = GPTConfig(vocab=VOCAB, context=SEQ, layers=4, heads=4, width=32, ff_width=64)
    model = GPT(config, batch=BATCH, seq=SEQ, device="cpu")
    chances, generator = chain(), torch.Generator().manual_seed(1)
    rows = [text(chances, BATCH, SEQ + 1, generator) for _ in range(steps)]
    batches = [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows]
    pin = {"pp": STAGES, "schedule": schedule, "microbatches": microbatches}
    m = autopar.parallelize(model, str(STAGES), example_args=batches[0], pin=pin)
    optimizer = torch.optim.AdamW(m.parameters(), lr=rate)
    losses = []
    for batch in batches:
        loss = m(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[max(m.plan.predicted.get("staleness", (0,))) :]


def smooth(values: Sequence[float]) -> list[float]:
    """Means of the last `SMOOTH`, from where there are as many."""
    return [sum(values[i - SMOOTH : i]) / SMOOTH for i in range(SMOOTH, len(values) + 1)]


def draw(losses: Mapping[float, Sequence[Sequence[float]]], least: float, path: Path) -> None:
    """The picture: a panel for each learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (3 + 4.5 * len(losses), 4.8)
    figure, (panels,) = pyplot.subplots(1, len(losses), figsize=size, dpi=110, sharey=True, squeeze=False)
    for (rate, runs), axes in zip(losses.items(), panels, strict=True):
        for (label, _, _), colour, values in zip(RUNS, COLOURS, runs, strict=True):
            axes.plot(range(1, len(values) + 1), values, color=colour, alpha=0.15, linewidth=0.8)
            even = smooth(values)
            axes.plot(range(SMOOTH, SMOOTH + len(even)), even, color=colour, linewidth=1.6, label=label)
        axes.axhline(least, color="#888888", linestyle=":", linewidth=1.2, label="entropy of the text")
        axes.set_xlim(0, max(map(len, runs)))
        axes.set_xlabel("mini-batch")
        axes.set_title(f"AdamW, learning rate {rate:g}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    panels[0].set_ylabel("loss, nats a symbol")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, ncols=2, loc="lower center")
    figure.suptitle("A GPT on four pipeline stages; how many updates its gradients are behind", fontsize=11)
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(path)


def main() -> None:
    """Train, draw, print the mean loss of the last 50 mini-batches that all runs tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-3])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--data", type=Path, help="losses as JSON, by learning rate: those in it are not made again")
    given = parser.parse_args()
    known = json.loads(given.data.read_text()) if given.data is not None and given.data.exists() else {}
    losses = {}
    for rate in given.rates:
        if str(rate) not in known:
            payload = {"steps": given.steps, "rate": rate}
            target = "tests.bench.asynchronous:train"
            known[str(rate)] = run_ranks_local(target, STAGES, payload, 1200, preload=CAPTURE)[0]
            if given.data is not None:
                given.data.write_text(json.dumps(known))
        losses[rate] = known[str(rate)]
    least = entropy(chain())
    draw(losses, least, given.out)
    for rate, runs in losses.items():
        end = min(map(len, runs))
        print(f"learning rate {rate:g}: mean loss of mini-batches {end - 49} to {end} (entropy {least:.3f})")
        for (label, _, _), values in zip(RUNS, runs, strict=True):
            print(f"{sum(values[end - 50 : end]) / 50:.3f}  {label}")


if __name__ == "__main__":
    main()
