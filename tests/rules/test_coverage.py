"""The coverage table, and that every entry of the rule table has a proof."""

from __future__ import annotations

import importlib
import json
from fnmatch import fnmatchcase

import pytest

from autopar.console import plain_text
from autopar.rules import FAMILIES, TABLE
from autopar.rules.coverage import NOT_CAPTURED, WHOLE, Coverage, cover, families, main, operators, show


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    return cover()


@pytest.mark.parametrize("family", sorted(families()))
def test_every_entry_of_the_table_has_a_proof(family: str) -> None:
    proofs = importlib.import_module(f"tests.rules.test_{family}").CASES
    assert families()[family] - proofs.keys() == set()


def test_every_family_is_in_the_table_and_no_op_is_in_two() -> None:
    torchs = {name for name in TABLE if "::" not in name}
    assert frozenset().union(*families().values()) == torchs
    assert sum(map(len, FAMILIES)) == len(TABLE)
    assert sum(map(len, families().values())) == len(torchs)


def test_most_operators_have_a_rule(coverage: Coverage) -> None:
    assert coverage.ruled >= 530
    assert coverage.ruled / coverage.total > 0.8
    names = [n for group in (*coverage.families.values(), *coverage.whole.values(), coverage.unruled) for n in group]
    assert len(names) == len(set(names)) == coverage.total


def test_every_entry_of_the_table_is_an_operator_of_torch() -> None:
    assert {name for names in families().values() for name in names} - {name for name, _ in operators()} == set()


@pytest.mark.parametrize("table", [WHOLE, NOT_CAPTURED], ids=["whole", "not captured"])
def test_no_pattern_is_stale(table: dict[str, str]) -> None:
    unruled = {name for name, _ in operators()} - TABLE.keys()
    stale = [p for patterns in table.values() for p in patterns.split() if not any(fnmatchcase(n, p) for n in unruled)]
    assert stale == []


@pytest.mark.parametrize(
    ("name", "where"),
    [("bernoulli", "random"), ("nonzero", "depends on data"), ("as_strided", "strides"), ("take", "counts all")],
)
def test_reasons(coverage: Coverage, name: str, where: str) -> None:
    reason = next(r for r, names in coverage.whole.items() if name in names)
    assert where in reason


def test_the_table_for_people(coverage: Coverage) -> None:
    text = plain_text(show(coverage))
    assert f"{coverage.ruled} of {coverage.total} operators" in text
    assert "no rule yet" in text
    for family in families():
        assert family in text


def test_json(capsys: pytest.CaptureFixture[str], coverage: Coverage) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ruled"] == coverage.ruled
    assert found["families"]["softmax"] == list(coverage.families["softmax"])
    assert sum(map(len, found["whole"].values())) + len(found["unruled"]) == found["total"] - found["ruled"]
