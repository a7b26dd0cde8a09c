"""From a group of fx nodes to a `Kernel`.

Enters: nodes of a lowered graph (pointwise ops, norms, softmaxes, reductions, gathers, the views between them) and
those whose values are wanted outside. Leaves: a kernel, and the nodes that it reads. Refused (`Unfusable`, which names
the op and says why): an op without formula, shapes without a common grid, a reduction that is not over a row.

A value is asked for at an index (`index`), and asks for what it is made of at the indices that it needs; equal steps
are kept once. So views cost nothing, and a broadcast is an index that does not move.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch.fx import Node

from autopar.codegen import composites, rows
from autopar.codegen.demand import RULES, Unfusable, demand
from autopar.codegen.formulas import POINTWISE
from autopar.codegen.index import Index, NotLinear, common_axes, dense_strides, flatten, make, split
from autopar.codegen.kernel import (
    KINDS,
    Apply,
    Bits,
    Buffer,
    ColumnSum,
    Condition,
    Does,
    Inside,
    Kernel,
    Literal,
    Load,
    Position,
    Reduce,
    Step,
    Store,
    args_of,
    indices,
    merge_axes,
    without_unread,
)
from autopar.codegen.views import At, argument, base_of, given, packet, shape_of, view_of, viewed
from autopar.program import record


@dataclass(frozen=True, eq=False)
class Built:
    """A kernel, the nodes that are its read buffers, its written ones, and the keys of its random numbers."""

    kernel: Kernel
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    keys: tuple[Node, ...]


def build(members: Sequence[Node], outputs: Sequence[Node]) -> Built:
    """The kernel of a group. members: in graph order, views between them left out. outputs: members read outside.

    Raises: Unfusable.
    """
    try:
        return _Builder(members, outputs).run()
    except NotLinear as refused:
        raise Unfusable(str(refused)) from None


class _Builder:
    def __init__(self, members: Sequence[Node], outputs: Sequence[Node]) -> None:
        self.members, self.outputs = dict.fromkeys(members), tuple(outputs)
        self.steps: list[Step] = []
        self.known: dict[tuple[Does, str], int] = {}
        self.memo: dict[Any, int] = {}
        self.where: tuple[Condition, ...] = ()
        self.reads: dict[Node, int] = {}
        self.keys: list[Node] = []
        self.at_node: Node | None = None
        self._grid()

    def _grid(self) -> None:
        """Choose the axes: rows as the reductions want them, cut so that all shapes are products of axes."""
        demands = {n: demand(n) for n in self.members}
        columns = {d.columns for d in demands.values() if d.columns is not None}
        if len(columns) > 1:
            raise Unfusable(f"rows of different lengths: {sorted(columns)}")
        self.width = columns.pop() if columns else None
        self.pieces = self._pieces()
        elements = [d.elements for n, d in demands.items() if d.columns or (n in self.outputs and n not in self.pieces)]
        pieces = [p for n in self.pieces for p in given(n)[0]]
        self.total = max([*elements, *(math.prod(shape_of(p)) for p in pieces)])
        if self.width is not None and self.total % self.width:
            raise Unfusable(f"{self.total} elements are no whole rows of {self.width}")
        height = self.total // self.width if self.width else None
        shapes = self._whole((*self.outputs, *pieces), height)
        if self.width is not None:
            shapes.append((self.total // self.width, self.width))
        self.axes = common_axes(shapes, self._whole(self._inner(), height), self.total)
        self.rows, product = 0, 1
        while height is not None and product < height:
            product *= self.axes[self.rows]
            self.rows += 1

    def _whole(self, nodes: Sequence[Node], height: int | None) -> list[tuple[int, ...]]:
        """Shapes of the nodes that are as large as the kernel's loops, or as its rows: those with the columns added."""
        found = []
        for node in nodes:
            shape = shape_of(node)
            if math.prod(shape) == self.total:
                found.append(shape)
            elif height is not None and self.width is not None and math.prod(shape) == height:
                found.append((*shape, self.width))
        return found

    def _inner(self) -> list[Node]:
        """Members and the views between them that are tensors, and the inputs of reductions among them."""
        found: dict[Node, None] = {}
        for member in self.members:
            stack = [member, *member.all_input_nodes]
            while stack:
                node = stack.pop()
                if isinstance(node.meta.get("val"), torch.Tensor):
                    if self.inside(node) or rows.columns(member) or packet(member) in composites.SUMS:
                        found[node] = None
                    if node not in self.members and view_of(node) is not None and self.inside(node):
                        stack.append(viewed(node))
        return list(found)

    def _pieces(self) -> set[Node]:
        """Concatenations that are written piece by piece: read outside only, of pieces of one shape."""
        found = set()
        for node in self.outputs:
            if packet(node) == "cat":
                parts = given(node)[0]
                inner = any(self.inside(u) for m in self.members for u in m.all_input_nodes if base_of(u) is node)
                if len({shape_of(p) for p in parts if isinstance(p, Node)}) == 1 and not inner:
                    found.add(node)
        return found

    def inside(self, node: Node) -> bool:
        """Is this value made in the kernel?"""
        return base_of(node) in self.members

    def run(self) -> Built:
        row_axes, all_axes = range(self.rows), range(len(self.axes))
        strides = dense_strides(self.axes)
        self.columns_at = make({a: strides[a] for a in all_axes if a >= self.rows})
        width = self.width or 1
        self.rows_at = make({a: strides[a] // width for a in row_axes})
        whole = make({a: strides[a] for a in all_axes})
        written: list[tuple[Node, int, Index | None]] = []
        for node in self.outputs:
            shape = shape_of(node)
            memory = node.meta["val"].stride()
            if node in self.pieces:
                self._write_pieces(node, whole, written)
                continue
            self.at_node = node
            summed = self._column_sum(node)
            if summed is not None:
                written.append((node, summed, None))
                continue
            elements = math.prod(shape)
            if elements == self.total:
                at = split(whole, shape, self.axes)
            elif self.width is not None and elements * self.width == self.total:
                at = split(self.rows_at, shape, self.axes)
            else:
                raise Unfusable(f"{packet(node)} of {shape} is read outside a kernel of {self.total} elements")
            written.append((node, self.value(node, at), flatten(at, memory)))
        return self._built(written)

    def _write_pieces(self, node: Node, whole: Index, written: list[tuple[Node, int, Index | None]]) -> None:
        memory, start = node.meta["val"].stride(), 0
        parts = given(node)[0]
        dim = argument(node, 1, "dim", 0) % len(memory)
        for part in parts:
            if math.prod(shape_of(part)) != self.total:
                raise Unfusable(f"cat of pieces of {shape_of(part)} in a kernel of {self.total} elements")
            at = split(whole, shape_of(part), self.axes)
            self.at_node = node
            value = self.cast(self.value(part, at), KINDS[node.meta["val"].dtype])
            written.append((node, value, flatten(at, memory) + start * memory[dim]))
            start += shape_of(part)[dim]

    def _column_sum(self, node: Node) -> int | None:
        """The value whose sum over all rows this node is, when it is one."""
        if self.width is None:
            return None
        found = rows.column_sum(node)
        if found is None:
            return None
        source, rule = found
        shape, value = shape_of(source), node.meta["val"]
        if value.numel() != self.width or not value.is_contiguous():
            raise Unfusable(f"{packet(node)}: sums of {self.width} columns as {tuple(value.shape)}")
        if math.prod(shape) != self.total:
            raise Unfusable(f"{packet(node)} of {shape} in a kernel of {self.total} elements")
        return rule(self, split(self.rows_at * self.width + self.columns_at, shape, self.axes))

    def _built(self, written: Sequence[tuple[Node, int, Index | None]]) -> Built:
        for node, _, at in written:
            low, high = (0, 0) if at is None else at.span(self.axes)
            assert 0 <= low <= high < _extent(node.meta["val"]), f"{node.name} is written beyond its end"
        inputs = [_buffer(n) for n in self.reads]
        writes = tuple(dict.fromkeys(n for n, _, _ in written))
        place = {n: len(inputs) + i for i, n in enumerate(writes)}
        kernel = Kernel(
            self.axes,
            self.rows,
            (*inputs, *(_buffer(n) for n in writes)),
            len(inputs),
            tuple(self.steps),
            tuple(Store(self.unrounded(v, n), place[n], at) for n, v, at in written if at is not None),
            tuple(ColumnSum(v, place[n]) for n, v, at in written if at is None),
            len(self.keys),
            tuple(packet(n).rpartition(".")[2] for n in self.members if n.target is not operator.getitem),
        )
        return Built(merge_axes(without_unread(kernel)), tuple(self.reads), writes, tuple(self.keys))

    def unrounded(self, value: int, node: Node) -> int:
        """What a cast rounds that a store would round."""
        does = self.steps[value].does
        rounds = isinstance(does, Apply) and does.formula == composites.ROUNDINGS.get(node.meta["val"].dtype)
        return does.args[0] if rounds and isinstance(does, Apply) else value

    # values

    def value(self, node: Any, at: At, kind: str | None = None) -> int:
        """The step that holds a node's element at `at` (a number: a literal), as a number of `kind`."""
        if not isinstance(node, Node):
            return self.literal(node, kind or "f32")
        key = (node, at, self.where)
        if key not in self.memo:
            before, self.at_node = self.at_node, (node if node in self.members else self.at_node)
            self.memo[key] = self._make(node, at)
            self.at_node = before
        return self.memo[key] if kind is None else self.cast(self.memo[key], kind)

    def _make(self, node: Node, at: At) -> int:
        view = view_of(node)
        if not self.inside(node):
            return self.load(node, at)
        if view is not None:
            return self.value(viewed(node), view(node, at, self.axes))
        name = packet(node)
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype not in KINDS:
            raise Unfusable(f"{name}: {value.dtype} has no kind")
        if name in POINTWISE:
            return composites.pointwise(self, node, at)
        if node.target is operator.getitem:
            whole, item = given(node)
            return RULES[packet(whole)](self, whole, item, at)
        rule: Callable[..., int] | None = RULES.get(name)
        if rule is None:
            raise Unfusable(f"{name} has no formula")
        return rule(self, node, 0, at)

    def load(self, node: Node, at: At, gather: tuple[tuple[int, int, int], ...] = ()) -> int:
        """Read an element from memory. gather: (step, stride in elements, places) to add to its own."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in KINDS:
            raise Unfusable(f"{node.name} is no tensor of a known dtype")
        if not value.numel():
            raise Unfusable(f"{node.name} has no elements")
        place_at = flatten(at, value.stride())
        low, high = place_at.span(self.axes)
        where = tuple(c for c in self.where if not self.holds(c))
        moves = {axis for axis, _ in place_at.terms}.union(*(self.axes_of(step) for step, _, _ in gather))
        good = tuple(c for c in where if {axis for axis, _ in c.index.terms} <= moves)
        if gather or low < 0 or high >= _extent(value):
            if not gather and not where:
                raise Unfusable(f"{node.name} of {tuple(value.shape)} is read beyond its end")
            if good != where:
                raise Unfusable(f"{node.name} is read or not along an axis on which its place stands still")
        # else: an address that stands still while a condition's index moves is good for all of it
        place = self.reads.setdefault(node, len(self.reads))
        return self.step(Load(place, place_at, good, gather), KINDS[value.dtype])

    def axes_of(self, step: int) -> set[int]:
        """The axes with which a value changes."""
        does = self.steps[step].does
        return {axis for index in indices(does) for axis, _ in index.terms}.union(*map(self.axes_of, args_of(does)))

    def holds(self, condition: Condition) -> bool:
        low, high = condition.index.span(self.axes)
        return condition.low <= low and high < condition.high

    def under(self, condition: Condition, value: Callable[[], int]) -> int:
        """value, of which nothing is read where the condition fails; any number there."""
        before, self.where = self.where, (*self.where, condition)
        try:
            return value()
        finally:
            self.where = before

    def when(self, condition: Condition, value: Callable[[], int], otherwise: Callable[[str], int]) -> int:
        """value where the condition holds, read nowhere else; otherwise(kind) elsewhere."""
        found = self.under(condition, value)
        if self.holds(condition):
            return found
        kind = self.steps[found].kind
        return self.emit("where", self.step(Inside((condition,)), "i1"), found, otherwise(kind), kind=kind)

    def step(self, does: Does, kind: str) -> int:
        key = (does, kind)
        if key not in self.known:
            name, note = self._note()
            self.known[key] = len(self.steps)
            self.steps.append(Step(does, kind, name, note))
        return self.known[key]

    def _note(self) -> tuple[str, str]:
        """Name and comment of what is being made; the same for equal blocks."""
        node = self.at_node
        if node is None:
            return "", ""
        op = given(node)[0] if node.target is operator.getitem and isinstance(given(node)[0], Node) else node
        where = record(op).where
        return packet(op).rpartition(".")[2].strip("_"), f"{packet(op)} {PurePath(where).name if where else ''}".strip()

    def named(self, step: int, name: str) -> int:
        """Call a step what it is (the mean, the sigmoid), where it is not yet called so."""
        made = self.steps[step]
        if made.name not in ("mean", "rstd", "centred"):
            self.steps[step] = replace(made, name=name)
        return step

    def literal(self, value: float | int | bool, kind: str) -> int:
        # 1 and 1.0 and True are equal as keys
        made = bool(value) if kind == "i1" else int(value) if kind[0] == "i" else float(value)
        if kind == "i32" and not -(2**31) <= made < 2**31:
            raise NotLinear(f"{made} is no int32")
        return self.step(Literal(made), kind)

    def cast(self, step: int, kind: str) -> int:
        made = self.steps[step]
        if made.kind == kind:
            return step
        if isinstance(made.does, Literal):
            return self.literal(made.does.value, kind)
        return self.step(Apply(kind, (step,)), kind)

    def emit(self, formula: str, *args: int | float, kind: str) -> int:
        """Apply a formula to steps, all cast to `kind` but the condition of a `where`; floats are literals."""
        return self.step(Apply(formula, tuple(self._argument(formula, i, a, kind) for i, a in enumerate(args))), kind)

    def _argument(self, formula: str, place: int, arg: int | float, kind: str) -> int:
        if isinstance(arg, float):
            return self.literal(arg, kind)
        return self.cast(arg, "i1" if formula == "where" and place == 0 else kind)

    def compare(self, formula: str, *args: int) -> int:
        """A truth value of steps of one kind."""
        return self.step(Apply(formula, args), "i1")

    def position(self, at: Index, kind: str) -> int:
        low, high = at.span(self.axes)
        wide = kind == "i64" or low < -(2**31) or high >= 2**31
        return self.cast(self.step(Position(at), "i64" if wide else "i32"), kind)

    def bits(self, key: Node, at: Index) -> int:
        """Random bits of the element at `at`. key: the node that makes the key."""
        if key not in self.keys:
            self.keys.append(key)
        return self.step(Bits(self.keys.index(key), at), "i32")

    def row(self, how: str, shape: Sequence[int], dims: int, rows: At, of: Callable[[At], int]) -> int:
        """Reduce `of` over the last `dims` dims of `shape`, at the row `rows`. of: the value at a whole index.

        Raises: Unfusable: these dims are not the columns of the kernel, or the row moves with the column.
        """
        wide = tuple(shape[len(shape) - dims :])
        if math.prod(wide) != self.width:
            raise Unfusable(f"a reduction over {wide} in rows of {self.width}")
        if any(i.on(range(self.rows, len(self.axes))) for i in rows):
            raise Unfusable("a reduction whose row moves with the column")
        if self.where:
            raise Unfusable("a reduction inside a piece")
        arg = of((*rows, *split(self.columns_at, wide, self.axes)))
        if self.width == 1:
            return arg
        return self.step(Reduce(how, arg), self.steps[arg].kind)


def _extent(value: torch.Tensor) -> int:
    """Elements of memory that a tensor reaches over."""
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))


def _buffer(node: Node) -> Buffer:
    value = node.meta["val"]
    return Buffer(value.dtype, tuple(value.shape), tuple(value.stride()))
