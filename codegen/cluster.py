"""Which nodes of a lowered graph become one kernel.

Enters: a graph. Leaves: groups of nodes, each with its kernel, that may be run as one in some order. Refused: nothing;
what fits in no group stays as it is.

Two groups are joined when that saves bytes, their kernel can be built and fits the registers, and no third node would
have to run both before and after the whole. Collectives keep their order, and no computation passes a wait: a group
lies between two of them. Pairs are taken by the bytes that they save, largest first; pairs that share a large input
(gate and up, the rotations of query and key) come after those of which one reads the other.
"""

from __future__ import annotations

import heapq
import operator
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autopar.codegen.build import Built, build
from autopar.codegen.demand import Unfusable, known
from autopar.codegen.index import NotLinear
from autopar.codegen.tiles import TooWide, cost_bytes, tile_of
from autopar.codegen.views import SPLITS, base_of, packet, view_of

BUFFERS = 28
"""[derived] most buffers of one kernel: each takes two registers of address, and a launch takes time for each."""


@dataclass(frozen=True, eq=False)
class Group:
    """members: in graph order, without the views between them. outputs: those that are read outside."""

    members: tuple[Node, ...]
    outputs: tuple[Node, ...]
    built: Built
    bytes: float
    """Moved by the kernel, what is read twice and partial sums included (see `tiles.cost_bytes`)."""


def is_barrier(node: Node) -> bool:
    """A collective, a wait, or an op that writes to what it is given: these keep their order."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == "_c10d_functional" or target._schema.is_mutable


def clusters(graph: Graph) -> list[Group]:
    """Groups of at least two ops."""
    found = _Clusters(graph)
    found.join()
    return [
        g
        for g in found.groups.values()
        if g is not None and sum(n.target is not operator.getitem for n in g.members) > 1
    ]


def why_alone(node: Node) -> str:
    """Why an op is in no group."""
    if not known(node):
        return "no formula"
    items = tuple(u for u in node.users if u.target is operator.getitem)
    try:
        tile_of(build((node, *items), items or (node,)).kernel)
    except (Unfusable, NotLinear, TooWide) as refused:
        return str(refused)
    return "joining it with others saves nothing, or may not be done"


class _Clusters:
    def __init__(self, graph: Graph) -> None:
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.readers: dict[Node, set[Node]] = defaultdict(set)
        """Of each node that is no view: the nodes that read it, views passed through."""
        units = [n for n in graph.nodes if view_of(n) is None and packet(n) not in SPLITS]
        for node in units:
            for base in map(base_of, node.all_input_nodes):
                self.readers[base].add(node)
        self.unit: dict[Node, int] = {}
        self.groups: dict[int, Group | None] = {}
        self.members: dict[int, list[Node]] = {}
        for node in units:
            source = node.args[0] if node.target is operator.getitem else None
            if packet(node) == "_log_softmax_backward_data" and packet(node.all_input_nodes[0]) == "nll_loss_backward":
                source = node.all_input_nodes[0]  # together they need no sum over the vocabulary
            if isinstance(source, Node) and known(source):
                self.unit[node] = self.unit[source]  # an item of a norm's results belongs to the norm
            else:
                self.unit[node] = len(self.members)
                self.members[self.unit[node]] = []
            self.members[self.unit[node]].append(node)
        self.segment = self._segments(graph.nodes)
        self.before: dict[int, int] = {}
        """For each unit the units that come before it, as bits."""
        self._reach()
        for unit, members in self.members.items():
            self.groups[unit] = self._group(members) if known(members[0]) else None

    def _segments(self, nodes: Iterable[Node]) -> dict[int, int]:
        found: dict[int, int] = {}
        passed = 0
        for node in nodes:
            passed += is_barrier(node) and "wait" in packet(node)
            if node in self.unit:
                found.setdefault(self.unit[node], passed)
        return found

    def _reach(self) -> None:
        last_barrier: int | None = None
        for unit, members in self.members.items():
            bits = 0
            for base in {base_of(i) for n in members for i in n.all_input_nodes}:
                other = self.unit.get(base)
                if other is not None and other != unit:
                    bits |= self.before[other] | 1 << other
            if any(map(is_barrier, members)):
                if last_barrier is not None:
                    bits |= self.before[last_barrier] | 1 << last_barrier
                last_barrier = unit
            self.before[unit] = bits

    def _group(self, members: Sequence[Node]) -> Group | None:
        inside = set(members)
        members = sorted(members, key=self.order.__getitem__)
        outputs = [
            n
            for n in members
            if isinstance(n.meta.get("val"), torch.Tensor) and any(r not in inside for r in self.readers[n])
        ]
        try:
            built = build(members, outputs) if outputs else None
            tile = tile_of(built.kernel) if built is not None else None
        except (Unfusable, NotLinear, TooWide):
            return None
        except Exception as error:  # a fault of ours must not cost more than these ops
            warn_of_fault(members, error)
            return None
        if built is None or tile is None or len(built.kernel.buffers) > BUFFERS or not _on_one_device(built):
            return None
        return Group(tuple(members), tuple(outputs), built, cost_bytes(built.kernel, tile))

    # joining

    def join(self) -> None:
        """Join pairs until none saves bytes."""
        for pairs in (self._reading, self._sharing):
            queue = [(-size_bytes, self.order[n], a, b) for size_bytes, n, a, b in pairs(self.groups)]
            heapq.heapify(queue)
            while queue:
                _, _, a, b = heapq.heappop(queue)
                joined = self._try(a, b) if a in self.members and b in self.members else None
                if joined is not None:
                    for size_bytes, node, c, d in pairs((joined,)):
                        heapq.heappush(queue, (-size_bytes, self.order[node], c, d))

    def _reading(self, units: Iterable[int]) -> Iterator[tuple[int, Node, int, int]]:
        """(bytes, value, its unit, a unit that reads it) of the pairs that these units are in."""
        wanted = set(units)
        for unit in wanted:
            group = self.groups[unit]
            if group is None:
                continue
            for node in group.outputs:
                for other in {self.unit[r] for r in self.readers[node]} - {unit}:
                    if self.groups[other] is not None:
                        yield _size_bytes(node), node, unit, other
            for node in group.built.reads:
                source = self.unit.get(base_of(node))
                if source is not None and source not in wanted and self.groups[source] is not None:
                    yield _size_bytes(node), base_of(node), source, unit

    def _sharing(self, units: Iterable[int]) -> Iterator[tuple[int, Node, int, int]]:
        """(bytes, value, a unit that reads it, another one)."""
        wanted = set(units)
        for unit in wanted:
            group = self.groups[unit]
            for node in {base_of(n) for n in group.built.reads} if group is not None else ():
                for other in {self.unit[r] for r in self.readers[node]} - {unit}:
                    if self.groups[other] is not None and (other not in wanted or other > unit):
                        yield _size_bytes(node), node, min(unit, other), max(unit, other)

    def _try(self, a: int, b: int) -> int | None:
        """Join two units if it may be done and saves bytes; the unit that both now are."""
        one, two = self.groups[a], self.groups[b]
        if a == b or one is None or two is None or self.segment[a] != self.segment[b] or self._cycle(a, b):
            return None
        joined = self._group((*one.members, *two.members))
        if joined is None or joined.bytes >= one.bytes + two.bytes:
            return None
        self.groups[a], self.members[a] = joined, list(joined.members)
        for node in two.members:
            self.unit[node] = a
        del self.groups[b], self.members[b]
        bits = (self.before[a] | self.before[b]) & ~(1 << a | 1 << b)
        both = 1 << a | 1 << b
        self.before[a] = bits
        for unit in self.members:
            if unit != a and self.before[unit] & both:
                self.before[unit] |= bits | 1 << a
        return a

    def _cycle(self, a: int, b: int) -> bool:
        """Would a unit have to run both after one of the two and before the other?"""
        both = 1 << a | 1 << b
        for unit in (a, b):
            for base in {base_of(i) for n in self.members[unit] for i in n.all_input_nodes}:
                other = self.unit.get(base)
                if other is not None and other not in (a, b) and self.before[other] & both:
                    return True
        return False


def warn_of_fault(members: Sequence[Node], error: Exception) -> None:
    names = ", ".join(dict.fromkeys(packet(n) for n in members if n.target is not operator.getitem))
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    warnings.warn(
        f"no kernel for {names}: {type(error).__name__}: {said:.200}; this is a fault of autopar, and these ops run "
        "otherwise",
        stacklevel=2,
    )


def _on_one_device(built: Built) -> bool:
    """Are all its tensors where the kernel runs? (A key of random numbers is read on the host.)"""
    return len({n.meta["val"].device for n in (*built.reads, *built.writes)}) == 1


def _size_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
