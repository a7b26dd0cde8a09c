"""How much of a kernel's loops one program takes: block sizes and warps, from an estimate of registers.

Enters: a kernel. Leaves: a `Tile`. Rows that no program can hold at once are swept (see `sweeps`). Refused (`TooWide`):
such rows in a kernel that also sums over the rows; rows so few and so long that most of the device would be idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.codegen.kernel import Kernel, Load, Reduce, args_of
from autopar.codegen.sweeps import read_again_bytes

PROGRAMS = 128
"""[derived] row programs of a kernel that sums over rows: about one for each multiprocessor of an A100 or H100."""
PARTIAL_SHARE = 0.045
"""[derived] share of a kernel's bytes that partial sums may add."""
FLAT_BLOCK = 1024
"""[derived] elements of a program without rows: 8 a thread of 4 warps, 16 bytes of half precision."""
REGISTERS = 104
"""[derived] 32-bit registers a thread that values may take: addresses and the assembler's own come on top."""
WARPS = (4, 8, 16, 32)
FEW_ELEMENTS = 128
"""[measured] steps of no more elements are one warp's: of what several warps do alike the assembler (13.4, for sm_100)
spills some, at 32 registers a thread: 48 to 64 bytes, in ten of 4,279 kernels."""
HELD_WARPS, HELD_REGISTERS = 16, {8: 192, 16: 192, 32: 192, 64: 128}
"""[measured] of rows that are held by a program which has a multiprocessor to itself, 128 registers a thread: most
registers by `held_values`, which takes all loads to be in flight at once, by elements a thread. By the assembler's
report on norms, softmaxes and their backwards, 8192 to 32768 wide."""
LOOPING_REGISTERS = 2048
"""[measured] as above, times warps, of a program of at least 16 warps that passes over many rows."""
LOOPING = (
    (8, 16),
    (8, 8),
    (4, 16),
    (8, 4),
    (4, 8),
    (16, 16),
    (2, 16),
    (8, 32),
    (4, 4),
    (16, 8),
    (16, 32),
)
"""[derived] elements a thread and warps of a step of such a program, the wished for first."""
SWEPT_WARPS = 8
FEW_ROWS, LONG_ROW = 32, 2**17
"""[derived] rows longer than this, and fewer than this, are left to ATen: a program a row would use little of a GPU."""
CACHED_ROW_BYTES, CACHED_SHARE = 2**16, 0.25
"""[derived] what one program reads again of a row as short as this comes from a cache (A100 and H100: 40 to 50 MB for
about 500 programs at once), and costs this share of a read from memory."""
_FILE = 65536
"""[spec] 32-bit registers of a multiprocessor: CUDA C++ programming guide, compute capabilities 8.0 to 10.0."""


class TooWide(Exception):
    """No tile suits the rows of a kernel."""


@dataclass(frozen=True, slots=True)
class Tile:
    """rows, columns: of one step of one program, powers of 2 (flat kernels: 1 row). programs: along the rows.
    rows_each: rows that one program passes. column_blocks: programs along the columns.
    swept: a program loops over the columns of its row."""

    rows: int
    columns: int
    programs: int
    rows_each: int
    column_blocks: int
    warps: int
    swept: bool = False

    @property
    def passes(self) -> int:
        """Steps of the loop of a program over its rows."""
        return -(-self.rows_each // self.rows)


def power_of_2(n: int) -> int:
    """The least power of 2 that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


def live_values(kernel: Kernel) -> int:
    """The most 32-bit numbers for an element that are needed at once, accumulators included."""
    last: dict[int, int] = {}
    for i, step in enumerate(kernel.steps):
        for arg in args_of(step.does):
            last[arg] = i
    for value in kernel.written:
        last[value] = len(kernel.steps) - 1
    moves = kernel.moves
    size = [2 if s.kind in ("f64", "i64") else 1 for s in kernel.steps]
    most = live = 0
    for i in range(len(kernel.steps)):
        live += size[i] if moves[i][1] else 0
        most = max(most, live)
        live -= sum(size[v] for v, end in last.items() if end == i and moves[v][1])
    return max(most, 1) + len(kernel.sums)


def held_values(kernel: Kernel) -> float:
    """The 32-bit numbers for an element that a program of whole rows holds: what a reduction stands between the making
    and the reading of, sums over rows, and what it loads, of which half precision stays packed until it is used."""
    last = {a: i for i, step in enumerate(kernel.steps) for a in args_of(step.does)}
    last |= dict.fromkeys(kernel.written, len(kernel.steps))
    wide = [i for i, (_, column) in enumerate(kernel.moves) if column]
    size = {i: 2 if kernel.steps[i].kind in ("f64", "i64") else 1 for i in wide}
    reduces = [i for i, s in enumerate(kernel.steps) if isinstance(s.does, Reduce)]
    across = max((sum(size[v] for v in wide if v < r < last.get(v, 0)) for r in reduces), default=0)
    loads = [does.buffer for i in wide if isinstance(does := kernel.steps[i].does, Load)]
    return across + sum(kernel.buffers[b].dtype.itemsize / 4 for b in loads) + len(kernel.sums)


def moved_bytes(kernel: Kernel) -> int:
    """Bytes that a kernel must read and write, each once."""
    return sum(b.size_bytes for b in kernel.buffers)


def tile_of(kernel: Kernel) -> Tile:
    """Raises: TooWide."""
    tile = _tile_of(kernel)
    return replace(tile, warps=1) if tile.rows * tile.columns <= FEW_ELEMENTS else tile


def _tile_of(kernel: Kernel) -> Tile:
    live = live_values(kernel)
    if not kernel.rows and not kernel.reduces and not kernel.sums:
        block = min(FLAT_BLOCK, power_of_2(kernel.column_count))
        while live * block // 128 > REGISTERS and block > 256:
            block //= 2
        return Tile(1, block, 1, 1, -(-kernel.column_count // block), 4)
    height, width = kernel.row_count, kernel.column_count
    if not kernel.reduces and not kernel.sums:  # nothing joins the columns of a row: cut them
        columns = min(FLAT_BLOCK, power_of_2(width))
        rows = min(max(1, FLAT_BLOCK // columns), power_of_2(height))
        return Tile(rows, columns, -(-height // rows), rows, -(-width // columns), 4)
    if not kernel.reduces:
        columns = min(128, power_of_2(width))
        rows = min(max(1, 2048 // columns), power_of_2(height))
        while live * rows * columns // 128 > REGISTERS and rows > 1:
            rows //= 2
        return _summed(kernel, rows, columns, 4)
    columns = power_of_2(width)
    if kernel.sums:
        return _summed(kernel, *_looping(kernel, columns, live))
    rows = min(max(1, 1024 // columns), power_of_2(height))
    for warps in WARPS:
        if _fits(live, rows * columns, warps):
            return _summed(kernel, rows, columns, warps)
    held = HELD_REGISTERS.get(columns // (32 * HELD_WARPS), 0)
    if held_values(kernel) * columns <= held * 32 * HELD_WARPS and read_again_bytes(kernel):
        return _summed(kernel, 1, columns, HELD_WARPS)
    return _swept(kernel, live)


def _swept(kernel: Kernel, live: int) -> Tile:
    height, width = kernel.row_count, kernel.column_count
    if height < FEW_ROWS and width > LONG_ROW:
        raise TooWide(f"{height} rows of {width} would keep {height} programs busy")
    live += sum(isinstance(s.does, Reduce) for s in kernel.steps)
    for each in (16, 8, 4):
        if live * each <= REGISTERS:
            return Tile(1, each * SWEPT_WARPS * 32, height, 1, 1, SWEPT_WARPS, swept=True)
    raise TooWide(f"{live} numbers an element do not fit the registers of a program")


def _fits(live: int, elements: int, warps: int) -> bool:
    each = elements / (32 * warps)
    return live * each <= min(REGISTERS, _FILE // (32 * warps) - 12) and each <= 32


def _looping(kernel: Kernel, columns: int, live: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a step of a program that passes over many rows.

    Such programs are few, about one a multiprocessor, so each reads as much at once as its registers hold.
    """
    most, held = power_of_2(-(-kernel.row_count // 4)), held_values(kernel)
    order = LOOPING if most > 1 else sorted(LOOPING, key=lambda step: -step[1])  # few rows: many threads for each
    for each, warps in order:
        rows = each * warps * 32 // columns
        spills = warps >= 16 and held * each * warps > LOOPING_REGISTERS
        if 1 <= rows <= most and _fits(live, rows * columns, warps) and not spills:
            return rows, columns, warps
    if columns <= 512 and _fits(live, columns, 4):
        return 1, columns, 4
    if held * columns <= LOOPING_REGISTERS * 32:
        return 1, columns, HELD_WARPS
    raise TooWide(f"rows of {columns} with {live} numbers an element do not fit the registers of a program")


def _summed(kernel: Kernel, rows: int, columns: int, warps: int) -> Tile:
    height, width = kernel.row_count, kernel.column_count
    blocks = -(-width // columns)
    if not kernel.sums:
        return Tile(rows, columns, -(-height // rows), rows, blocks, warps)
    partial_bytes = 8 * width * len(kernel.sums)
    wanted = min(PROGRAMS if blocks == 1 else max(1, 2 * PROGRAMS // blocks), -(-height // rows))
    programs = max(1, min(wanted, int(PARTIAL_SHARE * moved_bytes(kernel) / partial_bytes)))
    each = -(-height // programs)
    each = -(-each // rows) * rows
    return Tile(rows, columns, -(-height // each), each, blocks, warps)


def extra_bytes(kernel: Kernel, tile: Tile) -> int:
    """Bytes moved beyond the least: of partial sums, written and read once, and what later sweeps read again."""
    if tile.swept:
        return read_again_bytes(kernel)
    return 0 if tile.programs == 1 else 8 * kernel.column_count * tile.programs * len(kernel.sums)


def cost_bytes(kernel: Kernel, tile: Tile) -> float:
    """What a kernel's moves cost, in bytes from memory: what comes from a cache counts less."""
    extra, read = extra_bytes(kernel, tile), sum(b.size_bytes for b in kernel.buffers[: kernel.inputs])
    cached = tile.swept and read <= CACHED_ROW_BYTES * kernel.row_count
    return moved_bytes(kernel) + (CACHED_SHARE * extra if cached else extra)
