"""Decisions taken by the user: the `pin` argument, checked once.

What enters: a dict such as `{"tp": 8, "zero": 3, "*.up_proj.weight": {"tp": "S(0)"}}`. What leaves: a frozen `Pins`.
    Refused, with a
`PlanError` naming the key: unknown keys, values of the wrong kind, what no plan can hold.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import PlanError
from autopar.mesh import ROLES

SCHEDULES = (
    "gpipe 1f1b interleaved-1f1b looped-bfs interleaved-zb zb-h1 zb-2p zb-v dualpipe-v async-1f1b 2bw chimera".split()
)
SPLIT_BACKWARD = ("interleaved-zb", "zb-h1", "zb-2p", "zb-v", "dualpipe-v")
"""Those that leave weight gradients for later."""
_PLACEMENT = re.compile(r"[IR]|S\(\d+(,\d+)?\)")

NOT_YET: Mapping[str, tuple[object, ...]] = {
    "ep": (1,),
    "cp": (1,),
}
"""Values that the runtime can keep at this version, for the keys where it can't keep all."""


@dataclass(frozen=True, slots=True)
class Pins:
    """Checked pins. degrees: pinned roles. zero: None leaves it to the planner. sp: Megatron sequence parallel."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    zero: int | None = None
    sp: bool | None = None
    layouts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    recompute: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """The pins as they came, for messages and the plan."""

    @property
    def staged(self) -> bool:
        """Do the pins ask for stages or micro-batches?"""
        return any(self.given.get(key, 1) != 1 for key in ("pp", "microbatches", "virtual_stages"))

    def layout_of(self, name: str) -> dict[str, str]:
        """Pinned placements by role or axis name of the parameter `name`."""
        found: dict[str, str] = {}
        for pattern, placements in self.layouts:
            if _matches(name, pattern):
                found.update(placements)
        return found

    def for_names(self, names: Iterable[str], ties: Mapping[str, str]) -> Pins:
        """The same pins for a model with these parameters; what is pinned under a tied name holds for the parameter.

        Raises:  PlanError: a pattern fits no parameter.
        """
        known = {name: name for name in names}
        known |= {alias: name for alias, name in ties.items() if name in known}
        layouts = []
        for pattern, placements in self.layouts:
            fits = dict.fromkeys(canonical for name, canonical in known.items() if _matches(name, pattern))
            if not fits:
                raise PlanError(f'pin "{pattern}": the model has no parameter of that name, as {next(iter(known), "")}')
            layouts += [(name, placements) for name in fits]
        return replace(self, layouts=tuple(layouts))


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}.*")


def parse_pins(pin: Mapping[str, Any] | None) -> Pins:
    """Check a `pin` dict. Raises: PlanError naming the key and what it may be."""
    pin = dict(pin or {})
    degrees: dict[str, int] = {}
    layouts = []
    for key, value in pin.items():
        if key in ROLES:
            degrees[key] = _integer(key, value, 1)
        elif key == "zero":
            if value not in (0, 1, 2, 3) or isinstance(value, bool):
                raise PlanError(f"pin zero={value!r}: ZeRO levels are 0, 1, 2 and 3")
        elif key == "sp":
            if not isinstance(value, bool):
                raise PlanError(f"pin sp={value!r}: true or false")
        elif key == "schedule":
            if value not in SCHEDULES:
                raise PlanError(f"pin schedule={value!r}: known are {', '.join(SCHEDULES)}")
        elif key in ("virtual_stages", "microbatches", "zero_ranks", "loss_chunks"):
            _integer(key, value, 1)
        elif key == "recompute":
            _one_of(key, value, ("none", "selective", "full"))
        elif key == "offload":
            _one_of(key, value, ("none", "optimizer", "parameters"))
        elif key == "stages":
            pass
        elif isinstance(value, Mapping):
            layouts.append((key, _placements(key, value)))
        else:
            known = [
                *ROLES,
                "zero",
                "sp",
                "schedule",
                "virtual_stages",
                "microbatches",
                "recompute",
                "stages",
                "zero_ranks",
                "offload",
                "loss_chunks",
            ]
            raise PlanError(
                f"pin {key}={value!r}: no such pin; known are {', '.join(known)}, and parameter patterns with a layout"
            )
        possible = NOT_YET.get(key)
        if possible is not None and value not in possible:
            instead = f"; it can keep {', '.join(map(str, possible))}" if possible else ""
            raise PlanError(f"pin {key}={value!r}: this version of autopar cannot run it yet{instead}")
    if pin.get("schedule") in SCHEDULES[-3:] and degrees.get("pp", 1) < 2:
        raise PlanError(f"pin schedule={pin['schedule']!r}: needs stages on several ranks; pin pp=2 or more, too")
    if pin.get("loss_chunks", 1) > 1 and pin.get("schedule") in SPLIT_BACKWARD:
        raise PlanError(
            f"pin loss_chunks={pin['loss_chunks']}: schedule {pin['schedule']} leaves the head's weight gradient for "
            "later, and would keep every chunk's logits until then; pin loss_chunks=1 or another schedule"
        )
    zero = pin.get("zero")
    if "zero_ranks" in pin and (not zero or degrees.get("dp", 1) % pin["zero_ranks"]):
        raise PlanError(
            f"pin zero_ranks={pin['zero_ranks']}: over how many data ranks ZeRO shards; pin zero=1, 2 or 3 and a "
            "dp that it divides, too"
        )
    return Pins(degrees, zero, pin.get("sp"), tuple(layouts), pin.get("recompute"), pin)


def _integer(key: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"pin {key}={value!r}: must be an integer of at least {least}")
    return value


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"pin {key}={value!r}: must be one of {', '.join(allowed)}")


def _placements(pattern: str, value: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    for axis, placement in value.items():
        if not isinstance(placement, str) or not _PLACEMENT.fullmatch(placement.replace(" ", "")):
            raise PlanError(
                f'pin "{pattern}"[{axis!r}]={placement!r}: a parameter lies as "I", "S(dim)" or "S(dim,blocks)"'
            )
    return tuple((axis, placement.replace(" ", "")) for axis, placement in value.items())
