"""autopar/solver/storage.py: how far ZeRO cuts, and over which ranks."""

import pytest

import autopar
from tests.end_to_end.small_models import build, inputs


def planned(mesh, pin):
    args, kwargs = inputs("gpt")
    return autopar.plan(build("gpt"), autopar.Mesh(mesh), example_args=args, example_kwargs=kwargs, pin=pin)


def test_zero_cuts_over_all_data_ranks():
    plan = planned("4", {"dp": 4, "zero": 3})
    assert {tuple(axis for axis, _ in entry["layout"]) for entry in plan.params.values()} == {("dp",)}
    assert [a["size"] for a in plan.axes] == [4]


@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_hybrid_sharding_cuts_over_the_near_ranks(mesh):
    plan = planned(mesh, {"dp": 4, "zero": 3, "zero_ranks": 2})
    assert [(a["name"], a["size"]) for a in plan.axes] == [("dp0", 2), ("dp1", 2)]
    assert {tuple(axis for axis, _ in entry["layout"]) for entry in plan.params.values()} == {("dp0",)}
    assert plan.zero == 3
    assert plan.degrees["dp"] == 4


@pytest.mark.parametrize(
    "pin", [{"dp": 4, "zero_ranks": 2}, {"dp": 4, "zero": 3, "zero_ranks": 3}, {"zero": 3, "zero_ranks": 2}]
)
def test_refuses(pin):
    with pytest.raises(autopar.PlanError, match="zero_ranks"):
        planned("4", pin)
