"""A random model as data: lines of Python that declare, compute and return, so that it can be run, shrunk and printed.

Values are named `v0`, `v1`, ..., inputs `x0`, ..., what the module owns `self.p0` (parameters), `self.b0` (buffers) and
`self.m0` (submodules). A step is one or more lines; its `outs` are the values that later steps may read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_VALUE = re.compile(r"\b[vx]\d+\b")
_OWNED = re.compile(r"\bself\.([pbm]\d+)\b")


@dataclass(frozen=True, slots=True)
class Step:
    lines: tuple[str, ...]
    outs: tuple[str, ...]
    """Empty for a step that is made for its effect (a write to a buffer or into a value)."""

    @property
    def reads(self) -> set[str]:
        return {name for line in self.lines for name in _VALUE.findall(line)} - set(self.outs)


@dataclass(frozen=True, slots=True)
class Recipe:
    seed: int
    training: bool
    inputs: tuple[tuple[str, str], ...]
    """(name, expression that makes it)."""
    declarations: tuple[tuple[str, str], ...]
    """(name, line that makes it) of each owned tensor or module; the line of a tie names another."""
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def source(self) -> str:
        """The model and its inputs as Python; defines `Model` and `make_inputs`."""
        names = ", ".join(name for name, _ in self.inputs)
        forward = [line for step in self.steps for line in step.lines]
        made = [f"    {name} = {expression}" for name, expression in self.inputs]
        return "\n".join(
            [
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for _, line in self.declarations),
                "",
                f"    def forward(self, {names}):",
                *(f"        {line}" for line in forward),
                f"        return ({', '.join(self.outputs)},)",
                "",
                "",
                "def make_inputs():",
                *made,
                f"    return ({names},)",
                "",
            ]
        )

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The module in float64 and its inputs; the same numbers each time."""
        space: dict[str, Any] = namespace()
        exec(compile(self.source(), f"<fuzz {self.seed}>", "exec"), space)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            previous = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                return space["Model"]().train(self.training), space["make_inputs"]()
            finally:
                torch.set_default_dtype(previous)

    def pruned(self) -> Recipe:
        """Without steps, declarations and inputs that nothing reads."""
        live, kept = set(self.outputs), []
        for step in reversed(self.steps):
            if not step.outs or live & set(step.outs):
                kept.append(step)
                live |= step.reads
        kept.reverse()
        owned = {name for step in kept for line in step.lines for name in _OWNED.findall(line)}
        declarations = []
        for name, line in reversed(self.declarations):
            if name in owned:
                declarations.append((name, line))
                owned |= set(_OWNED.findall(line))
        inputs = tuple((name, e) for name, e in self.inputs if name in live)
        inputs = inputs or self.inputs[:1]
        return replace(self, steps=tuple(kept), declarations=tuple(reversed(declarations)), inputs=inputs)


def namespace() -> dict[str, Any]:
    """What a recipe's lines may name."""
    return {"torch": torch, "nn": nn, "F": F}
