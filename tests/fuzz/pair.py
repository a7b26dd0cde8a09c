"""One model x plan pair: the local programs on simulated ranks against the model on one device.

What enters: a recipe (captured once as a `Subject`) and plans for it. What leaves: None, or a `Mismatch` that says what
differs. Outputs, gradients and new buffers are compared on every rank, as they lie there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree

from autopar.capture import capture
from autopar.cost.hardware import load_profile
from autopar.layout import I, Layout, shard_of
from autopar.passes.check import check_layouts
from autopar.passes.normalize import Normalize
from autopar.passes.shard import Shard
from autopar.program import OutputRef, Program
from autopar.rules.analyse import Analysis, analyse
from autopar.runtime.module import draws_numbers
from autopar.runtime.random import Draw, drawing
from autopar.runtime.simulate import run_ranks
from autopar.solver.sinks import sink_values
from tests.fuzz.plans import FuzzPlan
from tests.fuzz.recipe import Recipe
from tests.rules.prove import seed_of

CPU = load_profile("cpu")
BOUND = 1e-9
DRAW = Draw(5, 0)


class Unusable(Exception):
    """A model that says nothing: not finite, or not differentiable twice the same."""


@dataclass(frozen=True)
class Expected:
    """The whole model's results; sinks by index, gradients by placeholder."""

    sinks: dict[int, Tensor]
    grads: dict[str, Tensor | None]

    @property
    def largest_gradient(self) -> float:
        return max((float(g.abs().max()) for g in self.grads.values() if g is not None and g.numel()), default=0.0)


@dataclass(frozen=True)
class Subject:
    """A captured model, its values and what it gives on one device."""

    recipe: Recipe
    analysis: Analysis
    values: dict[str, Tensor]
    """Of every placeholder."""
    expected: Expected

    @property
    def program(self) -> Program:
        return self.analysis.program


@dataclass(frozen=True)
class Mismatch:
    what: str
    error: float
    """Infinite for a crash."""

    def __str__(self) -> str:
        return f"{self.what} (error {self.error:.2e})" if self.error != float("inf") else self.what


def subject_of(recipe: Recipe) -> Subject:
    """Capture a model and run it on one device.

    Raises:  Unusable: its results are not finite. Whatever capture and rules raise is a finding.
    """
    model, inputs = recipe.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected_run = _eager(recipe, inputs)
        program = Normalize().run(capture(model, inputs, {}, name="Model"))
    analysis = analyse(program)
    feeds = iter(inputs)
    values = {s.node: next(feeds) if s.kind == "input" else program.state[s.path] for s in program.sources}
    random = draws_numbers(program)
    expected = interpreted(program, values) if random else expected_run.of(program)
    everything = [*expected.sinks.values(), *(g for g in expected.grads.values() if g is not None)]
    if not all(t.isfinite().all() for t in everything if t.is_floating_point()):
        raise Unusable("not finite")
    if expected.largest_gradient > 1e6:
        raise Unusable("gradients of more than 1e6")
    return Subject(recipe, analysis, values, expected)


@dataclass(frozen=True)
class _EagerRun:
    outputs: list[Any]
    state: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    inputs: list[Tensor | None]

    def of(self, program: Program) -> Expected:
        sinks: dict[int, Tensor] = {}
        for value, reference in zip(self.outputs, program.out_values, strict=True):
            if isinstance(reference, OutputRef):
                sinks[reference.index] = value
        for i, sink in enumerate(program.sinks):
            if sink.kind == "state":
                sinks[i] = self.state[sink.path]
        feeds = iter(self.inputs)
        grads = {}
        for source in program.sources:
            grads[source.node] = next(feeds) if source.kind == "input" else self.grads.get(source.path)
        return Expected(sinks, grads)


def _eager(recipe: Recipe, inputs: Sequence[Tensor]) -> _EagerRun:
    model, _ = recipe.build()
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    try:
        outputs = pytree.tree_leaves(model(*leaves))
        _backward(list(dict.fromkeys(outputs)))
    except RuntimeError as error:  # a write that autograd needs the old value of
        raise Unusable(str(error)) from error
    grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    return _EagerRun(outputs, dict(model.named_buffers()), grads, [x.grad for x in leaves])


def interpreted(program: Program, values: dict[str, Tensor]) -> Expected:
    """The captured program itself on one device: what a model with dropout of our own generator gives."""
    leaves = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in values.items()}
    with drawing(DRAW):
        results = Interpreter(GraphModule(torch.nn.Module(), program.graph)).run(*leaves.values())
    _backward([r for r, s in zip(results, program.sinks, strict=True) if s.kind == "user"])
    return Expected(
        {i: r.detach() for i, r in enumerate(results) if isinstance(r, Tensor)}, {n: t.grad for n, t in leaves.items()}
    )


def _backward(outputs: Sequence[Any]) -> None:
    roots = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    if roots:
        torch.autograd.backward(roots, [seed_of(o) for o in roots])


def run_pair(subject: Subject, plan: FuzzPlan) -> Mismatch | None:
    """Build, check and run the programs of all ranks, and compare. None: equal."""
    decisions = plan.decisions(subject.analysis)
    assert decisions is not None, "the plan is of another model"
    try:
        return _run(subject, plan, decisions)
    except Exception as error:
        return Mismatch(f"{type(error).__name__}: {str(error).strip()[:600]}", float("inf"))


def _run(subject: Subject, plan: FuzzPlan, decisions: Any) -> Mismatch | None:
    mesh, analysis, program = plan.logical, subject.analysis, subject.program
    whole: Layout = (I,) * len(mesh.axes)
    graphs, leaves = [], []
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        local = Shard(analysis, decisions, mesh, CPU, at).run(program)
        check_layouts(local, analysis, mesh, at)
        graphs.append(local.graph)
        mine = []
        for name, value in subject.values.items():
            part = shard_of(value.detach(), analysis.parts[name], decisions.sources.get(name, whole), mesh.sizes, at)
            mine.append(part.clone().requires_grad_(value.requires_grad))
        leaves.append(mine)
    with drawing(DRAW):
        results = run_ranks(graphs, leaves, mesh)
    values = dict(sink_values(analysis))
    sinks = [(i, values[i], decisions.outputs.get(i, whole)) for i in subject.expected.sinks]
    user = [(i, v, layout) for i, v, layout in sinks if program.sinks[i].kind == "user"]
    roots, seeds = [], []
    for rank in range(mesh.size):
        for i, value, layout in user:
            root = results[rank][i]
            if root.requires_grad:
                roots.append(root)
                seed = seed_of(subject.expected.sinks[i])
                seeds.append(shard_of(seed, analysis.parts[value], layout, mesh.sizes, mesh.coordinate(rank)))
    if roots:
        torch.autograd.backward(roots, seeds)
    return _compare(subject, mesh, results, leaves, sinks, [decisions.sources.get(n, whole) for n in subject.values])


def _compare(
    subject: Subject, mesh: Any, results: list[Any], leaves: list[list[Tensor]], sinks: list[Any], stored: list[Layout]
) -> Mismatch | None:
    worst: Mismatch | None = None
    parts, expected = subject.analysis.parts, subject.expected
    floor = max(1e-6 * expected.largest_gradient, 1e-12)

    def note(
        what: str, mine: Tensor | None, full: Tensor | None, value: str, layout: Layout, at: Any, least: float
    ) -> None:
        nonlocal worst
        if mine is None or full is None:
            if (mine is None) != (full is None):
                worst = Mismatch(
                    f"{what}: {'no value' if mine is None else 'a value'} on the mesh, not on one device", float("inf")
                )
            return
        error = relative_error(mine, full, shard_of(full, parts[value], layout, mesh.sizes, at), least)
        if error > BOUND and (worst is None or error > worst.error):
            worst = Mismatch(f"{what} on rank {mesh.rank(at)}", error)

    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        for i, value, layout in sinks:
            note(
                f"output {i} ({value})", results[rank][i].detach(), expected.sinks[i].detach(), value, layout, at, 1e-12
            )
        for position, (name, layout) in enumerate(zip(subject.values, stored, strict=True)):
            note(f"gradient of {name}", leaves[rank][position].grad, expected.grads[name], name, layout, at, floor)
    return worst


def relative_error(mine: Tensor, full: Tensor, part: Tensor, least: float) -> float:
    """Largest difference over the whole tensor's largest magnitude; infinite where shapes, types or exact values
    differ.
    """
    if mine.shape != part.shape or mine.dtype != part.dtype:
        return float("inf")
    if not mine.numel():
        return 0.0
    if not mine.is_floating_point() and not mine.is_complex():
        return 0.0 if torch.equal(mine, part) else float("inf")
    difference = float((mine - part).abs().max())
    return difference / max(float(full.abs().max()), least) if difference == difference else float("inf")
