"""Draw a random model: what holds the values so far and makes parameters, buffers, inputs and steps for the tables of
`steps.py` and `lines.py`.

Each step runs once when it is drawn, so a line that torch refuses is dropped at once and shapes need no rules of ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.recipe import Recipe, Step, namespace

LARGEST = 3000
"""Elements a value may have: small enough for thousands of pairs."""


class Skip(Exception):
    """A template that finds nothing to work on."""


@dataclass
class Drawing:
    rng: random.Random
    seed: int
    module: nn.Module = field(default_factory=nn.Module)
    values: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    declarations: list[tuple[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        r = self.rng
        self.B, self.S = r.choice((2, 4, 4, 6, 8, 3, 5)), r.choice((2, 4, 4, 6, 8, 3))
        self.H = r.choice((2, 2, 4, 3))
        self.D = self.H * r.choice((2, 2, 4, 3))
        self.V = r.choice((8, 12, 10, 7))

    # what the module owns

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def declare(self, letter: str, expression: str) -> str:
        """`self.<name>` of a new parameter ("p") or submodule ("m")."""
        name = self.name(letter)
        self._own(name, f"self.{name} = {expression}")
        return f"self.{name}"

    def param(self, *shape: int, scale: float = 1.0) -> str:
        known = [
            n for n, p in self.module.named_parameters(recurse=False) if tuple(p.shape) == shape and p.requires_grad
        ]
        if known and self.rng.random() < 0.3:
            used = self.rng.choice(known)
            # used again, or under a second name
            return f"self.{used}" if self.rng.random() < 0.7 else self.declare("p", f"self.{used}")
        frozen = ", requires_grad=False" if self.rng.random() < 0.07 else ""
        times = f" * {scale:.3g}" if scale != 1.0 else ""
        return self.declare("p", f"nn.Parameter(torch.randn({_args(shape)}){times}{frozen})")

    def buffer(self, expression: str) -> str:
        name = self.name("b")
        persistent = ", persistent=False" if self.rng.random() < 0.3 else ""
        self._own(name, f"self.register_buffer('{name}', {expression}{persistent})")
        return f"self.{name}"

    def _own(self, name: str, line: str) -> None:
        exec(line, namespace() | {"self": self.module})
        self.declarations.append((name, line))

    def input(self, expression: str) -> str:
        name = self.name("x")
        self.inputs.append((name, expression))
        self.values[name] = eval(expression, namespace())
        return name

    def real(self, *shape: int) -> str:
        grad = ", requires_grad=True" if self.rng.random() < 0.3 else ""
        return self.input(f"torch.randn({_args(shape)}{grad})")

    def ids(self, high: int, *shape: int) -> str:
        """An integer input in [0, high)."""
        known = [
            n
            for n, _ in self.inputs
            if tuple(self.values[n].shape) == shape
            and not self.values[n].is_floating_point()
            and int(self.values[n].max()) < high
        ]
        if known and self.rng.random() < 0.5:
            return self.rng.choice(known)
        return self.input(f"torch.randint(0, {high}, {shape!r})")

    # what steps read

    def pick(self, *, least: int = 1, most: int = 5, where: Callable[[Tensor], bool] = lambda t: True) -> str:
        """A floating value with that many dims, the latest ones more often."""
        found = [
            n
            for n, t in self.values.items()
            if t.is_floating_point() and least <= t.dim() <= most and t.numel() and where(t)
        ]
        if not found:
            raise Skip
        weights = [i + 1.0 for i in range(len(found))]
        return self.rng.choices(found, weights)[0]

    def like(self, value: str) -> str:
        """Another value of the same shape, or a parameter of that shape."""
        shape = self.values[value].shape
        found = [n for n, t in self.values.items() if t.is_floating_point() and t.shape == shape and n != value]
        if found and self.rng.random() < 0.7:
            return self.rng.choice(found)
        return self.param(*shape)

    def shape(self, value: str) -> tuple[int, ...]:
        return tuple(self.values[value].shape)

    # steps

    def emit(self, *lines: str, outs: Iterable[str] | None = None, checked: bool = True) -> str:
        """Add a step; the last line may be an expression, which then is the one output. Returns the first output."""
        names: list[str] = list(outs) if outs is not None else []
        text = list(lines)
        if outs is None:
            names = [self.name("v")]
            text[-1] = f"{names[0]} = {text[-1]}"
        step = Step(tuple(text), tuple(names))
        space = namespace() | {"self": self.module} | self.values
        saved = {k: v.clone() for k, v in self.module.named_buffers()}
        with torch.no_grad():
            exec("\n".join(text), space)
            for k, v in saved.items():  # buffers start as declared
                self.module.get_buffer(k).copy_(v)
        made = {n: space[n] for n in names}
        for value in made.values():
            if not checked:
                continue
            if not isinstance(value, Tensor) or value.numel() > LARGEST or value.dim() > 6:
                raise Skip
            if value.is_floating_point() and not (
                value.isfinite().all() and value.abs().max() < 1e3 if value.numel() else False
            ):
                raise Skip
        self.values.update(made)
        self.steps.append(step)
        return names[0] if names else ""

    def result(self) -> Recipe:
        """Return a few values, and a loss of all that nothing has read."""
        read = {name for step in self.steps for name in step.reads}
        made = [n for step in self.steps for n in step.outs]
        ends = [n for n in made if n not in read] or made[-1:]
        kept = self.rng.sample(made, min(len(made), self.rng.choice((0, 0, 1, 2))))
        floating = [n for n in ends if self.values[n].is_floating_point()]
        outputs = list(dict.fromkeys([n for n in ends if n not in floating] + kept))
        if floating:
            terms = [
                f"{n}.{self.rng.choice(('mean()', 'sum()', 'square().mean()'))}" if self.values[n].dim() else n
                for n in floating
            ]
            outputs.insert(0, self.emit(" + ".join(terms), checked=False))
        return Recipe(
            self.seed, self.rng.random() < 0.8, tuple(self.inputs), tuple(self.declarations), tuple(self.steps),
            tuple(outputs),
        ).pruned()  # fmt: skip


def _args(shape: Iterable[int]) -> str:
    shape = tuple(shape)
    return ", ".join(map(str, shape)) if shape else "()"


def attempt(g: Drawing, template: Callable[[Drawing], Any]) -> bool:
    """Run one template; False when it doesn't fit here. What it declared in vain is pruned later."""
    marks = (len(g.steps), dict(g.values))
    try:
        template(g)
    except (Skip, RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        del g.steps[marks[0] :]
        g.values = {n: t for n, t in g.values.items() if n in marks[1] or re.match("x", n)}
        return False
    return True
