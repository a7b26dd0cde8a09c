"""Losses: sums and rows on shards, and means that count over all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autopar.rules import loss
from autopar.runtime.ctc import ctc_loss
from tests.rules.cases import Case, case, prove_op, real, whole_numbers
from tests.rules.prove import program_of, prove

aten = torch.ops.aten
REDUCTIONS = ("none", "sum", "mean")
A, B = real(4, 5), real(4, 5, seed=3)
SIGNS = torch.where(torch.arange(20).reshape(4, 5) % 3 == 0, 1.0, -1.0).double()
CHANCES = real(4, 5, seed=5, grad=False).sigmoid()
WEIGHT = real(5, seed=6, grad=False).abs()
TARGET = torch.tensor([1, -100, -100, 4, 2, -100])


def shares(*shape: int) -> Tensor:
    return real(*shape, seed=5, grad=False).softmax(1).requires_grad_()


def each_reduction(fn: object, *tensors: Tensor, **options: object) -> tuple[Case, ...]:
    return tuple(
        c
        for reduction in REDUCTIONS
        for c in case(lambda *t, r=reduction: fn(*t, reduction=r, **options), *tensors)  # type: ignore[operator]
    )


def divergence(x: Tensor, y: Tensor, *, reduction: str) -> Tensor:
    """torch.nn.functional's own warns of the mean."""
    return aten.kl_div.default(x, y, {"none": 0, "mean": 1, "sum": 2}[reduction])


def nll(op: str, *tensors: Tensor) -> tuple[Case, ...]:
    """The overloads that export writes only for the other ranks."""
    fn = getattr(aten, op).default
    weight = tensors[2] if len(tensors) > 2 else None
    return case(lambda x, y, *w: fn(x, y, *w, *([] if w else [None]), 2), *tensors[: 3 if weight is not None else 2])


CASES: dict[str, tuple[Case, ...]] = {
    "cross_entropy_loss": (
        *each_reduction(F.cross_entropy, real(6, 5), whole_numbers(5, 6)),
        *each_reduction(F.cross_entropy, real(6, 5), TARGET),
        *each_reduction(F.cross_entropy, real(6, 5), TARGET, WEIGHT),
        *each_reduction(F.cross_entropy, real(6, 5), TARGET, label_smoothing=0.2),
        *each_reduction(F.cross_entropy, real(6, 5), whole_numbers(5, 6), WEIGHT, label_smoothing=0.2, ignore_index=4),
        *each_reduction(F.cross_entropy, real(4, 5), shares(4, 5)),
        *each_reduction(F.cross_entropy, real(3, 5, 2), shares(3, 5, 2), WEIGHT, label_smoothing=0.1),
        *case(lambda x, y: F.cross_entropy(x, y, reduction="sum"), real(2, 5, 3, 2), whole_numbers(5, 2, 3, 2)),
        *case(
            lambda x, y, w: F.cross_entropy(x, y, w, reduction="none"), real(2, 5, 3), whole_numbers(5, 2, 3), WEIGHT
        ),
        *case(lambda x, y, w: F.cross_entropy(x, y, w), real(5), torch.tensor(3), WEIGHT),
        *case(lambda x, y: F.cross_entropy(x, y), real(5), shares(1, 5)[0].detach()),
        *case(lambda x, y: F.cross_entropy(x, y, reduction="sum"), real(6, 5), torch.full((6,), -100)),
    ),
    "nll_loss_nd": (
        *each_reduction(F.nll_loss, real(6, 5), TARGET),
        *each_reduction(F.nll_loss, real(6, 5), TARGET, WEIGHT),
        *case(
            lambda x, y, w: F.nll_loss(x, y, w, reduction="sum"), real(2, 5, 3, 2), whole_numbers(5, 2, 3, 2), WEIGHT
        ),
        *case(lambda x, y: F.nll_loss(x, y, reduction="none"), real(2, 5, 3), whole_numbers(5, 2, 3)),
        *case(lambda x, y, w: F.nll_loss(x, y, w), real(5), torch.tensor(3), WEIGHT),
    ),
    "nll_loss": nll("nll_loss", real(6, 5), TARGET, WEIGHT),
    "nll_loss2d": nll("nll_loss2d", real(2, 5, 3, 2), whole_numbers(5, 2, 3, 2)),
    "mse_loss": each_reduction(F.mse_loss, A, B),
    "l1_loss": each_reduction(F.l1_loss, A, B),
    "smooth_l1_loss": each_reduction(F.smooth_l1_loss, A, B, beta=0.5),
    "huber_loss": each_reduction(F.huber_loss, A, B, delta=0.5),
    "kl_div": (
        *each_reduction(divergence, A, CHANCES.clone().requires_grad_()),
        *case(lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"), A, B),
        *case(lambda x, y: F.kl_div(x, y, reduction="batchmean"), A, CHANCES),
    ),
    "binary_cross_entropy": (
        *each_reduction(F.binary_cross_entropy, B.detach().sigmoid().requires_grad_(), CHANCES),
        *case(lambda x, y, w: F.binary_cross_entropy(x, y, w), B.detach().sigmoid().requires_grad_(), CHANCES, WEIGHT),
    ),
    "binary_cross_entropy_with_logits": (
        *each_reduction(F.binary_cross_entropy_with_logits, A, CHANCES),
        *case(
            lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p),
            *(A, CHANCES, real(4, 1, grad=False).abs(), WEIGHT),
        ),
    ),
    "hinge_embedding_loss": each_reduction(F.hinge_embedding_loss, A, SIGNS),
    "soft_margin_loss": each_reduction(F.soft_margin_loss, A, SIGNS),
    "margin_ranking_loss": each_reduction(F.margin_ranking_loss, A, B, SIGNS, margin=0.2),
    "poisson_nll_loss": each_reduction(F.poisson_nll_loss, A, CHANCES * 4, full=True),
    "cosine_embedding_loss": each_reduction(F.cosine_embedding_loss, A, B, SIGNS[:, 0], margin=0.1),
    "multi_margin_loss": (
        *each_reduction(F.multi_margin_loss, A, whole_numbers(5, 4)),
        *case(lambda x, y, w: F.multi_margin_loss(x, y, p=2, weight=w), A, whole_numbers(5, 4), WEIGHT),
    ),
    "multilabel_margin_loss": each_reduction(
        F.multilabel_margin_loss,
        A,
        torch.tensor([[1, 2, -1, 0, 0], [0, -1, 1, 1, 1], [4, 3, 2, 1, 0], [2, -1, 0, 0, 0]]),
    ),
    "triplet_margin_loss": each_reduction(F.triplet_margin_loss, A, B, real(4, 5, seed=4), swap=True),
    "cosine_similarity": (
        *case(lambda x, y: F.cosine_similarity(x, y), real(4, 5, 3), real(4, 5, 3, seed=2)),
        *case(lambda x, y: F.cosine_similarity(x, y, dim=-1), real(4, 1, 3), real(5, 3, seed=2)),
        *case(lambda x, y: F.cosine_similarity(x, y, dim=0), real(3, 4), real(3, 1, seed=2)),
    ),
    "pairwise_distance": (
        *case(lambda x, y: F.pairwise_distance(x, y), real(4, 3), real(4, 3, seed=2)),
        *case(lambda x, y: F.pairwise_distance(x, y, p=1.0, keepdim=True), real(2, 4, 3), real(4, 3, seed=2)),
    ),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for k, each in enumerate(CASES[op]):
        prove_op(op, each, "23"[k % 2])  # so that each reduction meets even and uneven shards, in half the time


SOUNDS, WORDS = real(7, 5, 4, seed=8), 1 + whole_numbers(3, 5, 3)
HEARD, WRITTEN = torch.tensor([7, 6, 7, 5, 7]), torch.tensor([3, 2, 0, 3, 1])


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
@pytest.mark.parametrize("reduction", range(3))
def test_alignments_of_other_samples_are_not_read(mesh: str, reduction: int) -> None:
    def loss_of(x: Tensor, words: Tensor, heard: Tensor, written: Tensor) -> Tensor:
        return ctc_loss(x.log_softmax(-1), words, heard, written, reduction=reduction, zero_infinity=True)

    each = Case(loss_of, (SOUNDS, WORDS, HEARD, WRITTEN))
    prove_op("ctc_loss", each, mesh)


@pytest.mark.parametrize("which", [1, 13, 16])
def test_two_axes(which: int) -> None:
    prove_op("cross_entropy_loss", CASES["cross_entropy_loss"][which], "2x2")


def test_two_axes_of_picked_classes() -> None:
    prove_op("nll_loss_nd", CASES["nll_loss_nd"][4], "2x2")


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 6), classes=st.integers(2, 9), smooth=st.booleans(), mesh=st.sampled_from(["2", "3", "4"]))
def test_any_vocabulary(tokens: int, classes: int, smooth: bool, mesh: str) -> None:
    target = whole_numbers(classes, tokens)
    target[::3] = -100
    prove(
        lambda x, y: F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1 * smooth),
        *(real(tokens, classes), target),
        mesh=mesh,
        split=False,
    )


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_a_mean_of_no_target_is_nan_and_leaves_no_gradient(weight: Tensor | None) -> None:
    ignored = torch.full((6,), -100)
    more = () if weight is None else (weight,)
    prove(lambda x, y, *w: F.cross_entropy(x, y, *w), real(6, 5), ignored, *more, mesh="2")


def test_a_vocabulary_seen_in_blocks_is_cut_between_them() -> None:
    proof = prove(
        lambda x, y: F.cross_entropy((x.view(4, 3, 4) * 2).view(4, 12), y, reduction="sum"),
        real(4, 12),
        whole_numbers(12, 4),
    )
    assert "cross_entropy_loss:v.0" in proof.factors
    assert "cross_entropy_loss:v.1" not in proof.factors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_are_wide(dtype: torch.dtype) -> None:
    x, target = (real(40, 4).detach() * 20).to(dtype).requires_grad_(), whole_numbers(4, 40)
    proof = prove(lambda x, y: F.cross_entropy(x, y), x, target, mesh="2", tolerance=5e-2)
    assert {"cross_entropy_loss_default:v", "cross_entropy_loss_default:n"} <= proof.factors


def test_a_mean_does_not_overflow_where_the_sum_would() -> None:
    x, target = (real(4000, 4, grad=False) * 20).half(), whole_numbers(4, 4000)
    graph = program_of(lambda x, y: F.cross_entropy(x, y), (x, target)).graph
    ours = torch.fx.GraphModule(torch.nn.Module(), graph)(x, target)[0]
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours.double(), F.cross_entropy(x.double(), target), rtol=1e-3, atol=0)


def test_every_mean_is_rewritten() -> None:
    """No rule takes a mean, so a loss that `normalize` forgets would be kept whole."""
    assert set(loss.BY_CLASS) | set(loss.BY_ROW) <= CASES.keys()
