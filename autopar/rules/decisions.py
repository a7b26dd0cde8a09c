"""What the shard pass carries out: a strategy for each op, a layout for each source, common read and output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.layout import Layout
from autopar.rules.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Decisions:
    """The planner's solution, or a test's choice."""

    strategies: Mapping[str, Strategy]
    """By op node name."""
    sources: Mapping[str, Layout]
    """How each placeholder lies (parameters: their storage); those not named are I."""
    reads: Mapping[str, Layout] = field(default_factory=dict)
    """Values that all consumers read through one common layout."""
    outputs: Mapping[int, Layout] = field(default_factory=dict)
    """Layouts of the sinks by index; those not named are I."""
