"""Find the parts of every value: how each dim divides into the factors that the ops around it see.

A view that splits heads, a chunk of a fused projection or a flattened batch divides a dim; the division travels
through every op that shares the factor, so that the weight of a fused projection learns that its rows are
`(3, heads, head_dim)`. What enters: the rule of each op. What leaves: `Parts` for each value and, for each op, where
its factors' parts lie. A division that does not nest with those already there is dropped; the ops that wanted it keep
that factor whole.

A dim of size n is divided at *boundaries*: sizes q | n such that q elements inside lie in one step outside. Boundaries
of one dim form a chain under divisibility.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.layout import Parts
from autopar.rules.rule import Dim, Rule


@dataclass(frozen=True, slots=True)
class Operands:
    """The value names of an op's inputs and outputs, in the order of its rule."""

    ins: tuple[str, ...]
    outs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """One part of one factor of an op: the smallest thing an axis can cut."""

    name: str
    """`o`, or `o.1` for part 1 of a factor with several."""
    letter: str
    size: int
    ins: tuple[int, ...]
    """For each input the flat part it cuts, -1 where the input lacks it."""
    outs: tuple[int, ...]
    innermost: bool
    """Last of several parts of its letter."""


@dataclass(frozen=True, slots=True)
class Refined:
    parts: Mapping[str, Parts]
    factors: Mapping[str, tuple[Factor, ...]]
    """By op name."""


def refine(rules: Mapping[str, Rule], operands: Mapping[str, Operands], shapes: Mapping[str, Sequence[int]]) -> Refined:
    """Parts of all values and factors of all ops. shapes: of each value by name."""
    bounds: dict[str, list[set[int]]] = {v: [{1, int(n)} for n in shape] for v, shape in shapes.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for op, operand in operands.items():
        for value in (*operand.ins, *operand.outs):
            users[value].append(op)
    queue = dict.fromkeys(rules)
    while queue:
        op = next(iter(queue))
        del queue[op]
        for value in _share(rules[op], operands[op], bounds):
            for other in users[value]:
                if other != op:
                    queue[other] = None
    parts = {v: Parts(tuple(_sizes(b) for b in dims)) for v, dims in bounds.items()}
    return Refined(parts, {op: _factors(rules[op], operands[op], parts) for op in rules})


def _occurrences(rule: Rule, operand: Operands) -> list[tuple[str, int, Dim]]:
    """(value, dim index, factors) of every dim with at least one factor."""
    found = []
    for value, dims in zip((*operand.ins, *operand.outs), (*rule.ins, *rule.outs), strict=True):
        found += [(value, d, dim) for d, dim in enumerate(dims) if dim]
    return found


def _share(rule: Rule, operand: Operands, bounds: dict[str, list[set[int]]]) -> set[str]:
    """Carry the boundaries of each factor to all dims that have it; return the values that changed."""
    inside: dict[str, set[int]] = defaultdict(set)
    places = [(v, d, list(_intervals(rule, dim))) for v, d, dim in _occurrences(rule, operand)]
    for value, d, letters in places:
        for letter, inner, size in letters:
            inside[letter] |= {
                q // inner
                for q in bounds[value][d]
                if q % inner == 0 and inner < q < inner * size and size % (q // inner) == 0
            }
    changed: set[str] = set()
    for value, d, letters in places:
        chain = bounds[value][d]
        for letter, inner, size in letters:
            wanted = [inner, *(inner * q for q in sorted(inside[letter])), inner * size]
            for q in wanted:
                if q not in chain and q > 0 and all(q % p == 0 or p % q == 0 for p in chain):
                    chain.add(q)
                    changed.add(value)
    return changed


def _intervals(rule: Rule, dim: Dim) -> list[tuple[str, int, int]]:
    """(factor, elements inside it, its size) for the factors of one dim."""
    out, inner = [], 1
    for letter in reversed(dim):
        out.append((letter, inner, rule.sizes[letter]))
        inner *= rule.sizes[letter]
    return out


def _sizes(chain: set[int]) -> tuple[int, ...]:
    ordered = sorted(chain, reverse=True)
    if 0 in chain:
        return (0,)
    return tuple(a // b for a, b in itertools.pairwise(ordered)) or (1,)


def _factors(rule: Rule, operand: Operands, parts: Mapping[str, Parts]) -> tuple[Factor, ...]:
    """The cuttable factors of an op: every letter whose parts are seen alike by all tensors that have it."""
    runs: dict[str, dict[int, tuple[int, tuple[int, ...]]]] = defaultdict(dict)
    broken: set[str] = set()
    values = (*operand.ins, *operand.outs)
    for position, (value, dims) in enumerate(zip(values, (*rule.ins, *rule.outs), strict=True)):
        for d, dim in enumerate(dims):
            for letter, inner, size in _intervals(rule, dim):
                run = _run(parts[value], d, inner, size)
                if run is None or (letter in runs and position in runs[letter]):
                    broken.add(letter)  # a diagonal use (a factor twice in one tensor) is kept whole, too
                else:
                    runs[letter][position] = run
    factors: list[Factor] = []
    n_in = len(operand.ins)
    for letter in rule.letters:
        found = runs.get(letter)
        if letter in rule.whole or letter in broken or not found or rule.sizes[letter] <= 1:
            continue
        if len({sizes for _, sizes in found.values()}) != 1:
            continue
        sizes = next(iter(found.values()))[1]
        for k, size in enumerate(sizes):
            if size > 1 and not (letter in rule.contiguous and k):
                where = [found[i][0] + k if i in found else -1 for i in range(len(values))]
                name = letter if len(sizes) == 1 else f"{letter}.{k}"
                factors.append(
                    Factor(
                        name,
                        letter,
                        size,
                        tuple(where[:n_in]),
                        tuple(where[n_in:]),
                        len(sizes) > 1 and k == len(sizes) - 1,
                    )
                )
    return tuple(factors)


def _run(parts: Parts, dim: int, inner: int, size: int) -> tuple[int, tuple[int, ...]] | None:
    """(first flat part, part sizes) of the interval of `size` steps of `inner` elements in a dim, or None if it is cut
    across.
    """
    sizes = parts.dims[dim]
    for start in range(len(sizes)):
        for stop in range(start + 1, len(sizes) + 1):
            if math.prod(sizes[stop:]) == inner and math.prod(sizes[start:stop]) == size:
                return parts.starts[dim] + start, sizes[start:stop]
    return None
