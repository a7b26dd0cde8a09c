"""Pointwise rules: every op that torch tags or we list, and the sets of arguments in which an op is linear."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autopar.rules import rule_of
from autopar.rules.analyse import analyse
from autopar.rules.call import Call
from autopar.rules.pointwise import CASTS, EXTRA, IDENTITY, LINEAR, NEEDS_OUTPUT, is_pointwise, packet
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import program_of, prove

aten = torch.ops.aten

UNARY = (
    "abs absolute acos arccos asin arcsin asinh arcsinh atan arctan atanh arctanh ceil celu conj_physical cos"
    " cosh deg2rad digamma"
    " elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite"
    " isinf isnan"
    " isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish"
    " nan_to_num neg negative"
    " positive rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus"
    " softshrink"
    " special_bessel_j0 special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2"
    " special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p"
    " special_log_ndtr"
    " special_logit special_ndtr special_ndtri special_psi special_round special_sinc sqrt square tan tanh trunc"
    " angle alias clone"
    " detach contiguous lift_fresh_copy resolve_conj resolve_neg zeros_like ones_like acosh arccosh conj real"
).split()
BINARY = (
    "add subtract sub mul multiply div divide true_divide floor_divide fmod remainder pow float_power atan2"
    " arctan2 copysign fmax fmin hypot igamma"
    " igammac special_gammainc special_gammaincc special_xlogy logaddexp logaddexp2 max min maximum minimum"
    " nextafter heaviside xlogy"
    " special_xlog1py special_zeta eq ge gt le lt ne greater greater_equal less less_equal not_equal isclose"
    " logical_and logical_or"
    " logical_xor rsub copy ldexp"
).split()
INTEGER = (
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm __and__ __or__ __xor__"
    " __lshift__ __rshift__"
).split()
NOT_DIFFERENTIABLE = {
    **dict.fromkeys("nextafter heaviside floor_divide copy special_zeta".split(), (False, False)),
    **dict.fromkeys("igamma igammac special_gammainc special_gammaincc".split(), (False, True)),
}
"""(first, second) argument of binary ops for which torch has no derivative."""
NO_PROOF = {
    "empty_like": "has no value to compare",
    "_to_copy": "not made by export; the same as `to`",
    **dict.fromkeys(("float", "half", "double", "bfloat16"), "export writes `to`"),
    "lift_fresh": "export writes `lift_fresh_copy`",
    "_conj": "export writes `conj`",
    "special_polygamma": "the same call as polygamma",
    "special_multigammaln": "the same call as mvlgamma",
}
"""Names of EXTRA without a proof, and why."""


def unary(name: str) -> tuple[Case, ...]:
    op = getattr(aten, name)
    x = real(5).abs().detach() / 2 + 0.05  # in (0, 1): the domain of logit and acos
    if name in ("acosh", "arccosh"):
        x = x + 1
    x = x.clamp(max=0.95) if "acosh" not in name and "arccosh" not in name else x
    return case(lambda x: op(x), x.requires_grad_(True))


def binary(name: str) -> tuple[Case, ...]:
    op = getattr(aten, name)
    a, b = real(4).detach().abs() + 1.1, real(4, seed=1).detach().abs() + 1.3
    first, second = NOT_DIFFERENTIABLE.get(name, (True, True))
    return case(lambda a, b: op(a, b), a.requires_grad_(first), b.requires_grad_(second))


def integers(name: str) -> tuple[Case, ...]:
    op = getattr(aten, name)
    return case(lambda a, b: op(a, b), whole_numbers(5, 4) + 1, whole_numbers(5, 4, seed=1) + 1)


X, Y = real(4, 5), real(5, seed=1)
CASES: dict[str, tuple[Case, ...]] = {
    **{name: unary(name) for name in UNARY},
    **{name: binary(name) for name in BINARY},
    **{name: integers(name) for name in INTEGER},
    "bitwise_not": case(lambda a: ~a, whole_numbers(5, 4)),
    "polygamma": case(lambda x: torch.polygamma(1, x), real(4)),
    "mvlgamma": case(lambda x: torch.mvlgamma(x.abs() + 3, 2), real(4)),
    "frexp": case(lambda x: torch.frexp(x), real(4, grad=False)),
    "addcmul": case(lambda x, a, b: torch.addcmul(x, a, b, value=3), X, Y, real(4, 1, seed=2)),
    "addcdiv": case(lambda x, a, b: torch.addcdiv(x, a, b.exp(), value=3), X, Y, real(4, 1, seed=2)),
    "lerp": (
        *case(lambda x, y: torch.lerp(x, y, 0.3), X, Y),
        *case(lambda x, y, w: torch.lerp(x, y, w), X, Y, real(4, 1, seed=2)),
    ),
    "where": (
        *case(lambda m, x, y: torch.where(m > 0, x, y), real(4, 1, grad=False), X, Y),
        *case(lambda x: torch.where(x > 0, x, 2.0), X),
        *case(lambda x: torch.where(x > 0, 1.0, 2.0) * x, X),
    ),
    "masked_fill": (
        *case(lambda x, y: x.masked_fill(y > 0, 0), X, real(5, grad=False)),
        *case(lambda x, y: x.masked_fill(y > 0, -1.5), X, real(5, grad=False)),
        *case(lambda x, y, v: x.masked_fill(y > 0, v), X, real(5, grad=False), torch.tensor(2.0, dtype=torch.float64)),
    ),
    "clamp": (*case(lambda x, lo: x.clamp(lo), X, Y), *case(lambda x: x.clamp(-0.5, 0.5), X)),
    "clamp_max": case(lambda x, y: torch.clamp_max(x, y), X, Y),
    "clamp_min": case(lambda x, y: torch.clamp_min(x, y), X, Y),
    "clip": case(lambda x: torch.clip(x, -0.5, 0.5), X),
    "threshold": case(lambda x: F.threshold(x, 0.1, 2.0), X),
    "full_like": case(lambda x: torch.full_like(x, 2.0) * x, X),
    "fill": (*case(lambda x: aten.fill.Scalar(x, 2.0), X), *case(lambda x, v: aten.fill.Tensor(x, v), X, real(seed=1))),
    "to": (
        *case(lambda x: x.to(torch.float32).to(torch.float64) * 2, X),
        *case(lambda x: (x * 3).to(torch.int64) + 1, X),
        *case(lambda x: x.to(torch.complex128).real, X),
        *case(lambda x: (x > 0).to(torch.float64), X),
    ),
    "type_as": case(lambda x, other: x.type_as(other) * 2, X, torch.ones(3, dtype=torch.float32)),
    "complex": case(lambda a, b: torch.view_as_real(torch.complex(a, b)), X, real(4, 5, seed=1)),
    "polar": case(lambda a, b: torch.polar(a, b).imag, X, real(4, 5, seed=1)),
    "imag": case(lambda a, b: (torch.complex(a, b) * torch.complex(b, a)).imag, X, real(4, 5, seed=1)),
    "view_as_real": case(lambda a, b: torch.view_as_real(torch.complex(a, b) * 2) * 3, X, real(4, 5, seed=1)),
    "view_as_complex": case(lambda x: (torch.view_as_complex(x) * 2).real, real(4, 5, 2)),
    "prelu": (
        *case(lambda x, w: F.prelu(x, w), real(2, 5, 4), Y),
        *case(lambda x, w: F.prelu(x, w), real(4), real(1, seed=1)),
        *case(lambda x, w: F.prelu(x, w), real(2, 5, 4), real(1, seed=1)),
    ),
    "glu": (
        *case(lambda x: F.glu(x), real(4, 10)),
        *case(lambda x: F.glu(x, 0), real(4, 3)),
        *case(lambda x: F.glu(x, 1), real(2, 8, 3)),
    ),
    "isin": case(lambda x, y: torch.isin(x, y), whole_numbers(9, 4, 5), whole_numbers(9, 3)),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        meshes = ("2",) if op in UNARY or op in BINARY or op in INTEGER else ("2", "3")
        for mesh in meshes:
            prove_op(op, each, mesh)


def test_every_op_that_torch_tags_pointwise_is_proved_or_like_one_that_is() -> None:
    tagged = {
        name
        for name in {
            full[6:].partition(".")[0] for full in torch._C._dispatch_get_all_op_names() if full.startswith("aten::")
        }
        if not name.endswith(("_backward", "_")) or name.startswith("__")
        for op in [getattr(aten, name, None)]
        if op is not None and any(torch.Tag.pointwise in getattr(op, o).tags for o in op.overloads())
    }
    # families of one signature, of which a member is proved above
    like = {n for n in tagged if n.startswith(("special_", "__i")) or n in ("equal", "rrelu", "_conj_physical")}
    assert tagged - like - CASES.keys() == set()
    assert EXTRA - CASES.keys() - NO_PROOF.keys() == set()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, 4, 5])), min_size=1, max_size=3),
    st.sampled_from(["2", "3", "4"]),
)
def test_broadcasting(dims: list[tuple[int, int]], mesh: str) -> None:
    """kind of each dim: 0 both have it, 1 the left has size one, 2 the right has size one."""
    left = [1 if kind == 1 else n for kind, n in dims]
    right = [1 if kind == 2 else n for kind, n in dims]
    while right and right[0] == 1:
        right = right[1:]
    prove(lambda a, b: a * b - b, real(*left), real(*right, seed=1), mesh=mesh, split=False)


@pytest.mark.parametrize("op", ["mul", "sub", "div", "addcmul", "where", "to"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@pytest.mark.parametrize("shapes", [((0,), (0,)), ((3, 0), (1,)), ((0,), (1,)), ((2, 1), (2, 0))])
def test_empty_tensors(shapes: tuple[tuple[int, ...], ...]) -> None:
    prove(lambda a, b: a + b, *(real(*s) for s in shapes), mesh="2", split=False)


def linear_sets(fn: object, *tensors: torch.Tensor) -> tuple[frozenset[int], ...]:
    """Of the last op of a function."""
    analysis = analyse(program_of(fn, tensors))
    return list(analysis.ops.values())[-1].rule.linear


FIRST, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
INTS = whole_numbers(5, 4, 5)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: x + y, (BOTH,)),
        (lambda x, y: torch.sub(x, y, alpha=2), (BOTH,)),
        (lambda x, y: torch.rsub(x, y, alpha=2), (BOTH,)),
        (lambda x, y: x + 1, ()),
        (lambda x, y: 1 - x, ()),
        (lambda x, y: x * 2, (FIRST,)),
        (lambda x, y: x * y, (FIRST, SECOND)),
        (lambda x, y: x / y, (FIRST,)),
        (lambda x, y: x / 2, (FIRST,)),
        (lambda x, y: 2 / x.detach(), (FIRST,)),  # as reciprocal and mul
        (lambda x, y: torch.div(x, y, rounding_mode="floor"), ()),
        (lambda x, y: x // 2, ()),
        (lambda x, y: -x, (FIRST,)),
        (lambda x, y: x.to(torch.float32), (FIRST,)),
        (lambda x, y: x.to(torch.int64), ()),
        (lambda x, y: x.to(torch.bool), ()),
        (lambda x, y: (x > 0).to(torch.float64), ()),
        (lambda x, y: (x > 0) * y, (SECOND,)),
        (lambda x, y: (x > 0).clone(), ()),
        (lambda x, y: (x > 0) | (y > 0), ()),
        (lambda x, y: x.abs(), ()),
        (lambda x, y: x.masked_fill(y > 0, 0.0), (FIRST,)),
        (lambda x, y: x.masked_fill(y > 0, 1.0), ()),
        (lambda x, y: torch.where(x > 0, x, y), (frozenset({1, 2}),)),
        (lambda x, y: torch.where(x > 0, x, 0.0), ()),
        (lambda x, y: torch.lerp(x, y, 0.5), (BOTH,)),
        (lambda x, y: torch.addcmul(x, x, y), (BOTH, frozenset({0, 2}))),
        (lambda x, y: torch.addcdiv(x, x, y), (BOTH,)),
        (lambda x, y: x.clamp(min=0), ()),
        (lambda x, y: F.relu(x), ()),
        (lambda x, y: x**2, ()),
        (lambda x, y: x.type_as(INTS), ()),
    ],
)
def test_linear_in(fn: object, expected: tuple[frozenset[int], ...]) -> None:
    if "INTS" in fn.__code__.co_names:
        assert linear_sets(lambda x, n: x.type_as(n), X, INTS) == expected
    else:
        assert linear_sets(fn, X, Y) == expected


def test_every_linear_entry_is_a_pointwise_op() -> None:
    assert LINEAR.keys() - CASES.keys() - NO_PROOF.keys() == set()
    assert IDENTITY | CASTS <= LINEAR.keys()
    assert NEEDS_OUTPUT <= CASES.keys()


@pytest.mark.parametrize("op", ["rrelu", "dropout", "native_dropout", "feature_dropout", "bernoulli", "rand_like"])
def test_what_draws_from_torchs_generator_is_kept_whole(op: str) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 4, 3, 3)
    arguments = {"dropout": (x, 0.5, True), "native_dropout": (x, 0.5, True), "feature_dropout": (x, 0.5, True)}
    node = graph.call_function(getattr(aten, op).default, arguments.get(op, (x,)))
    node.meta["val"] = torch.ones(2, 4, 3, 3)
    assert rule_of(node) is None


def test_equal_is_no_pointwise_op() -> None:
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    a.meta["val"] = torch.ones(2)
    call = Call(graph.call_function(aten.equal.default, (a, a)))
    assert packet(call) == "equal"
    assert not is_pointwise(call)


def test_no_rank_has_an_empty_complex_view() -> None:
    """torch's own check of strides refuses some gradients without elements."""
    proof = prove(lambda x: torch.view_as_real(torch.view_as_complex(x) * 2) + x, real(4, 3, 2), mesh="3")
    assert not {"view_as_real:d0", "view_as_complex:d0"} & proof.factors
    assert {"view_as_real:d1", "view_as_complex:d1"} <= proof.factors
