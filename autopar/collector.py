"""Python's cyclic collector waits while modules are imported: they make half a million objects, and all of them stay.

Enters: this module, first of all. Leaves: `resume`. Refused: nothing. Half a second of the four that torch takes.
"""

from __future__ import annotations

import gc

_ENABLED = gc.isenabled()
gc.disable()


def resume() -> None:
    """Collect again, unless the collector was off before."""
    if _ENABLED:
        gc.enable()
