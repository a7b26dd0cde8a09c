"""Attention: masks of every rank, grouped heads, causal queries that know their place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from autopar.rules.analyse import analyse
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import program_of, prove

OP = "scaled_dot_product_attention"


def qkv(
    *lead: int, heads: int = 4, shared: int = 0, s: int = 6, t: int = 0, e: int = 4, f: int = 0
) -> tuple[Tensor, ...]:
    """Query, key, value; `shared`: the number of key heads, t: of keys, f: of value features, where they are others."""
    k = shared or heads
    return real(*lead, heads, s, e), real(*lead, k, t or s, e, seed=1), real(*lead, k, t or s, f or e, seed=2)


def causal(*tensors: Tensor, **options: object) -> tuple[Case, ...]:
    return case(lambda q, k, v: attend(q, k, v, is_causal=True, **options), *tensors)


def masked(mask: Tensor, *tensors: Tensor, **options: object) -> tuple[Case, ...]:
    return case(lambda q, k, v, m: attend(q, k, v, m, **options), *tensors, mask)


GROUPED_MASKS = ((2, 4, 3, 3), (2, 1, 3, 3), (3, 3), (4, 3, 3))
CASES: dict[str, tuple[Case, ...]] = {
    OP: (
        *case(lambda q, k, v: attend(q, k, v), *qkv(3)),
        *case(lambda q, k, v: attend(q, k, v, scale=0.3), *qkv(2, s=5, t=3, f=2)),
        *causal(*qkv(2)),
        *causal(*qkv(1, heads=3, s=5)),
        *causal(*qkv(2, s=4, t=7)),
        *causal(*qkv(2, s=7, t=3), scale=1.0),
        *causal(*qkv(heads=3, s=4)),
        *causal(real(4, 2), real(4, 2, seed=1), real(4, 2, seed=2)),
        *masked(real(6, 6), *qkv(2)),
        *masked(torch.ones(6, 6).tril().bool(), *qkv(2)),
        *masked(real(1, 6), *qkv(2)),
        *masked(real(2, 1, 6, 6), *qkv(2)),
        *masked(real(2, 1, 1, 6), *qkv(2)),
        *masked(real(4, 6, 6), *qkv(2)),
        *masked(real(2, 1, 3, 4, 4), *qkv(2, 2, heads=3, s=4, e=2)),
        *case(lambda q, k, v: attend(q, k, v), real(3, 4, 4, 2), real(1, 4, 4, 2, seed=1), real(1, 4, 4, 2, seed=2)),
        *causal(*qkv(2, heads=6, shared=3), enable_gqa=True),
        *causal(*qkv(2, shared=1, s=3), enable_gqa=True),
        *causal(*qkv(2, heads=2, s=3), enable_gqa=True),
        *(c for m in GROUPED_MASKS for c in masked(real(*m), *qkv(2, shared=2, s=3), enable_gqa=True)),
    )
}


@pytest.mark.parametrize("mesh", ["2", "3"])
def test_every_form_runs_on_shards_as_on_the_whole(mesh: str) -> None:
    for each in CASES[OP]:
        prove_op(OP, each, mesh)


@pytest.mark.parametrize("which", [3, 16])
def test_two_axes(which: int) -> None:
    prove_op(OP, CASES[OP][which], "2x2")


@settings(max_examples=10, deadline=None)
@given(
    b=st.integers(1, 3),
    h=st.integers(1, 4),
    s=st.integers(1, 5),
    t=st.integers(1, 5),
    mesh=st.sampled_from(["2", "3", "4"]),
)
def test_causal_of_any_length(b: int, h: int, s: int, t: int, mesh: str) -> None:
    each = causal(*qkv(b, heads=h, s=s, t=t, e=2))[0]
    prove(each.fn, *each.tensors, mesh=mesh, split=False)


def test_a_sequence_seen_in_blocks_is_cut_between_them() -> None:
    """Causal shards are found by one offset, so a cut across all blocks is not offered."""
    proof = prove(
        lambda q, k, v: attend(q, k, v, is_causal=True).view(1, 3, 4, 2) * 2, *qkv(heads=1, s=12, e=2), mesh="2"
    )
    assert f"{OP}:s.0" in proof.factors
    assert f"{OP}:s.1" not in proof.factors


def test_causal_flop_is_half() -> None:
    def flop(**options: object) -> float:
        program = program_of(lambda q, k, v: attend(q, k, v, **options), qkv(2))
        return next(iter(analyse(program).ops.values())).rule.flop

    assert flop() == 2 * 2 * 4 * 36 * (4 + 4)
    assert flop(is_causal=True) == 2 * 2 * 4 * 21 * (4 + 4)


def test_torchs_own_dropout_has_no_rule() -> None:
    """Each shard would draw its own numbers."""
    program = program_of(lambda q, k, v: attend(q, k, v), qkv(2))
    node = next(n for n in program.graph.nodes if n.op == "call_function")
    node.args = (*node.args[:3], None, 0.5)
    assert not analyse(program).ops[node.name].has_rule
