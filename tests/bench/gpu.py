"""One GPU: eager, torch.compile and our three backends on the same models, bf16; time, memory, predicted and measured.

usage: python tests/bench/gpu.py [--steps 20] [--models gpt2-medium,llama-1b] [--batch 8] [--seq 1024]
Prints a Markdown table with the card and the date: median and spread of forward, backward and a fused AdamW step,
tokens a second, peak memory. Says so and ends where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
VOCAB = {"gpt2-medium": 50304, "llama-1b": 32000}
BACKENDS = ("eager", "aot", "inductor")
PROFILES = {"H200": "h200-sxm", "H100": "h100-sxm", "A100": "a100-sxm-80gb", "B200": "b200"}
"""Part of the card's name -> hardware profile."""


def model_of(name: str, seq: int) -> nn.Module:
    from autopar.models import GPT, GPTConfig, Llama, LlamaConfig

    torch.manual_seed(0)
    if name == "gpt2-medium":
        return GPT(GPTConfig(vocab=VOCAB[name], context=seq, layers=24, heads=16, width=1024, ff_width=4096))
    if name == "llama-1b":
        sizes = {"vocab": VOCAB[name], "context": seq, "layers": 16, "heads": 32, "kv_heads": 8}
        return Llama(LlamaConfig(**sizes, width=2048, ff_width=5632))
    raise SystemExit(f"no model {name!r}; there are {', '.join(VOCAB)}")


def kinds(name: str, inputs: tuple[torch.Tensor, ...], seq: int) -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """By kind a function that makes the module, and its plan or None."""
    import autopar

    card = torch.cuda.get_device_name()
    profile = next((p for part, p in PROFILES.items() if part in card), "h100-sxm")

    def plain() -> nn.Module:
        return model_of(name, seq).to("cuda", torch.bfloat16)

    def ours(backend: str) -> tuple[nn.Module, Any]:
        m = autopar.parallelize(plain(), autopar.Mesh("1", device=profile), example_args=inputs, backend=backend)
        return m, m.plan

    return {
        "PyTorch eager": lambda: (plain(), None),
        "torch.compile": lambda: (torch.compile(plain()), None),
        **{f"autopar {b}": lambda b=b: ours(b) for b in BACKENDS},  # type: ignore[misc]
    }


def measure(module: nn.Module, inputs: tuple[torch.Tensor, ...], steps: int) -> tuple[list[float], int]:
    """Seconds of each step after a warm-up, and the peak bytes."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        module(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times, torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="gpt2-medium,llama-1b")
    for name, default in (("steps", 20), ("batch", 8), ("seq", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}, bf16, ", end="")
    print(f"batch {options.batch} x {options.seq}\n")
    print("| model | kind | median s | 10 % to 90 % | tokens/s | peak GiB | predicted s | predicted GiB |")
    print("|" + "---|" * 8)
    for name in options.models.split(","):
        shape = options.batch, options.seq
        inputs = tuple(torch.randint(0, VOCAB[name], shape, device="cuda") for _ in range(2))
        for kind, make in kinds(name, inputs, options.seq).items():
            module, plan = make()
            times, peak_bytes = measure(module, inputs, options.steps)
            tenths = statistics.quantiles(times, n=10)
            median = statistics.median(times)
            told = ["", ""]
            if plan is not None:
                gib = plan.predicted["peak_memory_bytes"][0] / 2**30
                told = [f"{plan.predicted['step_time_s']:.4f}", f"{gib:.1f}"]
            spread = f"{tenths[0]:.4f} to {tenths[-1]:.4f}"
            figures = [
                f"{median:.4f}",
                spread,
                f"{options.batch * options.seq / median:,.0f}",
                f"{peak_bytes / 2**30:.1f}",
            ]
            print("| " + " | ".join([name, kind, *figures, *told]) + " |", flush=True)
            del module
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
