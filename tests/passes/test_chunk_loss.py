"""passes/chunk_loss.py: equal losses and gradients, while no value is as large as the logits of the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Interpreter

from tests.codegen.lowered import lower_function
from tests.golden_files import check_golden
from tests.passes.local_group import one_rank
from tests.passes.test_stream_cross_entropy import LOSSES, TARGET, TOKENS, WIDTH

VOCAB = 61
BATCH = 2


def in_three_dims(x, w, t):
    """Rows in two dims, a weight as `F.linear` has it, logits read as float32."""
    logits = F.linear(x.view(BATCH, -1, WIDTH), w.t())
    return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, 1), t)


def with_bias(x, w, t):
    return F.cross_entropy(torch.addmm(w.sum(0), x, w), t, label_smoothing=0.1)


def probabilities(x, w, t):
    q = torch.softmax(torch.arange(TOKENS * w.shape[1]).view(TOKENS, -1).to(x) % 7, 1)
    return F.cross_entropy(x @ w, q, label_smoothing=0.2)


CASES = {**LOSSES, "three_dims": in_three_dims, "bias": with_bias, "probabilities": probabilities}


@pytest.fixture
def rank(tmp_path):
    with one_rank(tmp_path, "tp"):
        yield


def graphs_of(name, dtype, chunks, stream=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(WIDTH, VOCAB, generator=generator).to(dtype).requires_grad_()
    values = (x, w, TARGET.clamp(max=VOCAB - 1))
    return lower_function(CASES[name], values, 0, stream, chunks), values


class Largest(Interpreter):
    """Remembers the rows of the largest value of the vocabulary's width."""

    rows = 0

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and VOCAB in value.shape and WIDTH not in value.shape:
            self.rows = max(self.rows, value.numel() // VOCAB)
        return value


def run(graphs, values):
    forward, backward = Largest(graphs.forward), Largest(graphs.backward)
    with torch.no_grad():
        loss, *saved = forward.run(*values)
        grads = backward.run(*saved, torch.ones_like(loss))[:2]
    return (loss, *grads), max(forward.rows, backward.rows)


OFTEN = (("mean", 4), ("smoothed", 2), ("cut_uneven", 4), ("three_dims", 100))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param(name, chunks, marks=() if (name, chunks) in OFTEN else pytest.mark.slow)
        for name in CASES
        for chunks in (2, 4, 100)
    ],
)
def test_the_same_numbers(rank, name, chunks):
    expected, whole = run(*graphs_of(name, torch.float64, 1, stream=False))
    found, rows = run(*graphs_of(name, torch.float64, chunks))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    given = name == "probabilities"  # these targets are as wide themselves
    assert (rows, whole) == (TOKENS if given else -(-TOKENS // chunks), TOKENS)


def test_sums_of_half_precision_are_added_in_float32(rank):
    """The gradient of a weight is rounded once for each chunk and once in the end."""
    exact, _ = run(*graphs_of("mean", torch.float64, 1))
    graphs, values = graphs_of("mean", torch.bfloat16, 100)
    adds = [n for n in graphs.backward.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert [n.meta["val"].dtype for n in adds] == [torch.float32] * (TOKENS - 1)
    (_, _, found), _ = run(graphs, values)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact[2]).abs().max() < 0.02 * exact[2].abs().max()


def test_saved_bytes_are_without_the_logits(rank):
    """Of each row one number is kept: the logarithm of its sum."""
    saved = [sum(graphs_of("mean", torch.float32, chunks)[0].saved.values()) for chunks in (1, 4)]
    assert saved[0] - saved[1] == TOKENS * VOCAB * 4


def test_what_it_leaves(rank):
    """Logits that something reads across rows, weights of classes, products under no loss, and of a feed-forward."""

    def kept(run):
        x, w = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)
        whole, chunked = (lower_function(run, (x, w, TARGET.clamp(max=7)), 0, True, n) for n in (1, 3))
        names = [[n.name for g in (m.forward, m.backward) for n in g.graph.nodes] for m in (whole, chunked)]
        return names[0] == names[1]

    assert kept(lambda x, w, t: F.cross_entropy((x @ w).cumsum(0), t))
    assert kept(lambda x, w, t: F.cross_entropy(x @ w, t, weight=torch.ones(WIDTH)))
    assert kept(lambda x, w, t: (F.gelu(x @ w) @ w).sum())


def test_golden(request, rank):
    graphs, _ = graphs_of("mean", torch.bfloat16, 2)
    lines = [n.format_node() for g in (graphs.forward, graphs.backward) for n in g.graph.nodes]
    check_golden(request, "chunk_loss_mean", "\n".join(lines))
