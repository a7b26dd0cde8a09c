"""Make the local program of one op: what a rank runs on its shards.

Most ops run as they are. The others get a function `local(ctx: Local) -> Node | tuple of nodes` in their rule, which
emits nodes
through `ctx`: sizes of views, offsets into a cut vocabulary, collectives inside a distributed softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autopar.layout import Parts, Placement, chunk, local_parts
from autopar.rules.call import Call
from autopar.rules.refine import Factor
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Local:
    """Where a rule emits its local program. `ins` are the local tensors in the order of the rule's inputs."""

    call: Call
    rule: Rule
    strategy: Strategy
    factors: Mapping[str, Factor]
    out_parts: tuple[Parts, ...]
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...]
    ins: tuple[Node, ...]
    emit: Callable[..., Node]
    """emit(target, *args, **kwargs) -> Node: adds one call to the local graph."""
    emit_move: Callable[[Node, int, Placement, Placement], Node]
    """emit_move(node, axis, source, target): a transition of the table; S placements cut dims of the local tensor."""
    emit_max: Callable[[Node, int], Node]
    """emit_max(node, axis): all-reduce of maxima, without gradient."""
    substitute: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    """The call's own args and kwargs with the local tensors in place."""

    def same(self, target: Any = None, **changes: Any) -> Node:
        """Emit the op itself (or `target`) on local tensors, with some arguments changed by schema name."""
        own_args, kwargs = self.substitute()
        args = list(own_args)
        for position, argument in enumerate(self.call.target._schema.arguments):
            if argument.name in changes:
                value = changes.pop(argument.name)
                if position < len(args):
                    args[position] = value
                else:
                    kwargs[argument.name] = value
        if changes:
            raise TypeError(f"{self.call.target}: no arguments {sorted(changes)}")
        return self.emit(target or self.call.target, *args, **kwargs)

    def out_shape(self, index: int = 0) -> list[int]:
        """Local shape of an output."""
        return list(local_parts(self.out_parts[index], self.strategy.outs[index], self.ranks, self.coordinate).shape)

    def cut(self, letter: str) -> tuple[int, ...]:
        """Axes that cut this factor."""
        return tuple(a for a in self.strategy.cut(letter) if self.strategy.options[a] in self.factors)

    def extent(self, letter: str) -> tuple[int, int]:
        """(first global index, local size) of a factor that the rule calls contiguous."""
        cut = self.cut(letter)
        assert not cut or letter in self.rule.contiguous, f"the shards of {letter} need not be contiguous"
        size = self.outer_size(letter)
        first, inner = 0, self.rule.sizes[letter] // size if size else 0
        for axis in cut:
            start, size = chunk(size, self.ranks[axis], self.coordinate[axis])
            first += start
        return first * inner, size * inner

    def outer_size(self, letter: str) -> int:
        """Size of the part of a factor that is cut; of the whole factor when none is."""
        cut = self.cut(letter)
        return self.factors[self.strategy.options[cut[0]]].size if cut else self.rule.sizes[letter]

    def uneven(self, letter: str) -> bool:
        """May some rank's shard of this factor be shorter than others', or empty? The same answer on every rank."""
        return self.outer_size(letter) % math.prod(self.ranks[a] for a in self.cut(letter)) != 0

    def local_size(self, letter: str) -> int:
        """Local size of a factor, however many parts it has."""
        if letter not in {f.letter for f in self.factors.values()}:
            return self.rule.sizes[letter]
        sizes = {f.name: f.size for f in self.factors.values() if f.letter == letter}
        rest = self.rule.sizes[letter] // math.prod(sizes.values()) if math.prod(sizes.values()) else 1
        for axis, option in enumerate(self.strategy.options):
            if option in sizes:
                sizes[option] = chunk(sizes[option], self.ranks[axis], self.coordinate[axis])[1]
        return rest * math.prod(sizes.values())

    def reduce(self, node: Node, letter: str, kind: str) -> Node:
        """All-reduce over the axes that cut `letter`: kind "I" or "R" of a partial sum, "max" of a maximum (no
        gradient).
        """
        for axis in self.cut(letter):
            if kind == "max":
                node = self.emit_max(node, axis)
            else:
                node = self.emit_move(node, axis, Placement("P"), Placement(kind))
        return node


LocalRule = Callable[[Local], Node | Sequence[Node]]
