"""What has no rule: kept whole on every rank, between ops that are split; and factories, which have no tensor input."""

from __future__ import annotations

import pytest
import torch

from autopar.rules import rule_of
from autopar.rules.analyse import analyse
from tests.rules.cases import real, whole_numbers
from tests.rules.prove import program_of, prove

aten = torch.ops.aten
X = real(4, 5)


@pytest.mark.parametrize(
    ("op", "fn"),
    [
        ("take", lambda x, i: (x * 2).take(i) * 3),
        ("kron", lambda x, i: torch.kron(x * 2, x[:2]) + 1),
        ("trace", lambda x, i: (x * 2).trace() * x),
        ("as_strided", lambda x, i: (x * 2).as_strided((2, 3), (1, 2)) + 1),
        ("block_diag", lambda x, i: torch.block_diag(x, x * 2) * 2),
        ("trapezoid", lambda x, i: torch.trapezoid(x * 2) * 3),
        ("renorm", lambda x, i: (x * 2).renorm(2, 0, 1.0) * 3),
    ],
)
def test_an_op_without_a_rule_between_split_ones(op: str, fn: object) -> None:
    tensors = (X, whole_numbers(20, 3))
    analysis = analyse(program_of(fn, tensors))
    (kept,) = [o for o in analysis.ops.values() if o.node.target._schema.name == f"aten::{op}"]
    assert not kept.has_rule
    assert not kept.factors
    proof = prove(fn, *tensors, mesh="2")
    assert op not in proof.ops


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + torch.arange(5),
        lambda x: torch.full((4, 1), 2.0, dtype=x.dtype) * x + torch.zeros(5, dtype=x.dtype),
        lambda x: x * torch.ones(4, 5, dtype=torch.bool).tril(),
        lambda x: x + torch.eye(4, 5, dtype=x.dtype) - torch.linspace(0, 1, 5, dtype=x.dtype),
        lambda x: x.new_zeros(4, 1) + x.new_ones(5) * x + x.new_full((5,), 3.0),
        lambda x: torch.cat([x, torch.zeros_like(x)]) + torch.full_like(x, 2.0).repeat(2, 1),
        lambda x: x.masked_fill(torch.arange(5)[None, :] > torch.arange(4)[:, None], float("-inf")).softmax(-1),
        lambda x: x[torch.arange(3)] * torch.tril_indices(3, 5).sum(),
    ],
)
def test_factories(fn: object) -> None:
    prove(fn, X, mesh="2")


def test_a_factory_is_made_whole_by_rule() -> None:
    """strict=True must not stumble over `torch.arange(x.shape[1])`."""
    program = program_of(lambda x: x + torch.arange(5) + torch.zeros(5), (X,))
    assert all(op.has_rule for op in analyse(program, strict=True).ops.values())
    (node,) = [n for n in program.calls if n.target is aten.arange.default]
    found = rule_of(node)
    assert found is not None
    assert found.outs == (((),),)


@pytest.mark.parametrize("target", [aten.relu_.default, aten.add_.Tensor, aten.mul.out])
def test_what_writes_in_place_has_no_rule(target: torch._ops.OpOverload) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    node = graph.call_function(
        target, (x, x)[: len(target._schema.arguments) - 1 or 1], {"out": x} if target is aten.mul.out else {}
    )
    node.meta["val"] = torch.ones(2)
    assert rule_of(node) is None
