"""Which axes are tried."""

import pytest

import autopar
from tests.end_to_end.small_models import build, inputs

WEIGHTS = "*.up_proj.weight"


def planned(pin):
    args, kwargs = inputs("llama")
    mesh = autopar.Mesh("2x2", device="a100-sxm-80gb")
    return autopar.plan(build("llama"), mesh, example_args=args, example_kwargs=kwargs, pin=pin)


@pytest.mark.parametrize("layout", [{"tp": "S(1)"}, {"tp": "S(0)", "dp": "S(1)"}])
def test_a_layout_on_a_role_makes_an_axis_of_it(layout):
    found = planned({WEIGHTS: layout})
    pinned = [held for name, held in found.params.items() if name.endswith("up_proj.weight")]
    assert len(pinned) == 2
    for held in pinned:
        assert dict(held["layout"]) == layout
    assert all(found.degrees[role] > 1 for role in layout)


def test_a_layout_keeps_a_pinned_degree():
    found = planned({"tp": 2, WEIGHTS: {"tp": "S(0)"}})
    assert found.degrees["tp"] == 2


def test_a_layout_on_a_role_that_is_pinned_away_is_refused():
    with pytest.raises(autopar.PlanError, match="no axis 'tp'"):
        planned({"tp": 1, WEIGHTS: {"tp": "S(0)"}})
