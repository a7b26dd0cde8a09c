"""Norms: statistics of the whole group, also where the group is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autopar.rules.analyse import analyse
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import Proof, program_of, prove


def batch_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


CASES: dict[str, tuple[Case, ...]] = {
    "layer_norm": (
        *case(lambda x, w, b: F.layer_norm(x, (6,), w, b), real(2, 3, 6), real(6), real(6, seed=2)),
        *case(lambda x, w, b: F.layer_norm(x, (4, 3), w, b), real(2, 4, 3), real(4, 3), real(4, 3, seed=2)),
        *case(lambda x: F.layer_norm(x, (5,)), real(3, 5)),
        *case(lambda x, w: F.layer_norm(x, (4,), w), real(4), real(4, seed=1)),
    ),
    "rms_norm": (
        *case(lambda x, w: F.rms_norm(x, (6,), w, 1e-3), real(2, 3, 6), real(6, seed=1)),
        *case(lambda x: F.rms_norm(x, (5,)), real(3, 5)),
        *case(lambda x: F.rms_norm(x, (3, 2)), real(3, 3, 2)),
    ),
    "batch_norm": (
        *case(batch_norm, real(4, 3, 2, 2), real(3), real(3, seed=3)),
        *case(batch_norm, real(5, 4)),
        *case(batch_norm, real(3, 2, 4), real(2)),
        *case(batch_norm, real(1, 2, 4), real(2), real(2)),
        *case(
            lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
            *(real(4, 3, 2), real(3), real(3, seed=3), real(3, grad=False), real(3, grad=False).abs()),
        ),
    ),
    "instance_norm": (
        *case(lambda x, w, b: F.instance_norm(x, weight=w, bias=b), real(2, 3, 4), real(3), real(3, seed=1)),
        *case(lambda x: F.instance_norm(x), real(3, 2, 2, 3)),
        *case(
            lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=False),
            *(real(3, 2, 3), real(2, grad=False), real(2, grad=False).abs()),
        ),
    ),
    "group_norm": (
        *case(lambda x, w, b: F.group_norm(x, 2, w, b), real(2, 6, 3), real(6), real(6, seed=1)),
        *case(lambda x, w, b: F.group_norm(x, 3, w, b), real(2, 6, 2, 2), real(6), real(6, seed=1)),
        *case(lambda x: F.group_norm(x, 1), real(3, 5)),
        *case(lambda x: F.group_norm(x, 5), real(1, 5, 3)),
    ),
    "_weight_norm": (
        *case(lambda v, g: torch._weight_norm(v, g, 0), real(5, 3), real(5, 1)),
        *case(lambda v, g: torch._weight_norm(v, g, 1), real(3, 4, 2), real(1, 4, 1)),
    ),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        for mesh in ("2", "3"):
            prove_op(op, each, mesh)


@pytest.mark.parametrize(("op", "which"), [("layer_norm", 2), ("batch_norm", 1), ("group_norm", 2)])
def test_two_axes(op: str, which: int) -> None:
    prove_op(op, CASES[op][which], "2x2")


@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=3),
    rms=st.booleans(),
    mesh=st.sampled_from(["2", "3", "4"]),
    data=st.data(),
)
def test_last_dims_of_any_size(shape: list[int], rms: bool, mesh: str, data: st.DataObject) -> None:
    tail = shape[-data.draw(st.integers(1, len(shape))) :]
    weight = real(*tail, seed=1)
    fn = (lambda x, w: F.rms_norm(x, tail, w, 1e-2)) if rms else (lambda x, w: F.layer_norm(x, tail, w, eps=1e-2))
    prove(fn, real(*shape), weight, mesh=mesh, split=False)


def factors(proof: Proof) -> set[str]:
    return {name.partition(":")[2] for name in proof.factors}


def test_what_is_cut() -> None:
    assert factors(prove_op("batch_norm", CASES["batch_norm"][0], "2")) == {"n", "c", "s0", "s1"}
    assert factors(prove_op("layer_norm", CASES["layer_norm"][1], "2")) == {"d0", "r1", "r2"}
    assert factors(prove_op("group_norm", CASES["group_norm"][0], "2")) == {"n", "g", "c", "s0"}


def test_a_far_mean_does_not_cost_the_variance_its_digits() -> None:
    far = (real(6, 3) + 1e5).detach().requires_grad_()
    prove(batch_norm, far, mesh="3", tolerance=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_statistics_are_wide(dtype: torch.dtype) -> None:
    x = (real(3, 8).detach() * 1e-2).to(dtype).requires_grad_()
    for fn in (lambda x: F.rms_norm(x, (8,)), lambda x: F.layer_norm(x, (8,))):
        proof = prove(fn, x, mesh="2", tolerance=3e-2)
        assert "r1" in factors(proof)


def test_running_statistics_are_not_written_by_shards() -> None:
    """Capture makes such writes explicit; left in place, they would be of a shard: the op stays whole."""
    program = program_of(lambda x: batch_norm(x), (real(4, 3),))
    node = next(n for n in program.graph.nodes if n.op == "call_function")
    op = analyse(program).ops[node.name]
    assert op.has_rule
    node.args = (*node.args[:3], node.args[0], node.args[0], *node.args[5:])
    assert not analyse(program).ops[node.name].has_rule


@pytest.mark.parametrize("op", CASES)
def test_collectives_are_priced_by_factors_of_the_op(op: str) -> None:
    program = program_of(CASES[op][0].fn, CASES[op][0].tensors)
    rule = next(o.rule for o in analyse(program).ops.values() if o.rule.distributed)
    for special in rule.distributed.values():
        assert special.collectives
        assert all(set(c.factors) <= rule.sizes.keys() for c in special.collectives)
