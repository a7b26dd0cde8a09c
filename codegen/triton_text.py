"""Print a `Kernel` as Triton source that a person can read.

Enters: a kernel. Leaves: a `Printed`: the source of one file, and how its functions are launched. Refused (`TooWide`):
rows that no program can hold.

Sizes are local and known, so they are printed as numbers: masks stand only where a size is no multiple of the tile, and
Triton sees which addresses are multiples of 16 bytes. Indices are int32 unless a buffer is too large for them.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autopar.codegen.formulas import FORMULAS, NEUTRAL, TYPES, helpers_of, literal, reduction
from autopar.codegen.index import Index, dense_strides
from autopar.codegen.kernel import (
    Apply,
    Bits,
    Condition,
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
)
from autopar.codegen.swept_text import swept_body
from autopar.codegen.tiles import Tile, power_of_2, tile_of


@dataclass(frozen=True, slots=True)
class Launch:
    """One function of a printed file. args: names of its arguments ("x0" read, "y0" written, "p0" partial sums, "k0",
    "l0" the words of a key)."""

    function: str
    args: tuple[str, ...]
    grid: tuple[int, int]
    warps: int


@dataclass(frozen=True, slots=True)
class Printed:
    """partials: (shape, kind) of the buffers of partial sums."""

    text: str
    launches: tuple[Launch, ...]
    partials: tuple[tuple[tuple[int, int], str], ...]
    tile: Tile


def print_kernel(kernel: Kernel, tile: Tile | None = None) -> Printed:
    """tile: another one than `tile_of` gives. Raises: TooWide."""
    return _Printer(kernel, tile or tile_of(kernel)).run()


class _Printer:
    def __init__(self, kernel: Kernel, tile: Tile) -> None:
        self.kernel, self.tile = kernel, tile
        self.flat = not kernel.rows and not kernel.reduces and not kernel.sums
        self.moves = kernel.moves
        self.names: dict[int, str] = {}
        self.last_note = ""
        self.users: dict[int, list[int]] = defaultdict(list)
        """Of each step those that read it; -1 stands for a store."""
        for i, step in enumerate(kernel.steps):
            for arg in args_of(step.does):
                self.users[arg].append(i)
        for value in kernel.written:
            self.users[value] += [-1, -1]
        self.used: dict[str, int] = {}
        tile = self.tile
        self.masks_rows = kernel.row_count != tile.programs * tile.rows_each
        self.masks_columns = kernel.column_count % tile.columns != 0
        reach = [
            b.strides and sum((n - 1) * s for n, s in zip(b.shape, b.strides, strict=True)) for b in kernel.buffers
        ]
        positions = [s.does.at.span(kernel.axes) for s in kernel.steps if isinstance(s.does, Position)]
        far = [abs(end) for span in positions for end in span]
        self.wide = max([0, *far, *(int(r or 0) for r in reach)], default=0) >= 2**31
        self.loops = bool(kernel.sums)

    def run(self) -> Printed:
        kernel, tile = self.kernel, self.tile
        count = len(kernel.sums) if tile.programs > 1 else 0
        reads = [f"x{i}" for i in range(kernel.inputs)]
        writes = [f"y{i}" for i in range(len(kernel.buffers) - kernel.inputs)]
        words = [w for i in range(kernel.keys) for w in (f"k{i}", f"l{i}")]
        summed = [f"y{s.buffer - kernel.inputs}" for s in kernel.sums] if count else []
        args = (*reads, *(w for w in writes if w not in summed), *(f"p{i}" for i in range(count)), *words)
        body = list(self._body())
        base = "_".join(dict.fromkeys(n.strip("_") for n in kernel.names))
        name = f"fused_{base}"
        if len(name) > 60:
            name = f"{name[:52]}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        fixed = f"(do_not_specialize={words!r})".replace("'", '"') if words else ""
        lines = [f"@triton.jit{fixed}", f"def {name}({', '.join(args)}):", *self._docstring(), *body]
        grid = (tile.column_blocks, 1) if self.flat else (tile.programs, tile.column_blocks)
        launches = [Launch(name, args, grid, tile.warps)]
        if count:
            finish, launch = self._finish(f"{name}_sums", summed)
            lines += ["", "", *finish]
            launches.append(launch)
        text = "\n".join(lines) + "\n"
        helpers = [line + "\n\n\n" for line in helpers_of(text)]
        head = "import triton\nimport triton.language as tl\n\n\n"
        kinds = tuple(((tile.programs, kernel.column_count), kernel.steps[s.value].kind) for s in kernel.sums[:count])
        return Printed(head + "".join(helpers) + text, tuple(launches), kinds, tile)

    def _docstring(self) -> Iterator[str]:
        kernel = self.kernel
        ops = ", ".join(dict.fromkeys(n.strip("_") for n in kernel.names))
        shape = f"{kernel.column_count} elements" if self.flat else f"{kernel.row_count} rows of {kernel.column_count}"
        yield f'    """{ops}: {shape}.'
        yield ""
        for i, buffer in enumerate(kernel.buffers):
            name = f"x{i}" if i < kernel.inputs else f"y{i - kernel.inputs}"
            dense = tuple(buffer.strides) == dense_strides(buffer.shape)
            strides = "" if dense else f" with strides {list(buffer.strides)}"
            yield f"    {name}: {str(buffer.dtype).removeprefix('torch.')}{list(buffer.shape)}{strides}"
        yield '    """'

    # the body: indices, loads, values, stores

    def _body(self) -> Iterator[str]:
        if self.tile.swept:
            yield from swept_body(self)
            return
        yield from self.columns("    ")
        inner = "    "
        if self.loops:
            for i in range(len(self.kernel.steps)):
                if not self.moves[i][0]:
                    yield from self.made(i, "    ")
            for i, total in enumerate(self.kernel.sums):
                kind = self.kernel.steps[total.value].kind
                yield f"    sum{i} = tl.full(({self.tile.rows}, {self.tile.columns}), 0, {TYPES[kind]})"
            yield f"    for step in range({self.tile.passes}):"
            inner = "        "
        if not self.flat:
            yield from self.rows(inner)
        for i in range(len(self.kernel.steps)):
            if i not in self.names:
                yield from self.made(i, inner)
        for store in self.kernel.stores:
            yield self.stored(store, inner)
        yield from self._sums(inner)

    def stored(self, store: Store, inner: str) -> str:
        """The line of a store."""
        mask = self._mask(store.at.on(self._row_axes()), store.at.on(self._column_axes()))
        ends = f", mask={mask}" if mask else ""
        name = f"y{store.buffer - self.kernel.inputs}"
        # a number for the one row of a kernel is a tile of one: so must its address be
        one = " + row * 0" if not self.flat and not store.at.terms else ""
        return f"{inner}tl.store({self._address(name, store.at)}{one}, {self.names[store.value]}{ends})"

    def _sums(self, inner: str) -> Iterator[str]:
        for i, total in enumerate(self.kernel.sums):
            value = self._whole_tile(total.value)
            yield f"{inner}sum{i} += " + (f"tl.where(row_ok, {value}, 0)" if self.masks_rows else value)
        mask = ", mask=col_ok" if self.masks_columns else ""
        for i, total in enumerate(self.kernel.sums):
            found = f"tl.sum(sum{i}, axis=0, keep_dims=True)"
            width = self.kernel.column_count
            if self.tile.programs > 1:
                yield f"    tl.store(p{i} + tl.program_id(0) * {width} + col, {found}{mask})"
            else:
                yield f"    tl.store(y{total.buffer - self.kernel.inputs} + col, {found}{mask})"

    def columns(self, inner: str) -> Iterator[str]:
        """The lines that say which columns a tile has."""
        tile, width = self.tile, self.kernel.column_count
        name = "i" if self.flat else "col"
        spread = "" if self.flat else "[None, :]"
        long = ".to(tl.int64)" if self.wide else ""
        steps = f"tl.arange(0, {tile.columns}){spread}"
        if tile.column_blocks > 1:
            program = "tl.program_id(0)" if self.flat else "tl.program_id(1)"
            yield f"{inner}{name} = {program}{long} * {tile.columns} + {steps}"
        else:
            yield f"{inner}{name} = {'start + ' if tile.swept else ''}{steps}{long}"
        if self.masks_columns:
            yield f"{inner}{name}_ok = {name} < {width}"
        yield from self._coordinates(name, self._column_axes(), inner)

    def rows(self, inner: str) -> Iterator[str]:
        """The lines that say which rows a tile has."""
        tile = self.tile
        long = ".to(tl.int64)" if self.wide else ""
        first = f"tl.program_id(0){long} * {tile.rows_each}"
        if self.loops and tile.passes > 1:
            first += f" + step * {tile.rows}"
        yield f"{inner}row = {first} + tl.arange(0, {tile.rows})[:, None]"
        if self.masks_rows:
            yield f"{inner}row_ok = row < {self.kernel.row_count}"
        yield from self._coordinates("row", self._row_axes(), inner)

    def _coordinates(self, name: str, axes: range, inner: str) -> Iterator[str]:
        """A line for each axis that an index moves with, where there are several."""
        forms = [i for s in self.kernel.steps for i in indices(s.does)] + [s.at for s in self.kernel.stores]
        step = 1
        lines = []
        for axis in reversed(axes):
            size = self.kernel.axes[axis]
            if len(axes) > 1 and any(f.on((axis,)) for f in forms):
                text = f"{name} // {step}" if step > 1 else name
                text += f" % {size}" if axis != axes[0] else ""
                lines.append(f"{inner}{self._axis(axis)} = {text}")
            step *= size
        yield from reversed(lines)

    def _axis(self, axis: int) -> str:
        rows = axis < self.kernel.rows
        if len(self._row_axes() if rows else self._column_axes()) == 1:
            return "row" if rows else "i" if self.flat else "col"
        return f"r{axis}" if rows else f"c{axis - self.kernel.rows}"

    def _row_axes(self) -> range:
        return range(self.kernel.rows)

    def _column_axes(self) -> range:
        return range(self.kernel.rows, len(self.kernel.axes))

    def made(self, place: int, inner: str) -> Iterator[str]:
        """The line that makes a step, if it needs one, and from then on its name."""
        step = self.kernel.steps[place]
        does = step.does
        if isinstance(does, Literal):
            self.names[place] = literal(does.value, step.kind)
            return
        text = self._expression(place, step)
        if self._inlined(place, text):
            self.names[place] = text if re.fullmatch(r"[\w.]+\([^()]*\)", text) else f"({text})"
            return
        name = self.fresh((step.name or "value") if not isinstance(does, Load) else f"in{does.buffer}")
        self.names[place] = name
        comment = f"  # {step.note}" if step.note not in ("", self.last_note) and not isinstance(does, Load) else ""
        if isinstance(does, Load):
            yield from self._checked(place, does, inner)
        else:
            self.last_note = step.note
        yield f"{inner}{name} = {text}{comment}"

    def _checked(self, place: int, does: Load, inner: str) -> Iterator[str]:
        """Under TRITON_DEBUG=1, and in the interpreter: is each place that was read one of the buffer?"""
        mask = self._mask(*self.moves[place], *(self._condition(c) for c in does.where))
        for value, _, places in does.gather:
            name, ends = self._operand(value), f", {mask}" if mask else ""
            yield f'{inner}tl.device_assert(({name} >= 0) & ({name} < {places}), "index out of range"{ends})'

    def fresh(self, first: str) -> str:
        """A name that is not taken yet."""
        number = self.used.get(first, 0)
        self.used[first] = number + 1
        return f"{first}_{number}" if number or first in _TAKEN else first

    def _inlined(self, place: int, text: str) -> bool:
        """Is this a short part of one other step of the same op?"""
        step, users = self.kernel.steps[place], self.users[place]
        if not isinstance(step.does, (Apply, Reduce)) or len(users) != 1 or len(text) > 56:
            return False
        user = self.kernel.steps[users[0]]
        if (
            not isinstance(user.does, Apply)
            or user.note != step.note
            or self.moves[place][0] != self.moves[users[0]][0]
            or (self.tile.swept and self.moves[place][1] != self.moves[users[0]][1])
        ):
            return False
        slots = [i for i, a in enumerate(user.does.args) if a == place]
        return sum(FORMULAS[user.does.formula].count(f"{{{i}}}") for i in slots) == 1

    def _expression(self, place: int, step: Step) -> str:
        does, moves = step.does, self.moves[place]
        if isinstance(does, Load):
            gather = tuple(f"{self._long(v)} * {stride}" for v, stride, _ in does.gather)
            conditions = [self._condition(c) for c in does.where]
            mask = self._mask(*moves, *conditions)
            ends = f", mask={mask}, other=0" if mask else ""
            text = f"tl.load({self._address(f'x{does.buffer}', does.at, gather)}{ends})"
            dtype = self.kernel.buffers[does.buffer].dtype
            return text + (".to(tl.float32)" if step.kind == "f32" and dtype != torch.float32 else "")
        if isinstance(does, Position):
            return f"({self._index(does.at)}).to({TYPES[step.kind]})" if does.at.terms else f"{does.at.offset}"
        if isinstance(does, Inside):
            return " & ".join(self._condition(c) for c in does.where)
        if isinstance(does, Bits):
            low = f"({self._index(does.at)}).to(tl.int32)"
            return f"random_bits({low}, k{does.key}, l{does.key})"
        if isinstance(does, Reduce):
            return reduction(does.how, self.within(does), step.kind)
        assert isinstance(does, Apply)
        operands = [self._operand(a) for a in args_of(does)]
        kinds = [self.kernel.steps[a].kind for a in args_of(does) if isinstance(self.kernel.steps[a].does, Literal)]
        if len(kinds) == len(operands):  # Python's own arithmetic is another
            operands = [f"tl.full((), {o}, {TYPES[kind]})" for o, kind in zip(operands, kinds, strict=True)]
        return FORMULAS[does.formula].format(*operands)

    def _long(self, place: int) -> str:
        """An index that was read, as wide as the place that it leads to needs."""
        name = self.names[place]
        return f"{name}.to(tl.int64)" if self.wide and self.kernel.steps[place].kind == "i32" else name

    def within(self, does: Reduce) -> str:
        """What a reduction joins, with what changes nothing beyond the last column."""
        value, kind = self._whole_tile(does.arg), self.kernel.steps[does.arg].kind
        return f"tl.where(col_ok, {value}, {NEUTRAL[does.how][kind]})" if self.masks_columns else value

    def _operand(self, place: int) -> str:
        name = self.names[place]
        return f"({name})" if name.startswith("-") else name

    def _whole_tile(self, place: int) -> str:
        """A value that moves with both rows and columns of the tile; one that does not is spread."""
        row, column = self.moves[place]
        name = self.names[place]
        rows, columns = self.tile.rows, self.tile.columns
        if isinstance(self.kernel.steps[place].does, Literal):
            return f"tl.full(({rows}, {columns}), {name}, {TYPES[self.kernel.steps[place].kind]})"
        return name if row and column else f"tl.broadcast_to({name}, ({rows}, {columns}))"

    def _address(self, name: str, at: Index, gather: tuple[str, ...] = ()) -> str:
        index = " + ".join((*gather, *((self._index(at),) if at.terms or at.offset else ())))
        return f"{name} + {index}" if index else name

    def _index(self, at: Index) -> str:
        terms = [self._axis(a) if c == 1 else f"{self._axis(a)} * {c}" for a, c in at.terms]
        text = " + ".join(terms) or str(at.offset)
        if at.terms and at.offset:
            text += f" + {at.offset}" if at.offset > 0 else f" - {-at.offset}"
        return text

    def _condition(self, condition: Condition) -> str:
        low, high = condition.index.span(self.kernel.axes)
        index, parts = self._index(condition.index), []
        if condition.low > low:
            parts.append(f"({index} >= {condition.low})")
        if condition.high <= high:
            parts.append(f"({index} < {condition.high})")
        return " & ".join(parts) or "True"

    def _mask(self, row: bool, column: bool, *conditions: str) -> str:
        parts = ["row_ok"] if row and self.masks_rows else []
        parts += [("i_ok" if self.flat else "col_ok")] if column and self.masks_columns else []
        return " & ".join((*parts, *conditions))

    def _finish(self, name: str, summed: list[str]) -> tuple[list[str], Launch]:
        """The second step of sums over rows: add the partial sums of all programs, in a fixed order."""
        programs, width = self.tile.programs, self.kernel.column_count
        rows, columns = power_of_2(programs), min(32, power_of_2(width))
        args = tuple(a for i, y in enumerate(summed) for a in (f"p{i}", y))
        lines = [
            "@triton.jit",
            f"def {name}({', '.join(args)}):",
            f'    """Add the partial sums of {programs} programs, in a fixed order."""',
            f"    row = tl.arange(0, {rows})[:, None]",
            f"    col = tl.program_id(0) * {columns} + tl.arange(0, {columns})[None, :]",
        ]
        masks = [f"(row < {programs})"] if rows != programs else []
        column_mask = f"(col < {width})" if width % columns else ""
        mask = " & ".join(m for m in (*masks, column_mask) if m)
        for i, y in enumerate(summed):
            ends = f", mask={mask}, other=0" if mask else ""
            store = f", mask={column_mask}" if column_mask else ""
            lines.append(f"    part{i} = tl.load(p{i} + row * {width} + col{ends})")
            lines.append(f"    tl.store({y} + col, tl.sum(part{i}, axis=0, keep_dims=True){store})")
        return lines, Launch(name, args, (-(-width // columns), 1), 4)


_TAKEN = frozenset("row col i step start grown base tl triton tanh log1p expm1 where abs not and".split())
"""Names that a value may not have: it gets a number."""
