"""Tables drawn in text."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.schedule import build, parse
from autopar.schedule.build import KINDS
from autopar.schedule.grid import grid


def test_1f1b_by_hand() -> None:
    assert grid(build("1f1b", 2, 1, 2)) == (
        "rank 0  0F0 0F1  .  0B0  .  0B1\n"
        "rank 1   .  1F0 1B0 1F1 1B1  ."
    )  # fmt: skip


def test_zero_bubbles_are_seen() -> None:
    """ZB-H2 of equal works: every rank runs without a pause from its first action to its last."""
    for line in grid(build("zb-2p", 4, 1, 8)).splitlines():
        assert " . " not in line.partition("  ")[2].strip(" .")


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_action_stands_in_the_drawing_once(name: str) -> None:
    table = build(name, 4, KINDS[name].virtual or 2, 4)
    for line, row in zip(grid(table).splitlines(), table.rows, strict=True):
        assert [word for word in line.split()[2:] if word != "."] == [str(action) for action in row]


def test_deadlocks_are_refused() -> None:
    with pytest.raises(PlanError, match="deadlock"):
        grid(parse("0B0 0F0"))
