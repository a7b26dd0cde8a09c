"""Many pairs, counted: random models, several random plans each, until the time or the number is reached.

What enters: a seed and what to draw. What leaves: `Counts`. The pairs are the same for a seed; only how many of them
are run depends on the time. Half of the plans and more are asked to split every contraction.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from autopar.errors import AutoparError
from autopar.rules import FAMILIES as RULES
from autopar.rules.analyse import Analysis, Op
from tests.fuzz.pair import Mismatch, Subject, Unusable, interpreted, relative_error, run_pair, subject_of
from tests.fuzz.plans import FuzzPlan, draw_plan, is_split
from tests.fuzz.recipe import Recipe
from tests.fuzz.steps import FAMILIES, draw_recipe

REQUIRED_SPLITS = 20
"""Times that each family of rules must be met split."""


@dataclass
class Counts:
    models: int = 0
    pairs: int = 0
    contractions_split: int = 0
    """Pairs with at least one contraction, each of which is split on some axis."""
    split: Counter[str] = field(default_factory=Counter)
    """By op: pairs in which a call of it is split."""
    unusable: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    shaky: int = 0
    """Pairs that differ by no more than the model itself does when its inputs change in the last digits."""
    failures: list[tuple[int, int, Recipe, FuzzPlan | None, Mismatch]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def families(self) -> Counter[str]:
        found: Counter[str] = Counter(dict.fromkeys(FAMILIES, 0))
        for name, n in self.split.items():
            found[family_of(name)] += n
        return found

    @property
    def enough(self) -> bool:
        """Was splitting tested, or would replication have passed?"""
        return 2 * self.contractions_split >= self.pairs and min(self.families.values()) >= REQUIRED_SPLITS

    def report(self) -> str:
        share = 100 * self.contractions_split / max(1, self.pairs)
        ops = sorted(self.split.items(), key=lambda kv: -kv[1])
        speed = self.pairs / max(self.seconds, 1e-9)
        often = sum(n >= REQUIRED_SPLITS for _, n in ops)
        lines = [
            f"{self.models} models, {self.pairs} pairs in {self.seconds:.0f} s ({speed:.1f} pairs/s)",
            f"mismatches: {len(self.failures)}; too badly conditioned to tell: {self.shaky}",
            f"pairs that split every contraction: {self.contractions_split} ({share:.0f} %)",
            "families met split: " + ", ".join(f"{f} {n}" for f, n in sorted(self.families.items())),
            f"ops met split: {len(ops)}, of them {often} at least {REQUIRED_SPLITS} times",
        ]
        if self.refused:
            lines.append("refused: " + "; ".join(f"{n} x {what}" for what, n in self.refused.most_common(5)))
        if self.unusable:
            lines.append("redrawn: " + "; ".join(f"{n} x {what}" for what, n in self.unusable.most_common(3)))
        return "\n".join(lines)


def packet(op: Op) -> str:
    return str(op.node.target._schema.name).removeprefix("aten::")


def family_of(name: str) -> str:
    """The module of the rules that has this op."""
    for module, table in _TABLES.items():
        if name in table:
            return module
    return "pointwise"


def _tables() -> dict[str, frozenset[str]]:
    import importlib

    return {f: frozenset(importlib.import_module(f"autopar.rules.{f}").RULES) for f in FAMILIES}


_TABLES = _tables()
assert len(RULES) == len(FAMILIES), "a family of rules has no lines in the fuzzer"


def wanted_split(rng: random.Random, analysis: Analysis, family: str) -> frozenset[str]:
    """Ops that a plan is asked to split: the family's own, and in two plans of three every contraction."""
    every = rng.random() < 0.75
    return frozenset(
        name
        for name, op in analysis.ops.items()
        if (every and op.rule.flop) or (op.has_rule and family_of(packet(op)) == family)
    )


def run(
    seed: int,
    *,
    seconds: float = float("inf"),
    pairs: float = float("inf"),
    worlds: tuple[int, ...] = (2, 3, 4),
    plans: int = 20,
    first: int = 0,
    step: int = 1,
    found: Callable[[Subject, FuzzPlan, Mismatch], None] | None = None,
    most_failures: int = 10,
    progress: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Fuzz until `seconds` or `pairs` are reached. first, step: only every step-th model, for several processes."""
    counts, start = Counts(), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, family, subject in models(seed, first, step):
            if isinstance(subject, Unusable):
                counts.unusable[str(subject)[:60]] += 1
                continue
            if isinstance(subject, AutoparError):
                counts.refused[str(subject)[:160]] += 1
                continue
            if isinstance(subject, Exception):
                what = Mismatch(f"capture: {type(subject).__name__}: {str(subject)[:300]}", float("inf"))
                counts.failures.append((index, -1, subject.recipe, None, what))  # type: ignore[attr-defined]
                continue
            counts.models += 1
            progress(counts)
            for k in range(plans):
                counts.seconds = time.monotonic() - start
                if counts.pairs >= pairs or counts.seconds >= seconds or len(counts.failures) >= most_failures:
                    return counts
                rng = random.Random(f"{seed}/{index}/plan {k}")
                plan = draw_plan(rng, subject.analysis, worlds, wanted_split(rng, subject.analysis, family))
                mismatch = run_pair(subject, plan)
                _count(counts, subject.analysis, plan)
                if mismatch is None:
                    continue
                if mismatch.error != float("inf") and mismatch.error < 100 * sensitivity(subject):
                    counts.shaky += 1
                    continue
                counts.failures.append((index, k, subject.recipe, plan, mismatch))
                if found is not None:
                    found(subject, plan, mismatch)
                break  # one finding a model
    return counts


def models(seed: int, first: int = 0, step: int = 1) -> Iterator[tuple[int, str, Subject | Exception]]:
    """The models of a seed: (index, family it exercises, captured, or what building it raised)."""
    index = first
    while True:
        for number in range(20):
            recipe, family = draw_recipe(seed, index, number)
            try:
                yield index, family, subject_of(recipe)
            except Unusable as error:
                yield index, family, error
                continue
            except Exception as error:
                error.recipe = recipe  # type: ignore[attr-defined]
                yield index, family, error
            break
        index += step


def _count(counts: Counts, analysis: Analysis, plan: FuzzPlan) -> None:
    counts.pairs += 1
    contractions = [op for op in analysis.ops.values() if op.rule.flop]
    if contractions and all(is_split(op, plan.options[op.name]) for op in contractions):
        counts.contractions_split += 1
    for name in {packet(op) for op in analysis.ops.values() if op.has_rule and is_split(op, plan.options[op.name])}:
        counts.split[name] += 1


def sensitivity(subject: Subject) -> float:
    """The largest relative change of the model's own results when inputs and parameters change by 1e-15.

    Large where a bucket, a sort or a rounding decides on a value that is exactly on its bound.
    """

    def noisy(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        return (t.detach() * (1 + 1e-15 * torch.randn(t.shape, dtype=t.dtype, generator=generator))).requires_grad_(
            t.requires_grad
        )

    base, worst = interpreted(subject.program, subject.values), 0.0
    floor = max(1e-6 * base.largest_gradient, 1e-12)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        other = interpreted(subject.program, {n: noisy(t) for n, t in subject.values.items()})
        for i, t in base.sinks.items():
            worst = max(worst, relative_error(other.sinks[i], t, t, 1e-12))
        for n, g in base.grads.items():
            if g is not None and other.grads[n] is not None:
                worst = max(worst, relative_error(other.grads[n], g, g, floor))
    return worst
