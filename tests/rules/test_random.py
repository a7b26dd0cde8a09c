"""autopar/rules/random.py: whatever is cut, each shard draws its part of the whole value's numbers."""

from __future__ import annotations

import pytest
import torch

from autopar.rules.analyse import analyse
from autopar.rules.random import RULES
from autopar.runtime import random_ops  # noqa: F401 - defines torch.ops.autopar
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import program_of, prove

ours = torch.ops.autopar
KEY = torch.tensor([0x1234567890ABCDEF, 0])


def made(target: object, **options: object) -> tuple[Case, ...]:
    """A factory's numbers, times an input, so that a gradient flows and neighbours are cut in turn."""
    return case(lambda x, key: x * target(list(x.shape), key, device="cpu", **options), real(4, 6), KEY)


CASES: dict[str, tuple[Case, ...]] = {
    "autopar::dropout": (
        Case(lambda x, key: ours.dropout(x, key, 0.5), (real(4, 6), KEY)),
        Case(lambda x, key: ours.dropout(x, key, 0.3), (real(5, 3, 7), KEY)),
        Case(lambda x, key: ours.dropout(x, key, 0.5), (real(2, 3, 2, 4), KEY)),
        Case(lambda x, key: ours.dropout(x.reshape(4, 6, 5).transpose(1, 2), key, 0.4), (real(4, 30), KEY)),
        Case(lambda x, key: ours.dropout(x.sum(1), key, 0.4), (real(4, 6, 3), KEY)),
        Case(lambda x, key: ours.dropout(x, key, 0.5), (real(), KEY)),
    ),
    "autopar::keep": made(lambda size, key, device: ours.keep(size, key, 0.4, device=device)),
    "autopar::uniform": made(ours.uniform, dtype=torch.float64),
    "autopar::normal": made(ours.normal, dtype=torch.float64),
}


@pytest.mark.parametrize("mesh", ["2", "4", "2x2"])
@pytest.mark.parametrize("op", CASES)
def test_shards_draw_what_the_whole_draws(op: str, mesh: str) -> None:
    for each in CASES[op][: 2 if mesh == "2x2" else None]:
        if each.tensors[0].dim():
            prove_op(op.partition("::")[2], each, mesh)
        else:
            prove(each.fn, *each.tensors, mesh=mesh, split=False)


def test_every_op_that_can_be_cut_has_a_case() -> None:
    assert RULES.keys() - CASES.keys() == {"autopar::key"}


def test_a_partial_sum_is_dropped_as_a_sum() -> None:
    analysis = analyse(program_of(lambda x, key: ours.dropout(x, key, 0.5), (real(4, 6), KEY)))
    (op,) = analysis.ops.values()
    assert op.rule.linear == (frozenset({0}),)
    assert {f.name for f in op.factors} == {"d0", "d1"}
