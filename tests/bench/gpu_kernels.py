"""Generated kernels on a GPU: `python -m tests.bench.gpu_kernels FOLDER`, in less than ten minutes.

Writes FOLDER/kernels.json and FOLDER/kernels.md: for each kernel of two language models whether it equals its ops, and
its bandwidth as a share of a measured copy on the same device, beside torch.compile of the same ops; then the training
step of GPT-2 medium and of a Llama-1B stack in bf16: eager, torch.compile and autopar on one device, with peak memory.
Parts that would pass the time limit are left out and said so. Needs a GPU; CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

import autopar
from autopar.codegen.group import FusedGroup
from autopar.codegen.tiles import moved_bytes
from autopar.models import GPT, GPTConfig, Llama, LlamaConfig
from tests.bench.kernels import groups
from tests.codegen.compare import InFloat32, random_input, share

CASES = (
    ("gpt2-medium", torch.bfloat16, 8, 1024),
    ("llama-1b", torch.bfloat16, 4, 2048),
    ("llama-1b", torch.float32, 1, 1023),
)
"""(model, dtype, batch, sequence); the last one is no multiple of a tile."""
CACHE_BYTES = 2**28
"""[derived] written between two measurements, so that nothing is left in the second-level cache of any GPU."""
REPEATS = 20


def median_s(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds of a call on the device, its inputs not in the cache."""
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Bytes read and written each second by a copy of 1 GiB."""
    source = torch.empty(2**28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_s(lambda: target.copy_(source))


def kernel_row(which: str, group: FusedGroup, copy: float, compile_too: bool) -> dict[str, Any]:
    """Whether a kernel equals its ops, and its bandwidth."""
    generator = torch.Generator().manual_seed(0)
    places = [n for n in group.aten.graph.nodes if n.op == "placeholder"]
    inputs = tuple(random_input(n, generator).cuda() for n in places)
    row: dict[str, Any] = {"graph": which, "kernel": group.code.name, "bytes": moved_bytes(group.code.kernel)}
    try:
        wide = tuple(t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in inputs)
        for out, reference in zip(group(*inputs), InFloat32(group.aten).run(*wide), strict=True):
            share(out, reference, group.code.name)
        row["equal"] = group.mode == "kernel"
    except AssertionError as error:
        row["equal"], row["error"] = False, str(error)
    row["copy_share"] = row["bytes"] / median_s(lambda: group(*inputs)) / copy
    if compile_too:
        compiled = torch.compile(group.aten)
        row["compile_share"] = row["bytes"] / median_s(lambda: compiled(*inputs)) / copy
        torch._dynamo.reset()
    return row


def step_models() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Tensor, Tensor]]]:
    """(name, builder, batch) of the two training steps."""
    gpt = GPTConfig(vocab=50257, context=1024, layers=24, heads=16, width=1024, ff_width=4096)
    sizes = {"vocab": 128256, "layers": 16, "heads": 32, "kv_heads": 8, "width": 2048, "ff_width": 8192}
    llama = LlamaConfig(context=2048, **sizes)
    for name, build, vocab, batch, seq in (
        ("gpt2-medium", lambda: GPT(gpt, device="cuda", dtype=torch.bfloat16), 50257, 8, 1024),
        ("llama-1b", lambda: Llama(llama, device="cuda", dtype=torch.bfloat16), 128256, 4, 2048),
    ):
        ids = torch.randint(vocab, (batch, seq), device="cuda")
        yield name, build, (ids, ids.roll(-1, 1))


def ours(model: nn.Module, batch: tuple[Tensor, ...]) -> nn.Module:
    return autopar.parallelize(model, autopar.Mesh("1", device="h100-sxm"), example_args=batch, backend="aot")


WAYS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Any]] = {
    "eager": lambda model, batch: model,
    "torch.compile": lambda model, batch: torch.compile(model),
    "autopar": ours,
}


def step_row(name: str, way: str, build: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Seconds and peak bytes of a training step with AdamW."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    model = WAYS[way](build(), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    first = float(step())
    torch.cuda.reset_peak_memory_stats()
    step_s = median_s(step, 10)
    peak = torch.cuda.max_memory_allocated() - CACHE_BYTES
    torch._dynamo.reset()
    return {"model": name, "way": way, "first_loss": first, "step_s": step_s, "peak_bytes": peak}


def table(found: dict[str, Any]) -> Iterator[str]:
    yield "# Generated kernels on a GPU"
    yield f"\n{found['device']}, torch {found['torch']}, triton {found['triton']}, {found['date']}."
    yield f"A copy on the device moves {found['copy_bytes_per_s'] / 1e9:.0f} GB/s; shares are of that.\n"
    yield "| model | graph | kernel | equal | share of copy | torch.compile |\n|---|---|---|---|---|---|"
    for row in found["kernels"]:
        beside = f"{row['compile_share']:.2f}" if "compile_share" in row else ""
        equal = "yes" if row["equal"] else f"no: {row.get('error', 'it fell back')}"
        yield f"| {row['model']} | {row['graph']} | {row['kernel']} | {equal} | {row['copy_share']:.2f} | {beside} |"
    yield "\n| model | way | step, ms | peak, GiB | first loss |\n|---|---|---|---|---|"
    for row in found["steps"]:
        figures = f"{row['step_s'] * 1e3:.1f} | {row['peak_bytes'] / 2**30:.2f} | {row['first_loss']:.4f}"
        yield f"| {row['model']} | {row['way']} | {figures} |"
    yield from (f"\nLeft out: {what}" for what in found["left_out"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=480, metavar="SECONDS")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels needs a GPU", file=sys.stderr)
        return 1
    started = time.perf_counter()
    given.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "copy_bytes_per_s": copy_bytes_per_s(), "kernels": [], "steps": [],
        "left_out": [],
    }  # fmt: skip

    def write() -> None:  # after each figure: a run that is cut short keeps what it has
        (given.folder / "kernels.json").write_text(json.dumps(found, indent=1))
        (given.folder / "kernels.md").write_text("\n".join(table(found)) + "\n")

    def late(share: float) -> bool:
        return time.perf_counter() - started > share * given.limit

    for name, build, batch in step_models():
        for way in WAYS:
            if late(0.6):
                found["left_out"].append(f"{way} step of {name}")
                continue
            try:
                found["steps"].append(step_row(name, way, build, batch))
            except Exception as error:  # one way that fails must not cost the others' figures
                found["left_out"].append(f"{way} step of {name}: {type(error).__name__}: {error!s:.200}")
            write()
    for name, dtype, rows, seq in CASES:
        for which, group in groups(name, dtype, rows, seq, "cuda", "kernel"):
            if late(1.0):
                found["left_out"].append(f"{group.code.name} of {name}")
                continue
            found["kernels"].append(
                {"model": name, **kernel_row(which, group, found["copy_bytes_per_s"], not late(0.85))}
            )
            write()
    write()
    print((given.folder / "kernels.md").read_text())
    return 0 if all(row["equal"] for row in found["kernels"]) else 1


if __name__ == "__main__":
    sys.exit(main())
