"""A fused group as a module of a lowered graph: its kernel on a GPU, its ATen ops elsewhere.

Enters: the tensors that the group reads, in the order of `inputs`. Leaves: a tuple of its outputs, laid out as the ATen
ops would. A kernel that fails to build is given up for good, with one warning that names it; the group then runs as its
ATen ops.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.codegen import tune
from autopar.codegen.code import Code
from autopar.codegen.load import launch, load
from autopar.runtime.exported import OtherLayout, key_words, laid_out

MODES = ("aten", "kernel", "interpreter")
TORCH_KINDS = {"f32": torch.float32, "f64": torch.float64, "i32": torch.int32, "i64": torch.int64}


class FusedGroup(nn.Module):
    """See the module docstring. mode: "aten", "kernel" (inputs on a GPU) or "interpreter" (slow: for tests)."""

    def __init__(self, aten: GraphModule, code: Code, mode: str) -> None:
        super().__init__()
        self.aten, self.code, self.mode, self.tuned = aten, code, mode, not tune.wanted()

    def forward(self, *inputs: Tensor) -> Any:
        if self.mode == "aten":
            return self.aten(*inputs)
        if any(inputs[place].tolist()[1] >> 31 for place in self.code.keys):
            return self.aten(*inputs)  # elements so far on that the kernel's 32-bit index would wrap
        try:
            if self.mode == "kernel" and not self.tuned:
                self.tuned, self.code = True, tune.tuned(self.code, lambda code: run(code, inputs))
            return run(self.code, inputs, interpret=self.mode == "interpreter")
        except OtherLayout:
            return self.aten(*inputs)
        except Exception as error:
            said = next((line for line in str(error).splitlines() if line.strip()), "")
            warnings.warn(
                f"kernel {self.code.name} failed ({type(error).__name__}: {said:.200}); its ops run one by one",
                stacklevel=2,
            )
            self.mode = "aten"
            return self.aten(*inputs)


def run(
    code: Code, inputs: tuple[Tensor, ...], *, interpret: bool = False, into: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Allocate the outputs and launch the kernel. into: write there instead, an output after the other, in the kernel's
    strides; an input may be among them where each element is made of its own place alone.

    Raises: what Triton raises when a kernel does not build.
    """
    kernel, printed = code.kernel, code.printed
    module = load(printed.text, interpret=interpret)
    named: dict[str, Any] = {}
    for i, place in enumerate(code.reads):
        named[f"x{i}"] = laid_out(inputs[place], kernel.buffers[i].strides)
    device = inputs[code.reads[0]].device if code.reads else torch.device("cpu")
    outputs = [
        torch.empty_strided(b.shape, b.strides, dtype=b.dtype, device=device) for b in kernel.buffers[kernel.inputs :]
    ]
    for place, given in zip(code.writes, into, strict=bool(into)):
        outputs[place] = given
    named |= {f"y{i}": y for i, y in enumerate(outputs)}
    for i, (shape, kind) in enumerate(printed.partials):
        named[f"p{i}"] = torch.empty(shape, dtype=TORCH_KINDS[kind], device=device)
    for i, place in enumerate(code.keys):
        named[f"k{i}"], named[f"l{i}"] = key_words(inputs[place])
    with torch.no_grad():
        for step in printed.launches:
            args = tuple(named[a] for a in step.args)
            launch(getattr(module, step.function), step.grid, args, step.warps, interpret=interpret)
    return tuple(outputs[place] for place in code.writes)
