"""The body of a kernel whose rows are wider than a program: a loop over the columns for each sweep.

Enters: a printer whose tile is swept. Leaves: the lines of its function's body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.codegen.formulas import FORMULAS, NEUTRAL, TYPES, reduction
from autopar.codegen.kernel import Literal, Reduce
from autopar.codegen.sweeps import Sweep, clamped, sweeps

if TYPE_CHECKING:
    from autopar.codegen.triton_text import _Printer

_JOINS = {"sum": FORMULAS["add"], "max": FORMULAS["maximum"], "amax": FORMULAS["maximum"], "amin": FORMULAS["minimum"]}


def swept_body(p: _Printer) -> Iterator[str]:
    """Lines: the row, then for each sweep what the row has one of, the loop, and what the loop leaves."""
    yield from p.rows("    ")
    for place, step in enumerate(p.kernel.steps):
        if isinstance(step.does, Literal):
            yield from p.made(place, "    ")
    stored: set[int] = set()
    for sweep in sweeps(p.kernel):
        for place in sweep.before:
            if place not in p.names:
                yield from p.made(place, "    ")
        if sweep.reduces or sweep.stores:
            yield from _loop(p, sweep)
        stored |= set(sweep.stores)
    for place, store in enumerate(p.kernel.stores):
        if place not in stored:
            yield p.stored(store, "    ")


def _loop(p: _Printer, sweep: Sweep) -> Iterator[str]:
    reduces = {i: does for i in sweep.reduces if isinstance(does := p.kernel.steps[i].does, Reduce)}
    mosts = {most for most, _ in sweep.online}
    joined = mosts | {total for _, total in sweep.online}
    running = {i: p.fresh(f"running_{does.how}") for i, does in reduces.items()}
    for i, does in reduces.items():
        kind = p.kernel.steps[i].kind
        columns = 1 if i in mosts else p.tile.columns
        yield f"    {running[i]} = tl.full((1, {columns}), {NEUTRAL[does.how][kind]}, {TYPES[kind]})"
    yield f"    for start in range(0, {p.kernel.column_count}, {p.tile.columns}):"
    inner = "        "
    yield from p.columns(inner)
    names, used = dict(p.names), dict(p.used)
    for i in sweep.inside:
        if i not in p.names:
            yield from p.made(i, inner)
    for most in mosts:
        totals = [running[t] for m, t in sweep.online if m == most]
        yield from _online(p.within(reduces[most]), running[most], totals, inner)
    for i, does in reduces.items():
        if i not in joined:
            yield f"{inner}{running[i]} = {_JOINS[does.how].format(running[i], p.within(does))}"
    for place in sweep.stores:
        yield p.stored(p.kernel.stores[place], inner)
    p.names, p.used, p.last_note = names, used, ""
    for i, does in reduces.items():
        p.names[i] = p.fresh(p.kernel.steps[i].name or does.how)
    most_of = {total: most for most, total in sweep.online}
    for i, does in reduces.items():
        if i in mosts:
            continue
        found = reduction(does.how, running[i], p.kernel.steps[i].kind)
        if i in most_of and reduces[most_of[i]].how == "amax" and not clamped(p.kernel, i):  # -inf - -inf
            found = f'tl.where({running[most_of[i]]} == float("-inf"), float("nan"), {found})'
        yield f"    {p.names[i]} = {found}"
    for i in mosts:
        found = running[i]
        if reduces[i].how == "amax":  # a NaN is in the sum
            total = p.names[next(t for t, most in most_of.items() if most == i)]
            found = f'tl.where(({total} != {total}) & (tl.abs({found}) < float("inf")), float("nan"), {found})'
        yield f"    {p.names[i]} = {found}"


def _online(value: str, most: str, totals: list[str], inner: str) -> Iterator[str]:
    """A tile of sums of exp(x - max(x)), whose maximum may grow. A row may begin with tiles of -inf alone."""
    yield f"{inner}grown = tl.maximum({most}, tl.max({value}, axis=1, keep_dims=True))"
    yield f'{inner}base = tl.where(grown == float("-inf"), 0.0, grown)'
    for total in totals:
        yield f"{inner}{total} = {total} * tl.exp({most} - base) + tl.exp({value} - base)"
    yield f"{inner}{most} = grown"
