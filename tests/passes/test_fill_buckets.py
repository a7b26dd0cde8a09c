"""passes/fill_buckets.py: gradients made in their bucket, the same numbers, and copies where nothing else will do."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.fill_buckets import FillBuckets
from autopar.passes.merge_collectives import MergeCollectives
from autopar.passes.reuse import Reuse
from autopar.runtime.moves import move
from tests.golden_files import check_golden
from tests.passes.local_group import one_rank

aten = torch.ops.aten
X, Y, B = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path, "dp"):
        yield


def reduced(x):
    return move(x, "dp", "P", "I")


def check(fn, *values):
    """Merged, filled and reused: the same results, twice, and inputs as they were."""
    module = MergeCollectives().run(make_fx(fn, tracing_mode="fake")(*values))
    for rewrite in (FillBuckets().run, Reuse().run):
        module = rewrite(module)
        kept = [v.clone() for v in values]
        for _ in range(2):
            torch.testing.assert_close(module(*values), fn(*kept), rtol=0, atol=0)
        torch.testing.assert_close(list(values), kept, rtol=0, atol=0)
    return module


def targets(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def gradients(x, y, b):
    """A product, transposed twice as autograd's are, small values between, and a sum."""
    return (
        reduced((x @ y).t().t()),
        reduced(b.sin()),
        reduced(b.cos()),
        reduced((y.t() @ x.t()).view(-1)),
        reduced((x @ y).sum([0], True).view(5)),
        reduced(b.tanh()),
    )


def test_golden(request):
    module = check(gradients, X, Y, B)
    lines = [n.format_node() for n in module.graph.nodes if n.op == "call_function"]
    check_golden(request, "fill_buckets_of_six_gradients", "\n".join(lines))


def test_what_can_be_is_made_in_the_bucket():
    found = targets(check(gradients, X, Y, B))
    assert found.count(aten.mm.out) == 2
    assert aten.sum.IntList_out in found
    assert found.count(aten.cat.out) == found.count(aten.copy_.default) == 1
    assert aten.cat.default not in found


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y, b: (reduced((x @ y).t()), reduced(b.sin())),  # another order
        lambda x, y, b: (reduced(z := x @ y), z.sin(), reduced(b.sin())),  # read elsewhere
        lambda x, y, b: (reduced(z := x @ y), reduced(z)),  # in the bucket twice
        lambda x, y, b: (reduced((x @ y)[:2]), reduced(b.sin())),  # a part of what is made
        lambda x, y, b: (reduced(x), reduced(b.sin())),  # handed in
    ],
)
def test_refuses(fn):
    found = targets(check(fn, X, Y, B))
    assert aten.cat.default in found
    assert aten.mm.out not in found


def test_a_sum_of_two_gradients():
    found = targets(check(lambda x, y, b: (reduced(x @ y + x @ y), reduced(b)), X, Y, B))
    assert aten.add.out in found
