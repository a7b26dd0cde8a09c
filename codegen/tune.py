"""Choose a kernel's tile by time instead of by estimate: optional, and kept on disk by text and device.

Enters: a group's code, and a function that runs one. Leaves: the same kernel, printed for the fastest tile. Done at a
kernel's first launch on a GPU where `AUTOPAR_TUNE=1` asks for it; ignored elsewhere. A choice that is on disk is taken
without a measurement; a damaged file is measured again.

Ranks measure for themselves, so where there are several, a kernel whose tile decides in which order numbers are added
is left alone: what ranks hold alike must stay alike to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.codegen.code import Code
from autopar.codegen.kernel import Kernel
from autopar.codegen.load import cache_folder
from autopar.codegen.tiles import Tile, power_of_2, tile_of
from autopar.codegen.triton_text import print_kernel

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a function takes."""


def wanted() -> bool:
    return os.environ.get("AUTOPAR_TUNE") == "1"


def tuned(code: Code, run: Callable[[Code], object], timer: Timer | None = None, device: str = "") -> Code:
    """The code with the fastest of its tiles.

    Args:    run: launches a code, with its inputs. timer, device: how it is timed and the name it is kept under; those
             of the current GPU when not given. A candidate that does not build is passed over.
    """
    if not wanted() or (_ranks() > 1 and (code.kernel.reduces or code.kernel.sums)):
        return code
    if timer is None:
        if not torch.cuda.is_available():
            return code
        timer, device = _gpu_time_s, torch.cuda.get_device_name()
    file = choice_file(code, device)
    tiles = candidates(code.kernel)
    chosen = _read(file, code, device, tiles)
    if chosen is None:
        made = [replace(code, printed=print_kernel(code.kernel, tile)) for tile in tiles]
        times_s = [_time_s(timer, run, one) for one in made]
        chosen = tiles[times_s.index(min(times_s))]
        _write(file, {"text": _digest(code), "device": device, "tile": asdict(chosen)})
    return code if chosen == code.printed.tile else replace(code, printed=print_kernel(code.kernel, chosen))


def candidates(kernel: Kernel) -> tuple[Tile, ...]:
    """Tiles worth a try, the estimated one first.

    Raises: TooWide: there is none.
    """
    return tuple(dict.fromkeys((first := tile_of(kernel), *_others(kernel, first))))


def _others(kernel: Kernel, first: Tile) -> Iterator[Tile]:
    width, height = kernel.column_count, kernel.row_count
    for factor in (0.5, 1, 2):
        for warps in (first.warps // 2, first.warps, first.warps * 2):
            if not 1 <= warps <= 32:
                continue
            if kernel.sums:
                yield replace(first, warps=warps)
            elif first.swept or not kernel.reduces:
                columns = int(first.columns * factor)
                if 64 <= columns <= power_of_2(width):
                    blocks = 1 if first.swept else -(-width // columns)
                    yield replace(first, columns=columns, column_blocks=blocks, warps=warps)
            else:
                rows = int(first.rows * factor)
                if 1 <= rows <= power_of_2(height):
                    yield replace(first, rows=rows, rows_each=rows, programs=-(-height // rows), warps=warps)


def choice_file(code: Code, device: str) -> Path:
    """Where the choice for a kernel on a device is kept."""
    name = hashlib.sha256(f"{device}\n{code.printed.text}".encode()).hexdigest()[:24]
    return cache_folder() / "tiles" / f"{name}.json"


def _read(file: Path, code: Code, device: str, tiles: tuple[Tile, ...]) -> Tile | None:
    """The kept choice, if the file says what it should and names one of the candidates."""
    try:
        held = json.loads(file.read_text())
        if (held["text"], held["device"]) != (_digest(code), device):
            return None
        return next((t for t in tiles if asdict(t) == held["tile"]), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, choice: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as out:
        json.dump(choice, out)
    os.replace(name, file)  # ranks may write the same file at once


def _digest(code: Code) -> str:
    return hashlib.sha256(code.printed.text.encode()).hexdigest()


def _time_s(timer: Timer, run: Callable[[Code], object], code: Code) -> float:
    try:
        return timer(lambda: run(code))
    except Exception:  # of Triton: too many registers or too much shared memory for this device
        return math.inf


def _gpu_time_s(function: Callable[[], object]) -> float:
    import triton.testing

    return triton.testing.do_bench(function, warmup=5, rep=20) / 1e3


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
