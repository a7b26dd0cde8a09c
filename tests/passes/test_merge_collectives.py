"""passes/merge_collectives.py: fewer collectives, the same numbers, and waits as late as they may stand."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.merge_collectives import ALL_REDUCE, WAIT, MergeCollectives, Overlap
from autopar.runtime.moves import move
from tests.passes.local_group import one_rank


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path, "dp", "tp"):
        yield


def reduced(x, axis="dp"):
    return move(x, axis, "P", "I")


def traced(fn, *values):
    return make_fx(fn, tracing_mode="fake")(*values)


def count(module, target):
    return sum(n.target is target for n in module.graph.nodes)


def gradients(a, b, c):
    """Three gradients of different shapes; work between them."""
    x = reduced(a * 2)
    y = reduced(b.exp())
    z = reduced((a.sum() + c).sin())
    return x, y, z


VALUES = torch.randn(3, 4), torch.randn(5), torch.randn(2, 1, 2)


def test_one_bucket_with_the_same_numbers():
    module = traced(gradients, *VALUES)
    assert count(module, ALL_REDUCE) == 3
    merged = MergeCollectives().run(module)
    assert count(merged, ALL_REDUCE) == count(merged, WAIT) == 1
    for got, expected in zip(merged(*VALUES), gradients(*VALUES), strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 3), (60, 2), (68, 2), (69, 1), (10**6, 1)])
def test_bucket_size(bucket_bytes, buckets):
    """A bucket closes once it holds that much: 48 + 20 bytes fill one of 60, and of 68; the 16 bytes left go alone."""
    module = MergeCollectives(bucket_bytes).run(traced(gradients, *VALUES))
    assert count(module, ALL_REDUCE) == buckets
    for got, wanted in zip(module(*VALUES), gradients(*VALUES), strict=True):
        torch.testing.assert_close(got, wanted)


def test_groups_and_dtypes_stay_apart():
    def mixed(a, b):
        return reduced(a), reduced(a.double()), reduced(b), reduced(b, "tp")

    module = MergeCollectives().run(traced(mixed, *VALUES[:2]))
    # here both axes name one group of one rank, so only the dtype tells them apart
    assert count(module, ALL_REDUCE) == 2


def test_what_the_graph_reads_is_not_held_back():
    def chained(a, b):
        x = reduced(a)
        return reduced(x * 2), reduced(b), x

    module = MergeCollectives().run(traced(chained, *VALUES[:2]))
    assert count(module, ALL_REDUCE) == 2
    for got, wanted in zip(module(*VALUES[:2]), chained(*VALUES[:2]), strict=True):
        torch.testing.assert_close(got, wanted)


def test_waits_stand_before_the_first_reader():
    def early(a, b):
        x = reduced(a)
        y = b.exp().sin()
        return x.cos(), y

    module = Overlap().run(traced(early, *VALUES[:2]))
    order = [n for n in module.graph.nodes if n.op != "placeholder"]
    wait = next(n for n in order if n.target is WAIT)
    at = order.index(wait)
    assert order[at + 1] in wait.users
    assert any("sin" in str(n.target) for n in order[:at]), "the wait stands before work that does not need it"
    for got, wanted in zip(module(*VALUES[:2]), early(*VALUES[:2]), strict=True):
        torch.testing.assert_close(got, wanted)
