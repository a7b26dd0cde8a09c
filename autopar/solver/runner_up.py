"""The second-best option of each decision, with all others as they are.

Enters: a `Built` problem and a solution's options. Leaves: plain data for a plan: of each op, parameter and common read
that decides for its equals what it would be instead, and what that costs a step. Refused: nothing; a decision that no
other option can replace alone is left out.

Neighbours stay as they are and pay the moves to the other layout, so that a cost is the least that changing this one
decision takes, not what a plan made around it would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.layout import Parts
from autopar.program import record
from autopar.rules.strategy import Strategy
from autopar.solver.build import Built
from autopar.solver.problem import Floats, Problem


def runners_up(built: Built, options: Sequence[int], stages: int) -> dict[str, dict[str, dict[str, Any]]]:
    """By kind ("ops", "params", "reads") and name: chosen, instead, costs_s, bytes.

    stages: pipeline ranks; each has that share of the seconds and bytes.
    """
    others = dict(_second_best(built.problem, options))
    found: dict[str, dict[str, dict[str, Any]]] = {"ops": {}, "params": {}, "reads": {}}

    def say(kind: str, name: str, choice: int, texts: Sequence[Any]) -> None:
        at, costs_s, size_bytes = others.get(choice, (None, 0.0, 0.0))
        if at is not None:
            found[kind][name] = {
                "chosen": texts[options[choice]], "instead": texts[at], "costs_s": costs_s / stages,
                "bytes": size_bytes / stages,
            }  # fmt: skip

    parts, sources = built.analysis.parts, {s.node: s.path for s in built.analysis.program.sources}
    for name, choice in built.op_choice.items():
        out = next(iter(built.analysis.ops[name].outs), None)
        texts = [_strategy_text(strategy, parts, out) for strategy in built.op_strategies[name]]
        say("ops", record(built.analysis.ops[name].node).op, choice, texts)
    for node, choice in built.storage_choice.items():
        layouts = [[parts[node].name(p) for p in layout] for layout in built.storage_layouts[node]]
        say("params", sources[node], choice, layouts)
    first: dict[int, str] = {}
    for value, choice in built.read_choice.items():
        first.setdefault(choice, value)
    for choice, value in first.items():
        layouts = [[parts[value].name(p) for p in layout] for layout in built.read_layouts[choice]]
        say("reads", value, choice, layouts)
    return found


def _strategy_text(strategy: Strategy, parts: Mapping[str, Parts], out: str | None) -> list[str]:
    """By axis: the factor that is cut, and how the first output lies."""
    if out is None:
        return list(strategy.options)
    return [f"{o}: {parts[out].name(p)}" for o, p in zip(strategy.options, strategy.outs[0], strict=True)]


def _second_best(problem: Problem, options: Sequence[int]) -> Iterator[tuple[int, tuple[int, float, float]]]:
    """(choice, (option, seconds more, bytes more)) of the cheapest other option that is allowed and fits."""
    cost_s: list[Floats] = [choice.cost_s.copy() for choice in problem.choices]
    size_bytes: list[Floats] = [choice.memory_bytes.copy() for choice in problem.choices]
    for edge in problem.edges:
        mine = edge.source_layout[options[edge.source]], edge.target_layout[options[edge.target]]
        ends = (edge.source, (edge.source_layout, mine[1])), (edge.target, (mine[0], edge.target_layout))
        for choice, at in ends:
            cost_s[choice] = cost_s[choice] + edge.cost_s[at]
            if edge.memory_bytes is not None:
                size_bytes[choice] = size_bytes[choice] + edge.memory_bytes[at]
    used = sum(float(c.memory_bytes[o]) for c, o in zip(problem.choices, options, strict=True))
    used += sum(
        float(e.memory_bytes[e.source_layout[options[e.source]], e.target_layout[options[e.target]]])
        for e in problem.edges
        if e.memory_bytes is not None
    )
    covers: dict[int, list[set[tuple[int, int]]]] = defaultdict(list)
    for cover in problem.covers:
        met = {(c, o) for c, o in cover if options[c] == o}
        for choice in {c for c, _ in met} if len(met) == 1 else ():
            covers[choice].append(set(cover))
    for choice, chosen in enumerate(options):
        more_s, more = cost_s[choice] - cost_s[choice][chosen], size_bytes[choice] - size_bytes[choice][chosen]
        allowed = np.isfinite(more_s) & (used + more <= problem.memory_limit_bytes)
        allowed[chosen] = False
        for cover in covers[choice]:  # this decision alone keeps a pin
            allowed &= np.array([(choice, o) in cover for o in range(len(allowed))])
        if allowed.any():
            at = int(np.argmin(np.where(allowed, more_s, np.inf)))
            yield choice, (at, float(more_s[at]), float(more[at]))
