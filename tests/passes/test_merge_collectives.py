"""passes/merge_collectives.py: fewer collectives, the same numbers, and waits as late as they may stand."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.merge_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    MergeCollectives,
    MergeGathers,
    early_gathers,
)
from autopar.program import Record, set_record
from autopar.runtime.moves import load, move
from autopar.runtime.transfer import PART, AxisGroup, transfer
from tests.golden_files import check_golden
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


HALF = tuple(v.bfloat16() for v in VALUES)


@pytest.mark.parametrize(
    ("third", "casts"),
    [
        (lambda c: reduced(c).float(), 1),
        (lambda c: reduced(c).reshape(2, 2).t().float(), 1),
        (lambda c: reduced(c), 2),
        (lambda c: reduced(c).double(), 3),
        (lambda c: reduced(c)[:1].float(), 3),
        (lambda c: ((r := reduced(c)).float(), r), 3),
    ],
    ids=["alike", "turned", "one not", "one otherwise", "a part", "also read before"],
)
def test_parts_that_are_cast_alike_are_cast_as_one(third, casts):
    def cast(a, b, c):
        return reduced(a).float(), reduced(b).float(), third(c)

    merged = MergeCollectives().run(traced(cast, *HALF))
    assert count(merged, ALL_REDUCE) == 1
    assert count(merged, torch.ops.aten._to_copy.default) == casts
    for node in merged.graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default):
        assert node.meta["val"].dtype == node.args[0].meta["val"].dtype
    got, wanted = merged(*HALF), cast(*HALF)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_groups_and_dtypes_stay_apart():
    def mixed(a, b):
        return reduced(a), reduced(a.double()), reduced(b), reduced(b, "tp")

    module = MergeCollectives().run(traced(mixed, *VALUES[:2]))
    # here both axes name one group of one rank, so only the dtype tells them apart
    assert count(module, ALL_REDUCE) == 2


@pytest.mark.parametrize("index", [0, 1])
def test_every_rank_sees_the_same_buckets(index):
    """A whole gradient that goes on as a part of a sum: a copy on one rank, zeros on the others, one op on all."""

    def parts(a, b):
        group = AxisGroup("dp", 2, index)
        return transfer(reduced(a), group, "R", "P", ()), transfer(reduced(b), group, "R", "P", ())

    module = MergeCollectives().run(traced(parts, *VALUES[:2]))
    assert count(module, ALL_REDUCE) == 1
    assert count(module, PART) == 2
    for got, value in zip(module(*VALUES[:2]), VALUES, strict=False):
        torch.testing.assert_close(got, torch.zeros_like(value) if index else value)


def test_what_the_graph_reads_is_not_held_back():
    def chained(a, b):
        x = reduced(a)
        return reduced(x * 2), reduced(b), x

    module = MergeCollectives().run(traced(chained, *VALUES[:2]))
    assert count(module, ALL_REDUCE) == 2
    for got, wanted in zip(module(*VALUES[:2]), chained(*VALUES[:2]), strict=True):
        torch.testing.assert_close(got, wanted)


def scattered(x, dtype=torch.float32):
    """A shard's gradient, reduced in float32 and handed back in `dtype`."""
    return move(x.float(), "dp", "P", "S0", tuple((n,) for n in x.shape)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reduce_scatters_are_joined_through_views_and_casts(dtype):
    def fn(a, b, c):
        return scattered(a * 2, dtype), b.exp().sum(), scattered(b.sin(), dtype), scattered(c, dtype)

    module = MergeCollectives().run(traced(fn, *VALUES))
    assert count(module, REDUCE_SCATTER) == count(module, WAIT) == 1
    assert_equal(module, fn, VALUES)


def gathered(x):
    return move(x, "dp", "S0", "R", tuple((n,) for n in x.shape))


def blocks(x, *weights):
    """Two blocks, two weights each, cast before they are gathered."""
    for w, v in (weights[:2], weights[2:]):
        x = (x @ load(w, torch.float64, torch.float64, (("dp", "S0", "R", ((4,), (4,))),))).sin()
        x = x + load(v, torch.float64, torch.float64, (("dp", "S0", "R", ((4,),)),))
    return x


WEIGHTS = torch.randn(3, 4).double(), torch.randn(4, 4), torch.randn(4), torch.randn(4, 4), torch.randn(4)


def in_blocks(module):
    """Records as the pipeline leaves them: the first two gathers are of block 0."""
    seen = 0
    for node in module.graph.nodes:
        seen += node.target is ALL_GATHER
        if node.op == "call_function":
            set_record(node, Record(op=node.name, block=f"layers.{max(seen - 1, 0) // 2}"))
    return module


def test_the_gathers_of_a_block_are_joined():
    module = in_blocks(traced(blocks, *WEIGHTS))
    assert len(early_gathers(module.graph)) == 4
    merged = MergeGathers().run(module)
    assert count(merged, ALL_GATHER) == count(merged, WAIT) == 2
    assert_equal(merged, blocks, WEIGHTS)


def test_golden_gathers(request):
    merged = MergeGathers().run(in_blocks(traced(blocks, *WEIGHTS)))
    lines = [n.format_node() for n in merged.graph.nodes if n.op == "call_function"]
    check_golden(request, "merge_gathers_of_two_blocks", "\n".join(lines))


def test_a_full_bucket_is_closed():
    """48 bytes of the first weight fill a bucket."""
    merged = MergeGathers(bucket_bytes=48).run(in_blocks(traced(blocks, *WEIGHTS)))
    assert count(merged, ALL_GATHER) == 4
    assert_equal(merged, blocks, WEIGHTS)


def test_what_is_computed_first_is_gathered_alone():
    def fn(x, y):
        return gathered(x.sin()), gathered(y.cos()), gathered(x), gathered(y)

    module = traced(fn, *VALUES[:2])
    assert len(early_gathers(module.graph)) == 2
    merged = MergeGathers().run(module)
    assert count(merged, ALL_GATHER) == 3
    assert_equal(merged, fn, VALUES[:2])


def assert_equal(module, fn, values):
    for got, wanted in zip(module(*values), fn(*values), strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted)
