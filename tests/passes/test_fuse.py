"""passes/fuse.py: fused graphs equal the graphs that they are made of; nothing passes a wait or makes a circle."""

import pytest
import torch
import torch.nn.functional as F

from autopar.codegen.cluster import clusters, is_barrier
from autopar.codegen.group import FusedGroup
from autopar.passes.fuse import Fuse
from autopar.runtime.moves import move
from tests.codegen.lowered import gpt, llama, lower_function, lower_model
from tests.codegen.traced import trace
from tests.passes.local_group import one_rank


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "kernels"))


def fused(module):
    return [m for m in module.modules() if isinstance(m, FusedGroup)]


def names(group):
    return group.code.name


@pytest.mark.parametrize("model", [gpt, llama])
@pytest.mark.parametrize("mode", ["aten", "interpreter"])
def test_equals_the_graph(model, mode):
    torch.manual_seed(0)
    module, inputs = model(2, 5, 24)
    graphs = lower_model(module, inputs)
    places = [n.meta["val"] for n in graphs.forward.graph.nodes if n.op == "placeholder"]
    values = [*module.parameters(), *inputs]
    assert len(places) == len(values)
    with torch.no_grad():
        before = graphs.forward(*values)
        after = Fuse(mode).run(graphs.forward)(*values)
        saved = before[1:]
        backward = (*saved, torch.ones_like(before[0]))
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            Fuse(mode).run(graphs.backward)(*backward), graphs.backward(*backward), rtol=1e-4, atol=1e-5
        )


def chain(x, y, w):
    a = x + y
    h = F.layer_norm(a, (x.shape[-1],))
    return (F.gelu(h) * a) @ w


def test_a_norm_joins_what_stands_around_it():
    graphs = lower_function(chain, (torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 3, requires_grad=True)), 3)
    (group,) = clusters(graphs.forward.graph)
    assert [n.name for n in group.outputs] == ["mul"]
    found = Fuse().run(graphs.forward)
    assert sum(n.op == "call_function" and "mm" not in n.name for n in found.graph.nodes) == 1  # the getitem


def test_no_group_needs_its_own_result():
    """x * 2 and the exponential of a product of it: joined, the product would have to run before and after them."""

    def circle(x, w):
        a = x * 2
        return (a @ w).exp() + a

    graphs = lower_function(circle, (torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)), 2)
    (group,) = clusters(graphs.forward.graph)
    assert {n.name for n in group.members} == {"exp", "add"}


@pytest.fixture
def rank(tmp_path):
    with one_rank(tmp_path, "tp"):
        yield


def test_nothing_passes_a_wait(rank):
    def reduced(x, w):
        a = x * 3
        total = move((x @ w).sin(), "tp", "P", "R", ((4,), (4,)))
        return (a.exp() + 1, total * 2 + a)

    values = (torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    graphs = lower_function(reduced, values, 2)
    before = graphs.forward(*reversed(values))
    order = [n.name for n in graphs.forward.graph.nodes if is_barrier(n)]
    assert order
    found = Fuse("interpreter").run(graphs.forward)
    assert [n.name for n in found.graph.nodes if is_barrier(n)] == order
    for group in clusters(graphs.forward.graph):
        numbers = {n: i for i, n in enumerate(graphs.forward.graph.nodes)}
        places = [numbers[n] for n in group.members]
        waits = [i for n, i in numbers.items() if is_barrier(n) and "wait" in str(n.target)]
        assert not any(min(places) < w < max(places) for w in waits)
    torch.testing.assert_close(found(*reversed(values)), before)


def test_what_no_formula_is_known_for_stays():
    def odd(x):
        return torch.lgamma(x * 2 + 1) + 3 * x

    graphs = lower_function(odd, (torch.rand(5, 5, requires_grad=True),))
    found = Fuse().run(graphs.forward)
    assert any("lgamma" in n.name for n in found.graph.nodes)
    assert len(fused(found)) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bucket_is_cast_and_packed_by_one_kernel(ranks):
    """Parts of any shape, cast as they are or turned, in rows of a rank each (a reduce-scatter's) or in one."""

    def pack(*parts):
        cast = [x.t().to(torch.bfloat16).t() if x.dim() == 2 else x.to(torch.bfloat16) for x in parts]
        rows = [x.reshape([-1] if ranks == 1 else [ranks, -1]) for x in cast]
        return torch.cat(rows, len(rows[0].shape) - 1).reshape(-1)

    parts = torch.randn(6, 4), torch.randn(4), torch.randn(2, 5, 2)
    graph = trace(pack, *parts)
    found = Fuse("interpreter").run(graph)
    (group,) = fused(found)
    least = sum(x.numel() for x in parts) * (4 + 2)
    assert sum(b.size_bytes for b in group.code.kernel.buffers) == least
    torch.testing.assert_close(found(*parts), pack(*parts), rtol=0, atol=0)
    assert group.mode == "interpreter"
    assert not found.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)


def test_a_long_row_of_a_norm_is_two_ops_in_the_backward():
    """The input's gradient joins what stands around it; the sums over all rows are a kernel of their own, or ATen's."""

    def block(x, h, w, b):
        y = x + h
        return F.layer_norm(y, (20_011,), w, b) + y

    shapes = (2, 20_011), (2, 20_011), (20_011,), (20_011,)
    values = tuple(torch.randn(s, requires_grad=True) for s in shapes)
    graphs = lower_function(block, values)
    with torch.no_grad():
        loss, *saved = graphs.forward(*values)
        grads = graphs.backward(*saved, loss)
        found = Fuse("interpreter").run(graphs.forward)(*values)
        torch.testing.assert_close(found[0], loss, rtol=1e-4, atol=1e-4)
        backward = Fuse("interpreter").run(graphs.backward)
        for out, expected in zip(backward(*saved, loss), grads, strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    assert any("native_layer_norm_backward_add" in names(g) and g.code.printed.tile.swept for g in fused(backward))
