"""Actions, rows and tables: texts, sizes, refusals, and the tables made from others."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.schedule import Action, Row, Schedule, build, check, parse
from autopar.schedule.build import KINDS


def test_actions_read_back() -> None:
    for text in ("0F0", "12B3", "1I2", "7W10", "0B-1"):
        assert str(Action.parse(text)) == text
    with pytest.raises(PlanError, match="'1X2' is no action"):
        Action.parse("1X2")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.asynchronous and kind.replicas == 1])
def test_tables_read_back(name: str) -> None:
    table = build(name, 4, KINDS[name].virtual or 2, 6)
    again = parse(str(table))
    assert again.rows == table.rows
    assert again.placement == table.placement


def test_rows_are_sequences_of_actions() -> None:
    row = Row([Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)])
    assert (len(row), row[1], row[-1], list(row[1:])) == (3, (0, "I", 0), (0, "W", 0), [(0, "I", 0), (0, "W", 0)])
    assert row == (Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0))
    with pytest.raises(ValueError, match="read-only"):
        row.codes[0, 0] = 1
    assert hash(Row(row.codes)) == hash(row)


def test_placements_and_paths() -> None:
    assert build("interleaved-1f1b", 3, 2, 3).placement == (0, 1, 2, 0, 1, 2)
    assert build("zb-v", 3, 2, 3).placement == (0, 1, 2, 2, 1, 0)
    two = build("chimera", 4, 1, 4)
    assert two.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (list(two.path(0)), list(two.path(3)), two.held(1)) == ([0, 1, 2, 3], [4, 5, 6, 7], (1, 6))


def test_forward_only_and_forwards_first() -> None:
    table = build("1f1b", 2, 1, 2)
    assert str(table.forward_only()) == "rank 0  0F0 0F1\nrank 1  1F0 1F1"
    assert str(table.forwards_first()) == str(build("gpipe", 2, 1, 2))
    for name, kind in KINDS.items():
        if not kind.asynchronous:
            check(build(name, 4, kind.virtual or 3, 7).forwards_first())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 3}, "2 rows for 3 ranks"),
        ({"microbatches": 1}, r"action 0F1 at place 1 of rank 0: the table has 2 stages, 1 micro-batches"),
        ({"placement": (1, 0)}, r"action 0F0 at place 0 of rank 0: .* rank 0 holds stages \(1,\)"),
        ({"placement": (0, 2)}, "does not give each of 2 stages one of 2 ranks"),
        ({"stages": 3, "placement": (0, 1, 1), "replicas": 2}, "3 stages cannot be 2 equal replicas"),
        ({"microbatches": 0}, "0 microbatches"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(changed: dict[str, object], message: str) -> None:
    fields = {"name": "t", "ranks": 2, "stages": 2, "microbatches": 2, "placement": (0, 1)}
    fields["rows"] = build("gpipe", 2, 1, 2).rows
    with pytest.raises(PlanError, match=message):
        Schedule(**fields | changed)  # type: ignore[arg-type]


def test_rows_may_be_plain_tuples() -> None:
    made = Schedule("mine", 1, 1, 1, (0,), ((Action(0, "F", 0), Action(0, "B", 0)),))  # type: ignore[arg-type]
    assert isinstance(made.rows[0], Row)
    assert np.array_equal(made.rows[0].codes, [[0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [("0F0 zero", "'zero' is no action"), ("0F0 \n 0B0", "0B0 on rank 1, but rank 0"), ("0F0 2F0", "without gaps")],
)
def test_texts_that_are_no_tables(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(text)
