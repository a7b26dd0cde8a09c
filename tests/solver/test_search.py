"""Which axes are tried."""

import math

import pytest
import torch

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


class Convolution(torch.nn.Module):
    """Six channels: four ranks in a row would leave the last one without any."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 6, 3)

    def forward(self, x):
        return self.conv(x).square().mean()


class Tables(torch.nn.Module):
    """No matrix product reads a weight: the tables themselves must be cut."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Embedding(20, 8), torch.nn.Embedding(20, 8)

    def forward(self, ids):
        return (self.one(ids) * self.other(ids)).sum(-1).sigmoid().mean()


class TiedTable(torch.nn.Module):
    """A table so small that slices of a whole one would be cheaper than parts of it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(12, 8)

    def forward(self, ids):
        x = torch.nn.functional.layer_norm(self.table(ids) * 8**0.5, (8,))
        scores = 30 * torch.tanh(x @ self.table.weight.T * 8**-0.5 / 30)
        return torch.nn.functional.cross_entropy(scores.transpose(1, 2), ids)


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class AfterWhole(torch.nn.Module):
    """Rows pass through an op that cannot be cut along them; the product after it can."""

    def __init__(self, between):
        super().__init__()
        self.fc, self.between = torch.nn.Linear(6, 3), between

    def forward(self, x):
        return self.fc(self.between(x)).square().mean()


BETWEEN = [Opaque.apply, lambda x: x.cumsum(0), lambda x: x.sort(0).values.sin(), lambda x: x[torch.randperm(4)]]


@pytest.mark.parametrize("between", BETWEEN)
def test_what_an_uncuttable_op_gives_for_the_batch_is_the_batch(between):
    found = autopar.plan(
        AfterWhole(between), autopar.Mesh("2", device="cpu"), example_args=(torch.randn(4, 6),), pin={"dp": 2}
    )
    assert found.degrees["dp"] == 2


@pytest.mark.parametrize(
    ("model", "batch", "pin"),
    [
        (Convolution, torch.randn(4, 3, 7), {"tp": 4}),
        (Convolution, torch.randn(6, 3, 7), {"dp": 4}),
        (Tables, torch.arange(8), {"tp": 2}),
        (Tables, torch.arange(8), {"tp": 4}),
        (TiedTable, torch.arange(12).view(2, 6), {"tp": 2}),
    ],
)
def test_a_pin_is_kept_where_the_parameters_or_the_batch_can_be_cut(model, batch, pin):
    size = math.prod(pin.values())
    found = autopar.plan(model(), autopar.Mesh(str(size), device="cpu"), example_args=(batch,), pin=pin)
    assert {role: found.degrees[role] for role in pin} == pin
    if "tp" in pin:
        cut = [axis for held in found.params.values() for axis, _ in held["layout"]]
        assert cut


def test_a_pin_that_no_factoring_keeps_is_refused():
    with pytest.raises(autopar.PlanError, match="tp=8"):
        autopar.plan(
            Convolution(), autopar.Mesh("8", device="cpu"), example_args=(torch.randn(4, 3, 7),), pin={"tp": 8}
        )
