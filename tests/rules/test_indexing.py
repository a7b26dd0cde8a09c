"""Lookups by index, with whole and with cut tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autopar.rules import rule_of
from autopar.rules.indexing import RULES
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import prove

aten = torch.ops.aten
X = real(4, 5)
Z = real(4, 5, 3)
CASES: dict[str, tuple[Case, ...]] = {
    "embedding": (
        *case(lambda w, ids: F.embedding(ids, w), real(8, 4), whole_numbers(8, 2, 5)),
        *case(lambda w, ids: F.embedding(ids, w), real(5, 3), whole_numbers(5, 4)),
        *case(lambda w, ids: F.embedding(ids, w, padding_idx=3), real(5, 3), torch.tensor([3, 0, 4, 3, 1])),
        *case(lambda w, ids: F.embedding(ids, w, padding_idx=-1), real(5, 4), torch.tensor([[4, 0], [4, 2]])),
        *case(lambda w, ids: F.embedding(ids, w, padding_idx=0), real(8, 4), torch.tensor([[7, 0], [4, 0]])),
    ),
    "index": (
        *case(lambda x, i: x[i], Z, whole_numbers(4, 5)),
        *case(lambda x, i: x[:, i], Z, whole_numbers(5, 2, 3)),
        *case(lambda x, i: x[..., i], Z, whole_numbers(3, 4)),
        *case(lambda x, i, j: x[i, j], Z, whole_numbers(4, 5, 1), whole_numbers(5, 2)),
        *case(lambda x, i, j: x[i, :, j], Z, whole_numbers(4, 5), whole_numbers(3, 5)),
        *case(lambda x, i, j: x[:, i, j], Z, whole_numbers(5, 4), whole_numbers(3, 1)),
        *case(lambda x, i: aten.index(x, [None, i]), Z, torch.tensor(-1)),
        *case(lambda x, i: x[i], Z, torch.tensor([-1, 0, -4, 2, 2])),
        *case(lambda x, i, j, k: x[i, j, k], Z, whole_numbers(4, 5), whole_numbers(5, 5), whole_numbers(3, 5)),
    ),
    "_unsafe_index": case(lambda x, i: aten._unsafe_index(x, [None, i]), Z, whole_numbers(5, 4)),
    "index_select": (
        *case(lambda x, i: x.index_select(1, i), Z, whole_numbers(5, 4)),
        *case(lambda x, i: x.index_select(-1, i), X, torch.tensor(2)),
    ),
    "gather": (
        *case(lambda x, i: x.gather(1, i), X, whole_numbers(5, 4, 3)),
        *case(lambda x, i: x.gather(1, i), Z, whole_numbers(5, 2, 4, 3)),
        *case(lambda x, i: x.gather(-1, i), Z, whole_numbers(3, 4, 5, 1)),
        *case(lambda x, i: x.gather(0, i), X, whole_numbers(4, 5, 5)),
    ),
    "take_along_dim": (
        *case(lambda x, i: x.take_along_dim(i, 1), X, whole_numbers(5, 4, 3)),
        *case(lambda x, i: x.take_along_dim(i, 1), Z, whole_numbers(5, 1, 4, 3)),
        *case(lambda x, i: x.take_along_dim(i, 0), real(3, 1), whole_numbers(3, 4, 5)),
    ),
    "one_hot": (
        *case(lambda i: F.one_hot(i, 6), whole_numbers(6, 4, 5)),
        *case(lambda i: F.one_hot(i, 5), whole_numbers(5, 5)),
    ),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        prove(each.fn, *each.tensors, mesh="3", split=False)  # uneven shards, and empty ones of a dim of size four
        prove_op(op, each, "2")


@pytest.mark.parametrize("op", ["embedding", "index", "gather", "one_hot"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.sampled_from([None, (4,), (1,), (3, 4), (3, 1)]), min_size=1, max_size=3),
    st.sampled_from(["2", "3"]),
)
def test_any_places_of_the_indices(shape: list[int], places: list[tuple[int, ...] | None], mesh: str) -> None:
    places = places[: len(shape)]
    tensors = [whole_numbers(shape[d], *p) for d, p in enumerate(places) if p is not None]

    def fn(x: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        taken = iter(indices)
        return x[tuple(slice(None) if p is None else next(taken) for p in places)]

    prove(fn, real(*shape), *tensors, mesh=mesh, split=False)


def test_a_vocabulary_with_parts_is_cut_in_runs_only() -> None:
    proof = prove(
        lambda w, ids: (F.embedding(ids, w), w.reshape(2, 4, 3).transpose(0, 1) * 2),
        real(8, 3),
        whole_numbers(8, 4),
        mesh="2",
    )
    assert "embedding:v.0" in proof.factors
    assert "embedding:v.1" not in proof.factors


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: F.embedding(i, x, scale_grad_by_freq=True),
        lambda x, i: x.take_along_dim(i),
        lambda x, i: x.take(i),
    ],
)
def test_what_depends_on_the_whole_or_on_data_is_kept_whole(fn: object) -> None:
    proof = prove(fn, X, torch.tensor([1, 1, 2, 3]), mesh="2", split=False)
    assert not proof.ops & {"embedding", "take_along_dim", "take"}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_has_no_rule(dtype: torch.dtype) -> None:
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["val"], mask.meta["val"] = torch.ones(4, 5), torch.ones(4, dtype=dtype)
    node = graph.call_function(aten.index.Tensor, (x, [mask]))
    node.meta["val"] = torch.ones(4, 5)
    assert rule_of(node) is None


def test_no_indices_and_an_empty_table_of_features() -> None:
    prove(lambda x, i: x[i], X, whole_numbers(4, 0), mesh="2", split=False)
    prove(lambda x, i: x.gather(1, i), X, whole_numbers(5, 4, 0), mesh="2", split=False)
    prove(lambda w, i: F.embedding(i, w), real(4, 0), whole_numbers(4, 3), mesh="2", split=False)
