"""Make a failing pair small, and print it as a file that runs.

What enters: a recipe and a plan that differ from one device. What leaves: a smaller pair that still does. Steps are
dropped, results of steps are replaced by fresh parameters, outputs are dropped; the plan loses axes, and op by op
becomes whole. After a change to the model the plan is carried over along the common sequence of calls.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from autopar.layout import I, Layout, Placement
from autopar.program import tensors_of
from autopar.rules.analyse import Analysis
from tests.fuzz.pair import Mismatch, Subject, run_pair, subject_of
from tests.fuzz.plans import MESHES, FuzzPlan, logical_mesh
from tests.fuzz.recipe import Recipe, Step

Fails = Callable[[Recipe, FuzzPlan | None], Mismatch | None]


@dataclass
class Failure:
    recipe: Recipe
    plan: FuzzPlan | None
    """None: capture itself fails."""
    mismatch: Mismatch


def mismatch_of(recipe: Recipe, plan: FuzzPlan | None) -> Mismatch | None:
    """What a failure file and the shrinker run."""
    subject = subject_of(recipe)
    return run_pair(subject, plan) if plan is not None and plan.decisions(subject.analysis) is not None else None


def shrink(subject: Subject, plan: FuzzPlan, mismatch: Mismatch, seconds: float = 60.0) -> Failure:
    """The smallest failure found in the given time; of the same kind (crash or other numbers) as the first one."""
    end = time.monotonic() + seconds
    best = Failure(subject.recipe, plan, mismatch)
    while time.monotonic() < end:
        smaller = next((f for f in _smaller(best, subject, end) if f is not None), None)
        if smaller is None:
            break
        best, subject = smaller, subject_of(smaller.recipe)
    return best


def _smaller(best: Failure, subject: Subject, end: float) -> Iterator[Failure | None]:
    """Candidates that take most away first: a model that ends early, a plan on fewer axes, a plan of whole ops."""
    assert best.plan is not None
    for change in (_endings, _plans, _recipes):
        for candidate in change(best, subject):
            if time.monotonic() > end:
                return
            if isinstance(candidate, FuzzPlan):
                yield _tried(subject, candidate, best)
                continue
            try:
                other = subject_of(candidate)
            except Exception:  # no longer a model, or another failure
                continue
            yield _tried(other, carried_over(best.plan, subject.analysis, other.analysis), best)


def _tried(subject: Subject, plan: FuzzPlan, best: Failure) -> Failure | None:
    if plan.decisions(subject.analysis) is None:
        return None
    found = run_pair(subject, plan)
    same = found is not None and (found.error == float("inf")) == (best.mismatch.error == float("inf"))
    if same and found is not None and found.error == float("inf"):
        same = found.what.split(":")[0].split(" ")[0] == best.mismatch.what.split(":")[0].split(" ")[0]
    return Failure(subject.recipe, plan, found) if same and found is not None else None


def _plans(best: Failure, subject: Subject) -> Iterator[FuzzPlan]:
    plan, analysis = best.plan, subject.analysis
    assert plan is not None
    axes = plan.logical.axes
    if len(axes) > 1:
        for a, axis in enumerate(axes):
            yield FuzzPlan(
                str(axis.size), None, {n: (o[a],) for n, o in plan.options.items()},
                {n: (x[a],) for n, x in plan.sources.items()}, {n: (x[a],) for n, x in plan.reads.items()},
                {i: (x[a],) for i, x in plan.outputs.items()},
            )  # fmt: skip
    for name in ("reads", "outputs", "sources"):
        if getattr(plan, name):
            yield replace(plan, **{name: {}})
    whole = {n: o for n, o in plan.options.items() if set(o) != {"I"}}
    names = [n for n in analysis.ops if n in whole]
    size = len(names)
    if len(whole) < len(plan.options):
        plan = replace(plan, options=whole)
    while size >= 1:
        for start in range(0, len(names), size):
            dropped = set(names[start : start + size])
            yield replace(plan, options={n: o for n, o in plan.options.items() if n not in dropped})
        size //= 2
    for field in ("reads", "outputs", "sources"):
        held = getattr(plan, field)
        for key in held if len(held) > 1 else ():
            yield replace(plan, **{field: {k: v for k, v in held.items() if k != key}})


def _endings(best: Failure, subject: Subject) -> Iterator[Recipe]:
    """One value alone as the output, the earliest first."""
    recipe = best.recipe
    made = [name for step in recipe.steps for name in step.outs]
    for name in made[:-1] if (made[-1],) == recipe.outputs else made:
        if len(recipe.steps) > 1 and (name,) != recipe.outputs:
            yield replace(recipe, outputs=(name,)).pruned()


def _recipes(best: Failure, subject: Subject) -> Iterator[Recipe]:
    recipe = best.recipe
    for output in recipe.outputs:
        if len(recipe.outputs) > 1:
            yield replace(recipe, outputs=tuple(o for o in recipe.outputs if o != output)).pruned()
    values = _shapes(recipe)
    for at, step in enumerate(recipe.steps):
        others = recipe.steps[:at], recipe.steps[at + 1 :]
        if not step.outs:
            yield replace(recipe, steps=(*others[0], *others[1])).pruned()
        elif all(n in values for n in step.outs) and "self." + step.outs[0].replace("v", "p9") not in step.lines[0]:
            declared, lines = [], []
            for name in step.outs:
                owner = name.replace("v", "p9")
                declared.append((owner, f"self.{owner} = nn.Parameter(torch.randn({values[name]!r}))"))
                lines.append(f"{name} = self.{owner} * 1.0")
            made = Step(tuple(lines), step.outs)
            yield replace(
                recipe, steps=(*others[0], made, *others[1]), declarations=(*recipe.declarations, *declared)
            ).pruned()


def _shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Shapes of the floating values, by running the steps one by one."""
    model, inputs = recipe.build()
    from tests.fuzz.recipe import namespace

    space = namespace() | {"self": model} | {n: t for (n, _), t in zip(recipe.inputs, inputs, strict=True)}
    found: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for step in recipe.steps:
            exec("\n".join(step.lines), space)
            found |= {n: tuple(space[n].shape) for n in step.outs if space[n].is_floating_point()}
    return found


def carried_over(plan: FuzzPlan, old: Analysis, new: Analysis) -> FuzzPlan:
    """The plan for a changed model: calls in the common sequence keep their options."""
    whole: Layout = (I,) * len(plan.logical.axes)
    before, after = [_look(a) for a in (old, new)], [list(a.ops) for a in (old, new)]
    names: dict[str, str] = {}
    for a, b, n in difflib.SequenceMatcher(None, *before, autojunk=False).get_matching_blocks():
        names |= dict(zip(after[0][a : a + n], after[1][b : b + n], strict=True))
    old_paths = {s.path: s.node for s in old.program.sources}
    names |= {old_paths[s.path]: s.node for s in new.program.sources if s.path in old_paths and s.kind != "input"}

    def value(name: str) -> str | None:
        node, dot, index = name.partition(".")
        moved = names.get(node)
        found = f"{moved}{dot}{index}" if moved is not None else None
        return found if found in new.parts and new.parts[found] == old.parts[name] else None

    options = {}
    for name, chosen in plan.options.items():
        op = new.ops.get(names.get(name, ""))
        if op is not None and all(o in ("I", "R") or o in op.by_name or o[0] == "P" for o in chosen):
            options[op.name] = chosen
    kept = lambda held: {v: x for n, x in held.items() if (v := value(n)) is not None}  # noqa: E731
    return FuzzPlan(plan.mesh, plan.free, options, kept(plan.sources), kept(plan.reads), {i: whole for i in ()})


def _look(analysis: Analysis) -> list[tuple[object, ...]]:
    return [(str(op.node.target), *(tuple(t.shape) for t in tensors_of(op.node))) for op in analysis.ops.values()]


# failure files


def failure_file(failure: Failure, command: str) -> str:
    """A Python file that builds the model, carries out the plan on simulated ranks and exits 1 while they differ."""
    recipe, plan = failure.recipe, failure.plan
    return f'''"""{failure.mismatch}

Found by {command}
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.shrink import replay

{recipe.source()}

PLAN = {_plan_text(plan)}

if __name__ == "__main__":
    sys.exit(replay(__file__, PLAN, seed={recipe.seed}, training={recipe.training}))
'''


def _plan_text(plan: FuzzPlan | None) -> str:
    if plan is None:
        return "None"
    texts = {
        f: {k: " ".join(map(_placement_text, x)) for k, x in getattr(plan, f).items()}
        for f in ("sources", "reads", "outputs")
    }
    lines = [
        f"    {key!r}: {value!r},"
        for key, value in {"mesh": plan.mesh, "free": plan.free, "options": dict(plan.options), **texts}.items()
    ]
    return "\n".join(["{", *lines, "}"])


def _placement_text(placement: Placement) -> str:
    return f"S{placement.part}" if placement.kind == "S" else placement.kind


def plan_of(data: dict) -> FuzzPlan:
    """The plan in a failure file."""

    def layout(text: str) -> Layout:
        return tuple(Placement("S", int(p[1:])) if p[0] == "S" else Placement(p) for p in text.split())

    fields = {f: {k: layout(x) for k, x in data[f].items()} for f in ("sources", "reads", "outputs")}
    return FuzzPlan(data["mesh"], data["free"], data["options"], **fields)


def replay(path: str, data: dict | None, *, seed: int, training: bool) -> int:
    """Run a failure file's pair; prints what differs. Returns the exit status."""
    with open(path) as file:
        text = file.read()
    source = text[text.index("class Model") : text.index("\nPLAN = ")]
    recipe = _Fixed(seed, training, (), (), (), (), source)
    found = mismatch_of(recipe, plan_of(data) if data is not None else None)
    print(found or "equal")
    return int(found is not None)


@dataclass(frozen=True)
class _Fixed(Recipe):
    text: str = ""

    def source(self) -> str:
        return self.text


__all__ = ["MESHES", "Failure", "failure_file", "logical_mesh", "replay", "shrink"]
