"""All ways to split one op over the axes of a mesh.

On each axis an op takes one *option*:

    "I"        everything invariant: each rank computes the whole op, gradients included
    "R"        everything replicated: as I, but each rank's gradient is a part of the sum; where the backward is linear
    "P0", ...  the inputs of linear set 0, ... partial and the others replicated; outputs partial
    "o", "o.1" a factor (or part 1 of it) is cut

A `Strategy` is one option for each axis and what follows from it: the layout of every input and output. For a value
that takes no gradient R and I are one thing, written I.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.layout import I, Layout, P, Placement, R, S
from autopar.rules.refine import Factor
from autopar.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Strategy:
    options: tuple[str, ...]
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def cut(self, name: str) -> tuple[int, ...]:
        """Indices of the axes that cut this factor (or any part of this letter)."""
        return tuple(a for a, option in enumerate(self.options) if option == name or option.partition(".")[0] == name)


Allowed = Callable[[int, str, Factor | None], bool]
"""(axis index, option, factor or None) -> may this op take this option on this axis?"""


def axis_options(rule: Rule, factors: Sequence[Factor], ranks: int) -> list[str]:
    """Options on one axis of `ranks` ranks, factors that divide evenly before those that do not.

    A factor that `ranks` does not divide is offered only when no other part of its letter divides evenly and the
    largest shard is at most twice the average one. A factor that must be filled is not offered where a shard would be
    empty.
    """
    even = {f.letter for f in factors if f.size % ranks == 0}
    names = [*_uncut(rule), *(f"P{k}" for k in range(len(rule.linear)))]
    for factor in factors:
        if factor.letter in rule.filled and math.ceil(factor.size / ranks) * (ranks - 1) >= factor.size:
            continue
        if factor.size % ranks == 0:
            if not (
                factor.innermost
                and any(f.letter == factor.letter and not f.innermost and f.size % ranks == 0 for f in factors)
            ):
                names.append(factor.name)
        elif factor.letter not in even and math.ceil(factor.size / ranks) * ranks <= 2 * factor.size:
            names.append(factor.name)
    return names


def _uncut(rule: Rule) -> tuple[str, ...]:
    return ("I", "R") if rule.linear_backward else ("I",)


def placements(
    rule: Rule, factors: dict[str, Factor], option: str
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Placement of each input and output on one axis under one option."""
    n_in, n_out = len(rule.ins), len(rule.outs)
    if option in ("I", "R"):
        same = I if option == "I" else R
        return (same,) * n_in, (same,) * n_out
    if option.startswith("P") and option[1:].isdigit():
        partial = rule.linear[int(option[1:])]
        return tuple(P if i in partial else R for i in range(n_in)), (P,) * n_out
    factor = factors[option]
    special = rule.distributed.get(factor.letter)
    summed = Placement(special.output) if special is not None and special.output else P
    reduced = any(part < 0 for part in factor.outs)
    ins = tuple(S(p) if p >= 0 else (P if reduced and i in rule.addends else R) for i, p in enumerate(factor.ins))
    return ins, tuple(S(p) if p >= 0 else summed for p in factor.outs)


def strategies(
    rule: Rule,
    factors: Sequence[Factor],
    ranks: Sequence[int],
    *,
    in_grads: Sequence[bool],
    out_grads: Sequence[bool],
    allowed: Allowed = lambda axis, option, factor: True,
) -> list[Strategy]:
    """Every combination of options that can run. ranks: of each axis. in_grads, out_grads: does the value take a
    gradient?
    """
    by_name = {f.name: f for f in factors}
    choices = []
    for axis, n in enumerate(ranks):
        names = [o for o in axis_options(rule, factors, n) if allowed(axis, o, by_name.get(o))]
        choices.append([(o, *placements(rule, by_name, o)) for o in names])
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    for combination in itertools.product(*choices):
        options = tuple(o for o, _, _ in combination)
        if not fits(options, by_name, ranks):
            continue
        ins = tuple(_layout((c[1][i] for c in combination), in_grads[i]) for i in range(len(rule.ins)))
        outs = tuple(_layout((c[2][i] for c in combination), out_grads[i]) for i in range(len(rule.outs)))
        found.setdefault((ins, outs), Strategy(options, ins, outs))
    return list(found.values())


def fits(options: Sequence[str], factors: dict[str, Factor], ranks: Sequence[int]) -> bool:
    """Several axes on one factor must divide it evenly together; one alone may leave uneven shards."""
    for name in set(options) & factors.keys():
        on = [ranks[a] for a, o in enumerate(options) if o == name]
        if len(on) > 1 and factors[name].size % math.prod(on):
            return False
    return True


def _layout(placements: Iterator[Placement], takes_gradient: bool) -> Layout:
    return tuple(I if p.kind == "R" and not takes_gradient else p for p in placements)


def named(
    rule: Rule, factors: Sequence[Factor], options: Sequence[str], in_grads: Sequence[bool], out_grads: Sequence[bool]
) -> Strategy | None:
    """The strategy with these options, or None where the rule does not offer them (another size, another capture)."""
    by_name = {f.name: f for f in factors}
    known = {*_uncut(rule), *(f"P{k}" for k in range(len(rule.linear))), *by_name}
    if not known.issuperset(options):
        return None
    rows = [placements(rule, by_name, o) for o in options]
    ins = tuple(_layout((r[0][i] for r in rows), in_grads[i]) for i in range(len(rule.ins)))
    outs = tuple(_layout((r[1][i] for r in rows), out_grads[i]) for i in range(len(rule.outs)))
    return Strategy(tuple(options), ins, outs)
