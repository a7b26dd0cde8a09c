"""How autopar prints for people: units, consoles, progress.

Enters: figures in seconds, bytes and counts; things rich can print.
Leaves: short text; terminals get colour and progress, files get neither.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

PLAIN_WIDTH = 110  # of plain text: fits a page and most terminals


def seconds(time_s: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.8 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time_s * scale >= 1:
            return f"{time_s * scale:.3g} {unit}" if time_s * scale < 1000 else f"{time_s * scale:,.0f} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s > 0 else "0 s"


def size(size_bytes: float) -> str:
    """`61.2 GiB`, `512 B`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.0f} B"


def count(things: float) -> str:
    """`8.03B`, `124.4M`, `512`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if things >= scale:
            return f"{things / scale:.4g}{unit}"
    return f"{things:.0f}"


def plain_text(thing: RenderableType, width: int = PLAIN_WIDTH) -> str:
    """What rich would print, as text without colour codes and trailing blanks."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False, _environ={})
    console.print(thing)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def stdout_console() -> Console:
    """The console on today's `sys.stdout`; plain text of fixed width where that is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's standard error; what it yields is told each stage as it begins. Elsewhere silent."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status(what) as status:
        yield lambda stage: status.update(f"{what}: {stage}")
