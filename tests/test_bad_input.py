"""Mistakes of a user: each one clear line, on every rank, and no rank waits for another that has given up."""

import inspect

import pytest

from tests.ahead import Ahead, scratch
from tests.bad_input import CASES, Branch

LINE = inspect.getsourcelines(Branch.forward)[1] + 1

# What the error is, and what its line must name.
EXPECTED = {
    "no example": ("TypeError", ("example_args", "example_inputs")),
    "mesh too large": ("MeshError", ("4 devices", "2 processes")),
    "mesh is no mesh": ("MeshError", ("DeviceMesh", "dict")),
    "data-dependent branch": ("CaptureError", (f"bad_input.py:{LINE}", "if x.sum() > 0", "torch.where")),
    "degree too large": ("MeshError", ("tp=4", "does not divide the 2")),
    "batch of one in two": ("PlanError", ("dp=2", "cannot be kept")),
    "no such dim": ("PlanError", ("up.weight", "(8, 4)", "S(5)")),
    "no such pin": ("PlanError", ("tensor=2", "known are", "tp")),
    "zero without data": ("PlanError", ("zero=3", "data axes")),
    "no such parameter": ("PlanError", ("*.q_proj.weight", "no parameter")),
    "no such axis": ("PlanError", ("up.weight", "columns")),
    "no plan file": ("PlanError", ("none.json", "No such file")),
    "broken plan file": ("PlanError", ("line 1 column 16", "JSON")),
    "plan: axis size": ("PlanError", ("axes", "4", "2 devices")),
    "plan: unknown field": ("PlanError", ('unknown field "speed"',)),
    "plan: no such layout": ("PlanError", ('params["up.weight"].layout', '"Q"')),
    "plan: no such dim": ("PlanError", ("up.weight", "S(7)")),
    "plan: no such option": ("PlanError", ("up/linear/1", "'zz'")),
    "plan: parameter missing": ("PlanError", ("params", "up.weight")),
    "plan: other model": ("PlanError", ("76 parameters", "148 parameters")),
    "plan: other mesh": ("PlanError", ("mesh 4", "not 2")),
    "other models": ("RuntimeMismatchError", ("model (names and shapes)", "rank(s) 1")),
    "other example shapes": ("RuntimeMismatchError", ("example inputs", "rank(s) 1")),
    "old optimizer": ("PlanError", ("AdamW", "before autopar.parallelize", "m.parameters()")),
    "other values": ("RuntimeMismatchError", ("value", "m.shard(batch)")),
    "other shape later": ("RuntimeMismatchError", ("shape", "m.shard(batch)")),
    "other dtype later": ("RuntimeMismatchError", ("dtype",)),
    "other mode later": ("RuntimeMismatchError", ("mode",)),
    "uneven shards": ("RuntimeMismatchError", ("of equal size",)),
    "one plain, one shard": ("RuntimeMismatchError", ("m.shard(batch)",)),
}
ALONE = "no example on one rank"


RUN = Ahead("tests.bad_input:run_cases", 2, lambda items: {"folder": scratch()}, 500)
"""What each rank raised: all mistakes are made in one group of ranks."""


def test_every_case_is_expected():
    assert {*EXPECTED, ALONE} == set(CASES)


@pytest.mark.reads(RUN)
@pytest.mark.parametrize("name", EXPECTED)
def test_one_clear_line_on_every_rank(name):
    kind, words = EXPECTED[name]
    for rank, told in enumerate(RUN.results()):
        assert told[name] is not None, f"rank {rank} raised nothing"
        found, message = told[name]
        assert found == kind, f"rank {rank}: {found}: {message}"
        assert "\n" not in message
        for word in words:
            assert word in message, f"rank {rank}: {message}"


@pytest.mark.reads(RUN)
def test_a_rank_that_fails_alone_tells_the_others():
    first, second = (told[ALONE] for told in RUN.results())
    assert first[0] == "TypeError"
    assert second[0] == "RuntimeMismatchError"
    assert "rank 0 failed: TypeError" in second[1]
