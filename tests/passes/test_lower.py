"""passes/lower.py: forward and backward together are autograd; what is saved is what the plan says, and no more."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.fx.traceback import annotate

from autopar.passes.lower import Partition, is_view, lower_to_graphs
from autopar.program import Record
from autopar.runtime.moves import move
from tests.passes.local_group import one_rank

ROWS, WIDTH, WIDE = 6, 4, 16
LEVELS = ("none", "selective", "full")


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path, "dp"):
        yield


@contextmanager
def block(name, op=""):
    with annotate({"autopar": Record(op=op, block=name)}):
        yield


def gathered(shard):
    return move(shard, "dp", "S0", "R", tuple((n,) for n in shard.shape))


def net(x, *weights):
    """Two blocks, each: norm, linear, gelu, linear, residual; then a loss."""
    for i in range(0, len(weights), 2):
        with block(f"layers.{i // 2}"):
            up, down = weights[i : i + 2]
            h = F.layer_norm(x, (WIDTH,))
            h = F.gelu(h @ gathered(up).t())
            x = x + h @ gathered(down).t()
    with block("after"):
        return x.square().mean()


def attention(x, w):
    with block("layers.0"):
        q, k, v = (x @ w.t()).chunk(3, dim=-1)
        heads = (t.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2) for t in (q, k, v))
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
    with block("after"):
        return x.square().sum()


def weights(seed=0):
    torch.manual_seed(seed)
    shapes = [(WIDE, WIDTH), (WIDTH, WIDE)] * 2
    return [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]


def lowered(fn, recompute, *values):
    """Loss, gradients and graphs of `fn` lowered; all values but the first are parameters."""
    partition = Partition(frozenset(range(1, len(values))), {f"layers.{i}": recompute for i in range(2)})
    graphs = []
    loss = lower_to_graphs(fn, partition, (), graphs.append)(*values)
    grads = torch.autograd.grad(loss, values[1:])
    return loss, grads, graphs[0]


def nodes(module, name):
    return [n for n in module.graph.nodes if n.op == "call_function" and name in str(n.target)]


@pytest.mark.parametrize("recompute", LEVELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_autograd(recompute, seed):
    x, ws = torch.randn(ROWS, WIDTH, dtype=torch.float64), weights(seed)
    expected = net(x, *ws)
    loss, grads, _ = lowered(net, recompute, x, *ws)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, ws), rtol=1e-12, atol=1e-12)


def test_shards_are_saved_and_gathered_again():
    """ZeRO-3: neither graph keeps a gathered weight for the other."""
    x, ws = torch.randn(ROWS, WIDTH, dtype=torch.float64), weights()
    _, _, graphs = lowered(net, "none", x, *ws)
    assert len(nodes(graphs.forward, "all_gather")) == len(ws)
    # The first block's up projection needs no gradient of its input, so its weight is not gathered a second time.
    assert len(nodes(graphs.backward, "all_gather")) == len(ws) - 1
    assert len(nodes(graphs.backward, "reduce_scatter")) == len(ws)
    assert not any("gather" in name or "wait" in name for name in graphs.saved)


def test_recomputing_saves_less_and_full_keeps_only_block_inputs():
    x, ws = torch.randn(ROWS, WIDTH, dtype=torch.float64), weights()
    saved = {level: lowered(net, level, x, *ws)[2] for level in LEVELS}
    width_bytes, wide_bytes = ROWS * WIDTH * 8, ROWS * WIDE * 8
    assert saved["full"].saved_bytes == 2 * width_bytes, saved["full"].saved  # the second block's input and output
    # and the up products; not the down products, since the sums with them are saved
    assert saved["selective"].saved_bytes == 2 * width_bytes + 2 * wide_bytes, saved["selective"].saved
    norms_bytes = 2 * width_bytes + 2 * ROWS * 8  # of the first one no input needs a gradient: no statistics
    assert saved["none"].saved_bytes == 2 * width_bytes + 4 * wide_bytes + norms_bytes, saved["none"].saved
    assert len(nodes(saved["full"].backward, "gelu.default")) == 2
    assert not nodes(saved["none"].backward, "gelu.default")


def test_views_are_made_again_and_not_saved_twice():
    """Query, key and value are views of one product, which is saved once; so is the attention's result."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    w = torch.randn(3 * WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = attention(x, w)
    loss, grads, graphs = lowered(attention, "none", x, w)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, [w]), rtol=1e-12, atol=1e-12)
    placed = [n for n in graphs.backward.graph.nodes if n.name in graphs.saved]
    assert len(placed) == len(graphs.saved)
    assert not any(is_view(n) for n in placed)
    assert sum(tuple(n.meta["val"].shape) == (ROWS, 3 * WIDTH) for n in placed) == 1
    logsumexp_bytes = 2 * ROWS * 8
    assert graphs.saved_bytes <= ROWS * WIDTH * 8 * 5 + logsumexp_bytes, graphs.saved


def test_cheap_steps_inside_an_op_are_made_again():
    """An RMS norm saves its input and the statistic, not the scaled input that its weight's gradient reads."""

    def normed(x, w, v):
        with block("layers.0", "linear"):
            x = x @ v.t()
        with block("layers.0", "norm"):
            x = F.rms_norm(x, (WIDTH,), w)
        with block("layers.0", "tanh"):
            return x.tanh().sum()

    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    ws = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((WIDTH,), (WIDTH, WIDTH))]
    expected = normed(x, *ws)
    loss, grads, graphs = lowered(normed, "none", x, *ws)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, ws), rtol=1e-12, atol=1e-12)
    assert graphs.saved_bytes <= 2 * ROWS * WIDTH * 8 + ROWS * 8, graphs.saved


@pytest.mark.parametrize("recompute", LEVELS)
def test_nothing_saved_is_a_tuple(recompute):
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    w = torch.randn(3 * WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    for graphs in (lowered(attention, recompute, x, w)[2], lowered(net, recompute, x, *weights())[2]):
        places = [n for n in graphs.backward.graph.nodes if n.op == "placeholder"]
        assert all(isinstance(n.meta["val"], torch.Tensor) for n in places)


def test_made_again_just_before_use():
    """Whatever the backward makes again is read before any of its own work goes on: one gathered weight at a time."""
    _, _, graphs = lowered(net, "full", torch.randn(ROWS, WIDTH, dtype=torch.float64), *weights())
    order = {n: i for i, n in enumerate(graphs.backward.graph.nodes)}
    tangent = min(i for n, i in order.items() if n.op == "placeholder" and "tangents" in n.name)
    gathers = nodes(graphs.backward, "all_gather")
    assert gathers
    assert all(order[n] > tangent for n in gathers)
    for node in graphs.backward.graph.nodes:
        if node.op == "call_function" and node.users and node not in _late(graphs.backward.graph):
            first = min(order[u] for u in node.users)
            between = [n for n, i in order.items() if order[node] < i < first]
            assert all(n not in _late(graphs.backward.graph) for n in between), node


def _late(graph):
    found = {n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name}
    for node in graph.nodes:
        if any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def test_random_numbers_are_not_drawn_twice():
    def noisy(x, w):
        with block("layers.0"):
            h = torch.rand_like(x @ w.t())
            x = (x @ w.t()) * h.exp()
        with block("after"):
            return x.square().sum()

    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    w = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.autograd.grad(noisy(x, w), [w])
    torch.manual_seed(3)
    _, grads, graphs = lowered(noisy, "full", x, w)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    assert not nodes(graphs.backward, "rand")


def test_saved_values_are_freed_as_the_backward_goes():
    """The backward is handed one list and empties it: no saved value outlives its last use."""
    from autopar.passes.lower import boxed

    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (a,)),))
    values = [torch.ones(2)]
    (out,) = boxed(torch.fx.GraphModule({}, graph))(values)
    assert out.tolist() == [-1, -1]
    assert values == []


def test_a_result_that_lies_otherwise_than_traced_can_still_be_viewed():
    """The backward of elu keeps its gradient's strides when run, and its input's when traced."""

    def heads(x, w):
        with block("layers.0"):
            q = F.elu((x @ w.t()).view(1, ROWS, 2, 2).transpose(1, 2))
            return q.contiguous().square().sum()

    torch.manual_seed(0)
    x = torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    w = torch.randn(WIDTH, WIDTH, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(heads(x, w), w)
    loss, grads, _ = lowered(heads, "none", x, w)
    torch.testing.assert_close(loss, heads(x, w).detach())
    torch.testing.assert_close(grads[0], expected)
