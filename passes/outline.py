"""Equal blocks of a local program, each written as one call, so that one of them is lowered for all.

Two runs of calls are equal when their ops, constants and reads correspond one by one, and so do what is read from
outside and what outside reads. The keys of random ops differ by block: they stay outside, before the call.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.program import Record, record
from autopar.runtime import random_ops  # noqa: F401 - defines autopar::key
from autopar.runtime.moves import load

_WORTHWHILE = 8
"""Shorter runs of calls are traced sooner than they are told apart."""


@dataclass(frozen=True, eq=False)
class Block:
    """A run of calls that stands elsewhere, too. Blocks of one `kind` correspond call by call."""

    kind: int
    calls: tuple[Node, ...]
    inputs: tuple[Node, ...]
    """Read from outside, in the order of the first reads."""
    outputs: tuple[Node, ...]
    """Read outside, in the order of the calls."""

    def records(self, of: Block) -> dict[Record, Record]:
        """The record here of what has another one in a block of the same kind."""
        return {record(theirs): record(ours) for theirs, ours in zip(of.calls, self.calls, strict=True)}

    def alone(self) -> Graph:
        """The block as a graph of its own: its inputs, its calls, its outputs."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
        for node in self.calls:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in self.outputs))
        return graph


@dataclass(frozen=True, eq=False)
class Outline:
    """Write equal blocks as calls of `call(number, *inputs)`, numbered by `numbers`.

    Input:   %a = mul(%x, %w0) ; %b = sin(%a) ; %c = mul(%b, %w1) ; %d = sin(%c)
    Output:  %r0 = call(0, %x, %w0) ; %b = getitem(%r0, 0) ; %r1 = call(1, %b, %w1) ; %d = getitem(%r1, 0)
    Refuses: nothing; what stands once, or hands on a tuple of values, stays as it is.
    """

    call: Callable[..., Any]
    numbers: Iterator[int]

    def run(self, graph: Graph) -> tuple[Graph, dict[int, Block]]:
        """The graph with calls, and the block behind each number."""
        blocks = {b.calls[0]: b for b in repeated(graph)}
        inside = {n for b in blocks.values() for n in b.calls}
        made, copies, found = Graph(), dict[Node, Node](), dict[int, Block]()
        for node in graph.nodes:
            block = blocks.get(node)
            if block is not None:
                for key in filter(_is_key, block.inputs):
                    copies[key] = made.node_copy(key)
                number = next(self.numbers)
                found[number] = block
                results = made.call_function(self.call, (number, *(copies[i] for i in block.inputs)))
                for i, output in enumerate(block.outputs):
                    copies[output] = made.call_function(operator.getitem, (results, i), name=output.name)
                    copies[output].meta = dict(output.meta)
            elif node not in inside and node not in copies:
                copies[node] = made.node_copy(node, copies.__getitem__)
        made.lint()
        return made, found


def repeated(graph: Graph) -> list[Block]:
    """All blocks of kinds with more than one, in order."""
    kinds: dict[Hashable, list[Sequence[Node]]] = defaultdict(list)
    for run in _runs(graph):
        if len(run) >= _WORTHWHILE:
            kinds[_structure(run)].append(run)
    several = [runs for runs in kinds.values() if len(runs) > 1 and all(_is_tensor(o) for o in _ends(runs[0])[1])]
    return [Block(i, tuple(run), *_ends(run)) for i, runs in enumerate(several) for run in runs]


def _runs(graph: Graph) -> list[list[Node]]:
    """The calls, divided where a block has its first one; keys and the loads of whole parameters are left out."""
    runs: list[list[Node]] = [[]]
    seen: set[str] = set()
    calls = (n for n in graph.nodes if n.op not in ("placeholder", "output"))
    for node in itertools.dropwhile(_is_load, calls):
        block = record(node).block
        if block and block not in seen:
            seen.add(block)
            runs.append([])
        if not _is_key(node):
            runs[-1].append(node)
    return [run for run in runs if all(n.op == "call_function" for n in run)]


def _is_load(node: Node) -> bool:
    return node.target is load


def _is_key(node: Node) -> bool:
    return node.target is torch.ops.autopar.key.default and not node.all_input_nodes


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _ends(run: Sequence[Node]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What a run reads from outside, and what outside reads of it."""
    inside = set(run)
    inputs = dict.fromkeys(i for n in run for i in n.all_input_nodes if i not in inside)
    return tuple(inputs), tuple(n for n in run if any(u not in inside for u in n.users))


def _structure(run: Sequence[Node]) -> Hashable:
    """Equal for runs that correspond call by call; which calls share a record is part of it."""
    inputs, outputs = _ends(run)
    place: dict[Node, Hashable] = {n: ("input", i) for i, n in enumerate(inputs)}
    place |= {n: i for i, n in enumerate(run)}
    records: dict[Record, int] = {}
    calls = []
    for i, node in enumerate(run):
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        known = tuple(place[a] if isinstance(a, Node) else (type(a), repr(a)) for a in leaves)
        calls.append((node.target, str(spec), known, records.setdefault(record(node), i)))
    return tuple(calls), tuple(place[n] for n in outputs)
