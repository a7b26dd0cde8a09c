"""The kernels of an exported file: each printed text once, and a function for each group that launches it.

Enters: the code of fused groups. Leaves: source text, and the names of the functions. Equal groups share a function,
equal helpers of kernels are printed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.codegen.code import Code
from autopar.codegen.group import TORCH_KINDS


class Kernels:
    """All kernels of one file."""

    def __init__(self) -> None:
        self.blocks: dict[str, str] = {}
        """A kernel or helper without its name -> its name here."""
        self.texts: list[str] = []
        self.functions: dict[tuple[str, tuple[object, ...]], str] = {}
        self.wrappers: list[str] = []

    def function(self, code: Code) -> str:
        """The name of the function that runs this group."""
        kernel = code.kernel
        buffers = tuple((b.shape, b.strides, b.dtype) for b in kernel.buffers)
        key = (code.printed.text, (code.reads, code.keys, code.writes, buffers))
        if key not in self.functions:
            self.functions[key] = name = f"run_{code.name}" + (f"_{len(self.functions)}" if self.functions else "")
            self.wrappers.append("\n".join(self._wrapper(name, code)))
        return self.functions[key]

    @staticmethod
    def helpers(code: Code) -> set[str]:
        """What the function of a group imports of `autopar.runtime.exported`."""
        return {"laid_out"} | ({"key_words"} if code.keys else set())

    def text(self) -> Iterator[str]:
        """Every kernel, then every function; empty without kernels."""
        for block in (*self.texts, *self.wrappers):
            yield ""
            yield ""
            yield block

    def _named(self, text: str) -> dict[str, str]:
        """The functions of a printed text: their names there -> their names here."""
        blocks = ["@triton.jit" + b.rstrip() for b in text.split("@triton.jit")[1:]]
        found = {}
        for block in blocks:
            match = re.search(r"^def (\w+)", block, re.MULTILINE)
            assert match is not None
            name = match.group(1)
            if block not in self.blocks:
                taken = set(self.blocks.values())
                here = name if name not in taken else f"{name}_{len(taken)}"
                self.blocks[block] = here
                self.texts.append(re.sub(rf"\b{name}\b(?=\()", here, block))
            found[name] = self.blocks[block]
        return found

    def _wrapper(self, name: str, code: Code) -> Iterator[str]:
        kernel, printed = code.kernel, code.printed
        named = self._named(printed.text)
        places = sorted({*code.reads, *code.keys})
        yield f"def {name}({', '.join(f'v{p}' for p in range(max(places, default=-1) + 1))}):"
        for i, place in enumerate(code.reads):
            yield f"    x{i} = laid_out(v{place}, {kernel.buffers[i].strides})"
        for i, place in enumerate(code.keys):
            yield f"    k{i}, l{i} = key_words(v{place})"
        device = "x0.device" if code.reads else "DEVICE"
        for i, b in enumerate(kernel.buffers[kernel.inputs :]):
            yield f"    y{i} = torch.empty_strided({b.shape}, {b.strides}, dtype={b.dtype}, device={device})"
        for i, (shape, kind) in enumerate(printed.partials):
            yield f"    p{i} = torch.empty({shape}, dtype={TORCH_KINDS[kind]}, device={device})"
        for step in printed.launches:
            launch = f"num_warps={step.warps}, enable_fp_fusion=True"
            yield f"    {named[step.function]}[{step.grid}]({', '.join(step.args)}, {launch})"
        results = [f"y{place}" for place in code.writes]
        yield f"    return {', '.join(results)}{',' if len(results) == 1 else ''}"
