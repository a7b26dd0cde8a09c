"""passes/stream_cross_entropy.py: the same losses and gradients, while of the probabilities none is stored."""

import pytest
import torch
import torch.nn.functional as F

from autopar.codegen.group import FusedGroup
from autopar.passes.fuse import Fuse
from autopar.passes.lower import is_view
from autopar.runtime.moves import max_over, move
from tests.codegen.compare import check_group
from tests.codegen.lowered import lower_function
from tests.golden_files import check_golden
from tests.passes.local_group import one_rank

TOKENS, WIDTH, VOCAB = 6, 8, 20_011
TARGET = torch.tensor([3, -100, 0, VOCAB - 1, 7, -100])


def whole(reduction, smoothing=0.0):
    return lambda x, w, t: F.cross_entropy(x @ w, t, reduction=reduction, label_smoothing=smoothing)


def cut(first, uneven):
    """As `rules.loss` writes it for a rank that has the classes from `first`."""

    def longer(x, fill):
        return torch.cat([x, x.new_full((TOKENS, 1), fill)], 1) if uneven else x

    def loss(x, w, target):
        logits = x @ w
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        largest = max_over(longer(logits.detach(), float("-inf")).amax([1], True), "tp")
        shifted = logits - largest
        log_total = move(move(shifted.exp().sum([1], True), "tp", "P", "I").log().squeeze(1), "tp", "I", "P")
        at = target - first
        here = torch.logical_and(at >= 0, at < logits.shape[1])
        row = at * here
        picked = longer(shifted, 0.0).gather(1, row.unsqueeze(1)).squeeze(1)
        rows = log_total - picked.masked_fill(torch.logical_not(here), 0.0)
        return move(rows.masked_fill(target == -100, 0.0).sum(), "tp", "P", "I")

    return loss


LOSSES = {
    "sum": whole("sum"),
    "mean": whole("mean"),
    "rows": lambda x, w, t: (whole("none")(x, w, t) * torch.arange(1, TOKENS + 1)).sum(),
    "smoothed": whole("sum", 0.1),
    "cut": cut(0, False),
    "cut_uneven": cut(5, True),
}


@pytest.fixture
def rank(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "kernels"))
    with one_rank(tmp_path, "tp"):
        yield


def graphs_of(name, dtype, stream=True, vocab=VOCAB):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(WIDTH, vocab, generator=generator).to(dtype).requires_grad_()
    values = (x, w, TARGET.clamp(max=vocab - 1))
    return lower_function(LOSSES[name], values, 0, stream), values


def run(graphs, values):
    with torch.no_grad():
        loss, *saved = graphs.forward(*values)
        return loss, *graphs.backward(*saved, torch.ones_like(loss))[:2]


@pytest.mark.parametrize("name", LOSSES)
def test_the_same_numbers(rank, name):
    graphs, values = graphs_of(name, torch.float64, vocab=61)
    before, _ = graphs_of(name, torch.float64, stream=False, vocab=61)
    assert [n.name for n in graphs.forward.graph.nodes] != [n.name for n in before.forward.graph.nodes]
    for found, expected in zip(run(graphs, values), run(before, values), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


KERNELS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if often else pytest.mark.slow)
    for name in ("sum", "rows", "cut", "cut_uneven")
    for dtype, often in ((torch.bfloat16, name in ("sum", "cut_uneven")), (torch.float32, False))
]


@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_kernels_store_no_probabilities(rank, name, dtype):
    graphs, _ = graphs_of(name, dtype)
    wide = TOKENS * VOCAB * dtype.itemsize
    assert [size for size in graphs.saved.values() if size >= TOKENS * VOCAB] == [wide]  # the logits alone
    forward, backward = (Fuse("interpreter").run(g) for g in (graphs.forward, graphs.backward))
    for module, stored in ((forward, 0), (backward, 1)):
        groups = [m for m in module.modules() if isinstance(m, FusedGroup)]
        buffers = [b for g in groups for b in g.code.kernel.buffers[g.code.kernel.inputs :]]
        assert sum(b.size_bytes >= TOKENS * VOCAB for b in buffers) == stored  # the gradient of the logits
        assert sum(g.code.printed.text.count("for start in") for g in groups) == 1 - stored
        for group in groups:
            check_group(group)
        calls = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        large = [n for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and not is_view(n)]
        assert all(n in calls for n in large if n.meta["val"].numel() >= TOKENS * VOCAB)


def test_what_it_leaves(rank):
    """Weights of classes, losses over images; a maximum over what is longer by more than a row of -inf."""

    def weighted(x, w, t):
        return (
            F.cross_entropy(x @ w, t, weight=torch.ones(61))
            + torch.cat([x, x.new_full((TOKENS, 1), 0.0)], 1).amax(1).sum()
        )

    values = (
        torch.randn(TOKENS, WIDTH, requires_grad=True),
        torch.randn(WIDTH, 61, requires_grad=True),
        TARGET.clamp(max=60),
    )
    names = [[n.name for n in lower_function(weighted, values, 0, s).forward.graph.nodes] for s in (True, False)]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", ["sum", "cut_uneven"])
def test_golden(request, rank, name):
    graphs, _ = graphs_of(name, torch.bfloat16, vocab=61)
    lines = [n.format_node() for g in (graphs.forward, graphs.backward) for n in g.graph.nodes]
    check_golden(request, f"stream_cross_entropy_{name}", "\n".join(lines))


def test_smoothed_labels_take_one_sweep():
    """The sum of a log softmax is that of the logits, less a logarithm for each class."""
    graphs, _ = graphs_of("smoothed", torch.bfloat16)
    groups = [m for m in Fuse("interpreter").run(graphs.forward).modules() if isinstance(m, FusedGroup)]
    assert sum(g.code.printed.text.count("for start in") for g in groups) == 1
    for group in groups:
        check_group(group)
