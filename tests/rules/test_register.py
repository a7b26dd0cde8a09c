"""register_rule: notation for users' own ops and Functions, proved by running, and refused in one line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RuleError, UnsupportedOpError
from autopar.rules import register, register_rule, rule_of
from autopar.rules.analyse import analyse
from autopar.rules.strategy import axis_options
from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.rules.cases import real
from tests.rules.prove import program_of, prove
from tests.rules.user_ops import Halves, RootMeanSquare, SignGradient, product, roll_rows


@pytest.fixture(autouse=True)
def _no_rules_of_other_tests(monkeypatch):
    monkeypatch.setattr(register, "_RULES", {})


def options(fn, *tensors, ranks=2):
    (op,) = analyse(program_of(fn, tensors)).ops.values()
    return axis_options(op.rule, op.factors, ranks)


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
def test_a_function_with_a_rule_is_cut_in_the_rules_factors(mesh):
    register_rule(RootMeanSquare, "b ... d, d -> b ... d", whole="d")
    proof = prove(RootMeanSquare.apply, real(6, 4, 5), real(5, seed=1), mesh=mesh)
    assert {f.partition(":")[2] for f in proof.factors} == {"b", "e0"}
    assert options(RootMeanSquare.apply, real(6, 4, 5), real(5)) == ["I", "b", "e0"]


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
@pytest.mark.parametrize("op", [product, torch.ops.autopar_tests.product, torch.ops.autopar_tests.product.default])
def test_a_custom_op_with_a_rule_sums_what_the_output_lacks(mesh, op):
    register_rule(op, "b s i, o i -> b s o")
    proof = prove(lambda x, w: product(x, w, 0.5), real(4, 2, 6), real(12, 6, seed=1), mesh=mesh)
    assert {f.partition(":")[2] for f in proof.factors} >= {"b", "i", "o"}


def test_an_optional_tensor_has_a_line_of_its_own():
    register_rule(product, "... i, o i -> ... o")
    register_rule(product, "... i, o i, o -> ... o", whole="i")
    x, w = real(4, 6), real(2, 6, seed=1)
    assert options(lambda x, w: product(x, w, 0.5), x, w) == ["I", "e0", "o", "i"]
    assert options(lambda x, w, b: product(x, w, 0.5, b), x, w, real(2, seed=2)) == ["I", "e0", "o"]
    prove(lambda x, w, b: product(x, w, 0.5, b), x, w, real(2, seed=2))


def test_outputs_may_differ_in_their_factors():
    register_rule(Halves, "b d -> b d, d")
    prove(Halves.apply, real(4, 6), mesh="2x2")


def test_the_last_line_for_an_op_counts():
    register_rule(SignGradient, "b d -> b d")
    register_rule(SignGradient, "b d -> b d", whole="b")
    assert options(SignGradient.apply, real(4, 6)) == ["I", "d"]


def test_whole_dots_keep_all_leading_dims():
    register_rule(SignGradient, "... d -> ... d", whole="...")
    assert options(SignGradient.apply, real(4, 2, 6)) == ["I", "d"]


def test_a_factor_that_only_an_output_has_is_not_cut():
    register_rule(SignGradient, "b d -> c d")
    assert options(SignGradient.apply, real(4, 6)) == ["I", "d", "b"]  # b is summed


def test_a_summed_factor_of_two_inputs_makes_a_product_with_its_flop():
    register_rule(product, "b i, o i -> b o")
    (op,) = analyse(program_of(lambda x, w: product(x, w, 0.5), (real(4, 6), real(2, 6)))).ops.values()
    assert op.rule.flop == 2 * 4 * 6 * 2
    register_rule(Halves, "b d -> b d, d")
    (op,) = analyse(program_of(Halves.apply, (real(4, 6),))).ops.values()
    assert op.rule.flop == 0


def test_without_a_rule_it_is_whole_and_invariant():
    """ "R" would hand the backward a part of the gradient, and its sign need not be that of the sum."""
    assert options(SignGradient.apply, real(4, 6)) == ["I"]
    assert options(lambda x, w: product(x, w, 0.5), real(4, 6), real(2, 6)) == ["I"]
    prove(lambda x, w: SignGradient.apply(x @ w) * x, real(4, 4), real(4, 4, seed=1), mesh="2")


def test_a_rule_goes_before_autopars_own():
    analysis = analyse(program_of(torch.tanh, (real(4, 6),)))
    node = analysis.ops["tanh"].node
    assert not rule_of(node).whole
    register_rule(torch.ops.aten.tanh, "b d -> b d", whole="d")
    assert rule_of(node).whole == {"d"}
    assert rule_of(node).linear_backward  # torch's own formula


@pytest.mark.parametrize(
    ("notation", "whole", "said"),
    [
        ("b d", "", 'one "->"'),
        ("b -> b -> b", "", 'one "->"'),
        ("b (d -> b d", "", '"b (d"'),
        ("b () -> b", "", '"b ()"'),
        ("... b ... -> b", "", '"... b ..."'),
        ("b 2 -> b", "", '"b 2"'),
        ("b d -> b d", "x", 'whole="x"'),
        ("b d -> b d", "...", 'whole="..."'),
        ("... e0 -> ... e0", "", "choose others"),
    ],
)
def test_malformed_notation_is_one_line_with_the_ops_name(notation, whole, said):
    with pytest.raises(RuleError) as error:
        register_rule(SignGradient, notation, whole=whole)
    text = str(error.value)
    assert "SignGradient" in text
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize("thing", [torch.tanh, nn.Linear, torch.autograd.Function, "autopar_tests::product"])
def test_only_ops_and_functions_have_rules(thing):
    with pytest.raises(RuleError, match="can have no rule"):
        register_rule(thing, "b -> b")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
        self.w = nn.Parameter(torch.rand(8))
        self.double()

    def forward(self, x):
        h = RootMeanSquare.apply(self.fc(x), self.w)
        return self.out(SignGradient.apply(h)).square().mean()


LINE = Net.forward.__code__.co_firstlineno + 1


def planned(**more):
    return autopar.plan(Net(), "2", example_args=(torch.randn(4, 4, dtype=torch.float64),), **more)


@pytest.mark.parametrize("notation", ["b d -> b d", "b d, d, d -> b d"])
def test_a_rule_for_other_tensors_names_op_and_line_where_it_is_used(notation):
    register_rule(RootMeanSquare, notation)
    with pytest.raises(RuleError, match="2 input and 1 output") as error:
        planned()
    assert str(error.value).startswith(f"{__file__}:{LINE}: autograd.Function RootMeanSquare: ")
    assert notation in str(error.value)


@pytest.mark.parametrize(("notation", "said"), [("b s d, d -> b s d", "3 dims"), ("b d, b -> b d", "size")])
def test_a_rule_for_other_shapes_names_op_line_and_shapes(notation, said):
    register_rule(RootMeanSquare, notation)
    with pytest.raises(RuleError, match="RootMeanSquare") as error:
        planned()
    text = str(error.value)
    assert text.startswith(f"{__file__}:{LINE}: ")
    assert "[(4, 8), (8,)]" in text
    assert said in text
    assert "\n" not in text


def test_strict_names_function_and_line():
    register_rule(SignGradient, "b d -> b d")
    with pytest.raises(UnsupportedOpError) as error:
        planned(strict=True)
    assert str(error.value).startswith(f"{__file__}:{LINE}: autograd.Function RootMeanSquare has no rule")
    register_rule(RootMeanSquare, "b d, d -> b d", whole="d")
    assert "kept whole" not in str(planned(strict=True).notes)


def test_the_plan_says_what_is_kept_whole():
    notes = planned().notes
    assert any(
        n == "kept whole, no rule: autograd.Function RootMeanSquare, autograd.Function SignGradient" for n in notes
    )


class Mixed(nn.Module):
    """A custom op with a rule, a Function with one and a Function and a custom op without."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(8, 6)), nn.Linear(8, 4)
        self.w = nn.Parameter(torch.rand(8))
        self.double()

    def forward(self, x):
        h = RootMeanSquare.apply(product(x, self.up, 0.5), self.w)
        h = SignGradient.apply(self.down(h)) * 1e-2 + self.down(h)
        return h.square().mean() + roll_rows(h.detach()).mean() * 0.1


def compare(payload):
    """On every rank: greatest difference of loss and gradients to one device, and the work's division."""
    import warnings

    warnings.filterwarnings("ignore")
    if not payload["discover"]:
        register_rule(product, "... i, o i -> ... o")
        register_rule(RootMeanSquare, "... d, d -> ... d", whole="d")
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    model = Mixed()
    expected = model(x)
    expected.backward()
    found = []
    for pin in payload["pins"]:
        parallel = autopar.parallelize(Mixed(), "2", example_args=(x,), pin=pin, discover=payload["discover"])
        loss = parallel(x)
        loss.backward()
        errors = [abs(loss.item() - expected.item())]
        for name, parameter in parallel.named_parameters():
            grad = parameter.grad.full_tensor()
            errors.append((grad - dict(model.named_parameters())[name].grad).abs().max().item())
        ops = {k.split("/")[1]: v["strategy"] for k, v in parallel.plan.ops.items()}
        errors.append(abs(parallel(x[:4]).item() - model(x[:4]).item()))  # captured again
        found.append({"error": max(errors), "strategy": ops, "degrees": parallel.plan.degrees})
    return found


@pytest.mark.parametrize("discovered", [False, True])
def test_on_real_ranks(discovered):
    payload = {"pins": [{"dp": 2}, {"tp": 2}, {}], "discover": discovered}
    for results in run_ranks_local("tests.rules.test_register:compare", 2, payload, 120, preload=CAPTURE):
        assert all(r["error"] < 1e-9 for r in results), [r["error"] for r in results]
        dp, tp, _ = results
        assert dp["degrees"]["dp"] == 2
        assert tp["degrees"]["tp"] == 2
        assert dp["strategy"]["autopar_tests::product"] != ["I"]
        assert tp["strategy"]["autopar_tests::product"] != ["I"]
        assert discovered or dp["strategy"]["SignGradient"] == ["I"]
