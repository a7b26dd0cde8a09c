"""Every kernel of two language models at their real sizes, compiled without a GPU: `python -m tests.bench.kernels`.

Writes tests/bench/kernels.md: for each kernel and architecture what the assembler says (registers, spills), whether
memory is read 16 bytes at a time, and the bytes that its group moves over the least possible. Times are not measured
here; `gpu_kernels.py` does that on a GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autopar.codegen.code import Code
from autopar.codegen.group import FusedGroup
from autopar.codegen.load import load
from autopar.codegen.tiles import extra_bytes, moved_bytes
from autopar.codegen.triton_text import Launch
from autopar.models import GPT, GPTConfig, Llama, LlamaConfig
from autopar.passes.fuse import Fuse
from tests.bench import long_rows
from tests.codegen.lowered import lower_model

CUDA = (80, 90, 100)
HIP = ("gfx942",)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
INTERPRETED = "# Kernels in the interpreter"
"""Where the part of the file that `kernels_run` writes begins."""
PARTIALS = {"f32": "*fp32", "f64": "*fp64", "i32": "*i32", "i64": "*i64"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a function became. target: "sm_80" or the like; registers and spills are None where no assembler tells."""

    target: str
    registers: int | None
    spilled_bytes: int | None
    widest_load_bytes: int
    text: str


def signature(code: Code, launch: Launch) -> dict[str, str]:
    """Triton's types of a function's arguments."""
    kernel, found = code.kernel, {}
    for arg in launch.args:
        number = int(arg[1:])
        if arg[0] in "kl":
            found[arg] = "i32"
        elif arg[0] == "p":
            found[arg] = PARTIALS[code.printed.partials[number][1]]
        else:
            found[arg] = TYPES[kernel.buffers[number + (kernel.inputs if arg[0] == "y" else 0)].dtype]
    return found


def compile_function(code: Code, launch: Launch, target: GPUTarget) -> Any:
    """Triton's result for buffers that begin at multiples of 16 bytes, as torch allocates them."""
    function = getattr(load(code.printed.text), launch.function)
    types = signature(code, launch)
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(function, types, {}, aligned)
    return triton.compile(source, target=target, options={"num_warps": launch.warps, "enable_fp_fusion": True})


def for_cuda(code: Code, launch: Launch, capability: int) -> Compiled:
    ptx = compile_function(code, launch, GPUTarget("cuda", capability, 32)).asm["ptx"]
    report = assemble(ptx, capability)
    registers = int(re.search(r"Used (\d+) registers", report).group(1))  # type: ignore[union-attr]
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return Compiled(f"sm_{capability}", registers, spilled, widest_load(ptx), ptx)


def assemble(ptx: str, capability: int) -> str:
    """The assembler's report."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "kernel.ptx"
        file.write_text(ptx)
        name = re.search(r"\.target (\w+)", ptx).group(1)  # type: ignore[union-attr]
        tool = folder / ("ptxas-blackwell" if capability >= 90 else "ptxas")
        command = [
            str(tool),
            "-v",
            f"--gpu-name={name}",
            str(file),
            "-o",
            str(Path(scratch) / "cubin"),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def widest_load(ptx: str) -> int:
    """Bytes of the widest read from memory."""
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max((int(n or 1) * int(bits) // 8 for n, bits in loads), default=0)


def lowered(
    name: str, dtype: torch.dtype, batch: int, seq: int, device: str = "cpu", freeze: str = "", chunks: int = 1
) -> Any:
    """Graphs of two layers of a model at its real width; nothing is computed. freeze: parameters of such a name.
    chunks: parts of the rows in which logits are made."""
    with FakeTensorMode():
        model: nn.Module
        if name == "gpt2-medium":
            config = GPTConfig(vocab=50257, context=1024, layers=2, heads=16, width=1024, ff_width=4096)
            model = GPT(config, dtype=dtype, device=device)
        else:
            sizes = {"vocab": 128256, "layers": 2, "heads": 32, "kv_heads": 8, "width": 2048, "ff_width": 8192}
            model = Llama(LlamaConfig(context=seq, **sizes), dtype=dtype, device=device)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze or freeze not in path)
        ids = torch.zeros(batch, seq, dtype=torch.int64, device=device)
        return lower_model(model, (ids, ids), chunks=chunks)


def groups(
    name: str, dtype: torch.dtype, batch: int, seq: int, device: str = "cpu", mode: str = "aten"
) -> Iterator[tuple[str, FusedGroup]]:
    """(which graph, group) of all different kernels."""
    graphs, seen = lowered(name, dtype, batch, seq, device), set()
    for which in ("forward", "backward"):
        for group in Fuse(mode).run(getattr(graphs, which)).modules():
            if isinstance(group, FusedGroup) and group.code.printed.text not in seen:
                seen.add(group.code.printed.text)
                yield which, group


def byte_ratio(code: Code) -> float:
    """Bytes that the group moves over the least possible."""
    least = moved_bytes(code.kernel)
    return (least + extra_bytes(code.kernel, code.printed.tile)) / least


CASES = (
    ("gpt2-medium", torch.bfloat16, 8, 1024),
    ("gpt2-medium", torch.float32, 8, 1024),
    ("llama-1b", torch.bfloat16, 4, 2048),
    ("llama-1b", torch.float16, 4, 2048),
    ("llama-1b", torch.bfloat16, 3, 333),
)
"""(model, dtype, batch, sequence); the last one is no multiple of anything."""


def why_more(code: Code) -> str:
    """Why a group moves more than the least: what of the extra bytes is what."""
    if code.printed.tile.swept:
        return f"a row of {code.kernel.column_count} fits no program's registers: read once a sweep"
    return f"partial sums of {code.printed.tile.programs} programs"


def table() -> Iterator[str]:
    yield "# Kernels compiled without a GPU"
    yield ""
    yield (
        "Made by `python -m tests.bench.kernels`: triton " + triton.__version__ + ", its own ptxas. Two layers of each"
    )
    yield "model at its real width; kernels with equal text once. `bytes`: moved over the least possible (each input"
    yield "read once, each output written once). `load`: widest read, in bytes. Nothing here is a measured time."
    above: list[str] = []
    yield from _models(above)
    yield from _long_rows(above)
    yield "\n## Groups that move more than 1.05 of the least\n"
    yield from above or ["None."]


def _models(above: list[str]) -> Iterator[str]:
    for name, dtype, batch, seq in CASES:
        yield f"\n## {name}, {str(dtype).removeprefix('torch.')}, {batch} x {seq}\n"
        heads = [f"sm_{c} registers | spills | load" for c in CUDA]
        yield f"| graph | kernel | warps | bytes | {' | '.join(heads)} | {' | '.join(HIP)} |"
        yield "|---" * (4 + 3 * len(CUDA) + len(HIP)) + "|"
        for which, group in groups(name, dtype, batch, seq):
            yield from _compiled(group.code, which)
            _note(above, f"{name}, {which}", group.code)


def _long_rows(above: list[str]) -> Iterator[str]:
    yield "\n## Long rows\n"
    yield f"{long_rows.ROWS} rows, bfloat16 and float32. `swept`: a program loops over the columns of its row.\n"
    heads = [f"sm_{c} registers | spills | load" for c in CUDA]
    yield f"| what | columns | dtype | swept | graph | kernel | warps | bytes | {' | '.join((*heads, *HIP))} |"
    yield "|---" * (8 + 3 * len(CUDA) + len(HIP)) + "|"
    for dtype in (torch.bfloat16, torch.float32):
        for name, width, which, group in long_rows.groups(dtype):
            said = f"{name} | {width} | {str(dtype).removeprefix('torch.')}"
            swept = "yes" if group.code.printed.tile.swept else ""
            for line in _compiled(group.code, which):
                yield f"| {said} | {swept} {line}"
            _note(above, f"{said.replace(' | ', ', ')}, {which}", group.code)


def _note(above: list[str], where: str, code: Code) -> None:
    if byte_ratio(code) > 1.05:
        above.append(f"- {where}: `{code.name}` {byte_ratio(code):.2f}: {why_more(code)}")


def _compiled(code: Code, which: str) -> Iterator[str]:
    """A line for each function of a kernel."""
    for number, launch in enumerate(code.printed.launches):
        cells = [which, launch.function, str(launch.warps), "" if number else f"{byte_ratio(code):.3f}"]
        for capability in CUDA:
            made = for_cuda(code, launch, capability)
            cells += [str(made.registers), str(made.spilled_bytes), str(made.widest_load_bytes)]
        for architecture in HIP:
            compile_function(code, launch, GPUTarget("hip", architecture, 64))
            cells.append("compiles")
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    rest = given.out.read_text().partition(INTERPRETED) if given.out.exists() else ("", "", "")
    given.out.write_text("\n".join(lines) + "\n\n" + rest[1] + rest[2])


if __name__ == "__main__":
    main()
