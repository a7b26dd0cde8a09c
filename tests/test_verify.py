"""`autopar.verify`: equal runs are called equal, unequal ones are not, and the report says where."""

import json
import math

import pytest
import torch
from torch import nn

import autopar
import autopar.verify  # the module; the function is autopar.verify
from autopar.compare import CATEGORIES, bounds_of, differences, max_errors, worst_of, zero_gradients
from autopar.runtime.launch import CAPTURE
from tests.ahead import Ahead
from tests.end_to_end.small_models import build, inputs
from tests.verify_ranks import CASES

ONE = autopar.Mesh("1")


RUN = Ahead("tests.verify_ranks:run_cases", 2, {}, 500, (*CAPTURE, "transformers.models.llama.modeling_llama"))


def reports():
    """By case, the report of each of two ranks."""
    return {name: [told[name] for told in RUN.results()] for name in CASES}


@pytest.mark.reads(RUN)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_reports_equal(name):
    first, second = reports()[name]
    assert first == second
    assert first["equal"], first
    assert first["world_size"] == 2
    assert set(first["max_error"]) == set(CATEGORIES)
    assert (first["plan"]["dp"], first["plan"]["tp"]) in ((2, 1), (1, 2))
    assert isinstance(first["plan"]["zero"], int)


@pytest.mark.reads(RUN)
def test_bounds_follow_the_dtype():
    bounds = {name: reports()[name][0]["bounds"] for name in CASES}
    assert set(bounds["float64"].values()) == {1e-9}
    assert bounds["float32 loss"] == dict.fromkeys(CATEGORIES, 1e-6) | {"params_after_step": 1e-4}
    assert bounds["float32"] == dict.fromkeys(CATEGORIES, 1e-5) | {"params_after_step": None}
    rough = bounds["bfloat16"]
    assert rough.pop("params_after_step") is None
    assert all(0 < bound < 0.2 for bound in rough.values())
    assert reports()["float32"][0]["max_error"]["grads"] > 0  # not float64 by mistake
    assert reports()["bfloat16"][0]["max_error"]["grads"] > 1e-4


@pytest.mark.reads(RUN)
def test_losses_and_references():
    for name, (report, _) in reports().items():
        one, mesh = report["loss"]
        assert math.isclose(one, mesh, rel_tol=2e-2 if name == "bfloat16" else 1e-5)
    assert "draws random numbers" in reports()["dropout"][0]["reference"]
    assert reports()["buffers"][0]["reference"] == "PyTorch on one device"
    assert reports()["loss outside"][0]["loss"] != reports()["buffers"][0]["loss"]


def verify(model, args, kwargs=None, **options):
    return autopar.verify(model, ONE, example_args=args, example_kwargs=kwargs, **options)


def tampered(monkeypatch, change):
    """Let verify's parallel module be changed after it is made."""
    import sys

    module = sys.modules["autopar.verify"]
    make = module.parallelize

    def wrong(*args, **kwargs):
        m = make(*args, **kwargs)
        with torch.no_grad():
            change(m)
        return m

    monkeypatch.setattr(module, "parallelize", wrong)


def test_a_wrong_weight_is_found_and_named(monkeypatch):
    def change(m):
        p = dict(m.named_parameters())["layers.1.mlp.up_proj.bias"]
        p[5] += 1e-6

    tampered(monkeypatch, change)
    report = verify(build("gpt"), *inputs("gpt"))
    assert not report.equal
    assert report.max_error["loss"] > 1e-12
    assert report.worst in dict(build("gpt").named_parameters())
    assert report.worst_op.count("gpt.py:")
    assert report.worst_values[0] != report.worst_values[1]
    assert "NOT EQUAL" in str(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_the_worst_output_names_the_op_that_made_it(monkeypatch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return {"sum": self.a(x).sum(1), "wide": self.b(x).tanh()}

    tampered(monkeypatch, lambda m: dict(m.named_parameters())["b.bias"].add_(1.0))
    report = verify(Two(), (torch.ones(4, 4),), steps=0)
    assert not report.equal
    bad = {name for name, error in report.max_error.items() if error > 1e-9}
    assert {"outputs", "grads", "loss"} <= bad
    assert report.worst
    assert "tanh" in report.worst_op or "linear" in report.worst_op


def test_a_wrong_buffer_is_found(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    tampered(monkeypatch, lambda m: dict(m.named_buffers())["1.running_mean"].add_(1.0))
    report = verify(model, (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),))
    assert not report.equal
    assert report.worst == "1.running_mean"
    assert report.worst_category == "buffers"


def test_the_model_is_left_as_it_was():
    model = build("gpt").float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify(model, *inputs("gpt"), steps=2)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mixed_precision_is_judged_as_what_it_computes_in(precision):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 4)
    report = verify(model, (x,), precision=precision)
    assert report.equal, report
    assert report.dtype == {"fp32": "float32", "bf16": "bfloat16"}[precision]
    assert (report.max_error["grads"] > 1e-4) == (precision == "bf16")


def test_a_model_without_parameters_or_gradients():
    report = verify(nn.Softmax(dim=1), (torch.ones(2, 3),))
    assert report.equal
    assert report.loss is None


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"steps": -1}, {"steps": True}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(autopar.PlanError, match=next(iter(wrong))):
        verify(nn.Linear(2, 2), (torch.ones(2, 2),), **wrong)


def test_a_model_on_meta_is_refused():
    with pytest.raises(autopar.AutoparError, match="meta"):
        verify(nn.Linear(2, 2, device="meta"), (torch.ones(2, 2, device="meta"),))


# the error of a tensor


def run(**tensors):
    made = {category: {} for category in CATEGORIES}
    for category, value in tensors.items():
        made[category] = {"x": torch.tensor(value, dtype=torch.float64)} if not isinstance(value, dict) else value
    return made


def error_of(found, expected, category="outputs", **more):
    d = differences(run(**{category: found}, **more), run(**{category: expected}, **more))
    return next(x for x in d if x.category == category)


def test_the_error_is_relative_to_the_largest_magnitude():
    d = error_of([1.0, -4.5, 2.0], [1.0, -4.0, 2.0])
    assert d.error == 0.125
    assert (d.index, d.reference, d.parallel) == ((1,), -4.0, -4.5)


def test_a_true_zero_is_measured_against_the_largest_gradient():
    grads = {"a": torch.tensor([2.0], dtype=torch.float64), "b": torch.tensor([0.0], dtype=torch.float64)}
    found = {**grads, "b": torch.tensor([1e-12], dtype=torch.float64)}
    d = {x.name: x for x in differences(run(grads=found), run(grads=grads))}
    assert d["b"].error == pytest.approx(1e-12 / 2e-6)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0, 1.0], [math.nan, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([-math.inf, 1.0], [math.inf, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([1e-300], [0.0], math.inf),
    ],
)
def test_what_is_not_finite_or_of_another_shape(found, expected, error):
    assert error_of(found, expected).error == error


def test_a_missing_gradient_equals_zeros_and_nothing_else():
    zeros, ones = {"x": torch.zeros(2)}, {"x": torch.ones(2)}
    assert error_of({}, zeros, "grads").error == 0.0
    assert error_of({}, ones, "grads").error == math.inf
    assert error_of(ones, {}, "grads").error == math.inf
    assert error_of({}, zeros, "outputs").error == math.inf


def test_a_rounding_error_instead_of_zero_is_measured_against_the_largest_gradient():
    def grads(bias):
        return run(grads={"weight": torch.tensor([2.0]), "bias": torch.tensor([bias])})

    zeros = zero_gradients(grads(1e-18))
    assert zeros == {"bias"}
    d = {x.name: x.error for x in differences(grads(1e-9), grads(-1e-9), zeros)}
    assert d["bias"] == pytest.approx(1e-9)
    d = {x.name: x.error for x in differences(grads(1e-9), grads(-1e-9))}
    assert d["bias"] == pytest.approx(1e-3)
    assert zero_gradients(grads(1e-3)) == frozenset()


def test_rough_dtypes_are_bounded_by_one_device():
    single = dict.fromkeys(CATEGORIES, 0.1) | {"loss": 1e-9}
    bounds = bounds_of(torch.bfloat16, False, single)
    assert bounds["grads"] == pytest.approx(0.15)
    assert bounds["loss"] == torch.finfo(torch.bfloat16).eps / 2


def test_the_worst_is_measured_against_its_bound():
    found = run(loss=[1.0 + 1e-8], grads=[1.0 + 1e-7], outputs=[1.0])
    d = differences(found, run(loss=[1.0], grads=[1.0], outputs=[1.0]))
    bounds = dict.fromkeys(CATEGORIES, 1e-9) | {"loss": 1e-12}
    assert worst_of(d, bounds).category == "loss"
    assert max_errors(d)["grads"] == pytest.approx(1e-7)
