"""What a group runs as: its kernel, the printed source, and which of the group's tensors are which arguments."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.codegen.kernel import Kernel
from autopar.codegen.triton_text import Printed


@dataclass(frozen=True, eq=False)
class Code:
    """reads: for each read buffer of the kernel its place among the group's inputs; keys alike;
    writes: for each output of the group its place among the written buffers."""

    kernel: Kernel
    printed: Printed
    reads: tuple[int, ...]
    keys: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.printed.launches[0].function
