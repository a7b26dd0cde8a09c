"""How a program goes over rows that are wider than its registers: a loop over the columns for each round of reductions.

Enters: a kernel. Leaves: its `Sweep`s, in order. A sweep makes again what it needs of the columns' values; what a row
has one of is made once. The usual pair of a softmax,

    m = max(x) ; s = sum(exp(x - m))

takes one sweep: the sum so far is scaled whenever the maximum grows (Milakov & Gimelshein 2018, algorithm 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.codegen.kernel import Apply, Kernel, Literal, Load, Reduce, Store, args_of


@dataclass(frozen=True, slots=True)
class Sweep:
    """One loop over the columns. before: steps that a row has one of, made ahead of the loop. inside: steps made for
    each tile. reduces: what the loop leaves. online: (maximum, sum) pairs of the reduces that go together.
    stores: places in the kernel's stores, of values that move with the columns."""

    before: tuple[int, ...]
    inside: tuple[int, ...]
    reduces: tuple[int, ...]
    online: tuple[tuple[int, int], ...]
    stores: tuple[int, ...]


def sweeps(kernel: Kernel) -> tuple[Sweep, ...]:
    """The sweeps of a kernel; the last may be without a loop (nothing inside): it ends what a row has one of."""
    moves, pairs = kernel.moves, online_pairs(kernel)
    ready = _ready(kernel, pairs)
    found = []
    for number in range(max(ready, default=0) + 1):
        reduces = tuple(i for i, s in enumerate(kernel.steps) if isinstance(s.does, Reduce) and ready[i] == number + 1)
        stores = tuple(i for i, s in enumerate(kernel.stores) if ready[s.value] == number and _wide(kernel, s))
        online = tuple((m, s) for s, m in pairs.items() if s in reduces)
        roots = [_summand(kernel, i) if i in pairs else args_of(kernel.steps[i].does)[0] for i in reduces]
        roots += [kernel.stores[i].value for i in stores]
        before = tuple(i for i in range(len(kernel.steps)) if ready[i] == number and not moves[i][1])
        inside = tuple(sorted(i for i in _closure(kernel, roots) if moves[i][1]))
        found.append(Sweep(tuple(i for i in before if not _is_reduce(kernel, i)), inside, reduces, online, stores))
    return tuple(found)


def online_pairs(kernel: Kernel) -> dict[int, int]:
    """Sum -> maximum, for each sum of exp(x - max(x)); the maximum may be kept from -inf by a least number."""
    found = {}
    for i, step in enumerate(kernel.steps):
        if not (isinstance(step.does, Reduce) and step.does.how == "sum"):
            continue
        power = kernel.steps[step.does.arg].does
        shifted = kernel.steps[power.args[0]].does if isinstance(power, Apply) and power.formula == "exp" else None
        if not (isinstance(shifted, Apply) and shifted.formula == "sub"):
            continue
        value, most = shifted.args
        clamped = kernel.steps[most].does
        if isinstance(clamped, Apply) and clamped.formula == "maximum" and _is_number(kernel, clamped.args[1]):
            most = clamped.args[0]
        if kernel.steps[most].does in (Reduce("max", value), Reduce("amax", value)):
            found[i] = most
    return found


def clamped(kernel: Kernel, total: int) -> bool:
    """Is the maximum of such a sum kept from -inf?"""
    (power,) = args_of(kernel.steps[total].does)
    (shifted,) = args_of(kernel.steps[power].does)
    most = args_of(kernel.steps[shifted].does)[1]
    return not _is_reduce(kernel, most)


def _is_number(kernel: Kernel, place: int) -> bool:
    return isinstance(kernel.steps[place].does, Literal)


def read_again_bytes(kernel: Kernel) -> int:
    """Bytes that the sweeps after the first one to read them read again."""
    seen: set[int] = set()
    again = 0
    moves = kernel.moves
    for sweep in sweeps(kernel):
        loads = [(does.buffer, moves[i]) for i in sweep.inside if isinstance(does := kernel.steps[i].does, Load)]
        read = {buffer for buffer, (row, _) in loads if row or not kernel.rows}  # a weight stays in the cache
        again += sum(kernel.buffers[b].size_bytes for b in read & seen)
        seen |= read
    return again


def _ready(kernel: Kernel, pairs: dict[int, int]) -> list[int]:
    """For each step the sweep in which it can be made."""
    found: list[int] = []
    for i, step in enumerate(kernel.steps):
        at = max((found[a] for a in args_of(step.does)), default=0)
        if isinstance(step.does, Reduce):
            at = found[pairs[i]] if i in pairs else at + 1
        found.append(at)
    return found


def _summand(kernel: Kernel, place: int) -> int:
    """The x of a sum of exp(x - max(x))."""
    (power,) = args_of(kernel.steps[place].does)
    (shifted,) = args_of(kernel.steps[power].does)
    return args_of(kernel.steps[shifted].does)[0]


def _closure(kernel: Kernel, roots: Iterable[int]) -> set[int]:
    """These steps and what they are made of in one sweep."""
    found: set[int] = set()
    stack = list(roots)
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            if not _is_reduce(kernel, place):
                stack += args_of(kernel.steps[place].does)
    return found


def _is_reduce(kernel: Kernel, place: int) -> bool:
    return isinstance(kernel.steps[place].does, Reduce)


def _wide(kernel: Kernel, store: Store) -> bool:
    """Is something stored at every column?"""
    return store.at.on(range(kernel.rows, len(kernel.axes)))
