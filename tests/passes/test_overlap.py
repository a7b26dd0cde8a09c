"""passes/overlap.py: waits as late as they may stand, gathers one ahead of the computation, the same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.merge_collectives import ALL_GATHER, REDUCE_SCATTER, WAIT, MergeGathers
from autopar.passes.overlap import Overlap, Prefetch
from autopar.runtime.moves import move
from tests.golden_files import check_golden
from tests.passes.local_group import one_rank
from tests.passes.test_merge_collectives import (
    VALUES,
    WEIGHTS,
    assert_equal,
    blocks,
    gathered,
    in_blocks,
    reduced,
    traced,
)


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path, "dp", "tp"):
        yield


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


def test_what_is_reduced_is_held_until_the_next_reduce_scatter_at_most():
    def scattered(a, b, c):
        return tuple(move(x.sin(), "dp", "P", "S0", ((4,), (3,))) for x in (a, b, c))

    values = tuple(torch.randn(4, 3) for _ in range(3))
    module = Overlap().run(traced(scattered, *values))
    starts = [n for n in module.graph.nodes if n.target is REDUCE_SCATTER]
    waits = [next(iter(n.users)) for n in starts]
    assert [n.target for n in waits] == [WAIT] * 3
    first, second, third = starts
    assert first < waits[0] < second < waits[1] < third < waits[2]
    assert waits[0].next is second, "it is waited for earlier than it must"
    assert_equal(module, scattered, values)


def order_of(module):
    """S for the start of a gather, W for a wait, . for other work, in order."""
    marks = {ALL_GATHER: "S", WAIT: "W", torch.ops.aten.sin.default: "."}
    return "".join(marks.get(n.target, "") for n in module.graph.nodes)


def test_each_gather_starts_before_the_one_before_it_is_waited_for():
    module = Overlap().run(in_blocks(traced(blocks, *WEIGHTS)))
    assert order_of(module) == "SW.SWSW.SW"
    ahead = Prefetch().run(module)
    assert order_of(ahead) == "SSW.SWSW.W"
    assert_equal(ahead, blocks, WEIGHTS)


def test_the_next_block_is_gathered_during_this_one(request):
    module = Overlap().run(MergeGathers().run(in_blocks(traced(blocks, *WEIGHTS))))
    assert order_of(module) == "SW.SW."
    ahead = Prefetch().run(module)
    assert order_of(ahead) == "SSW.W."
    assert_equal(ahead, blocks, WEIGHTS)
    lines = [n.format_node() for n in ahead.graph.nodes if n.op == "call_function"]
    check_golden(request, "prefetch_two_blocks", "\n".join(lines))


def test_further_ahead():
    module = Prefetch(ahead=3).run(Overlap().run(in_blocks(traced(blocks, *WEIGHTS))))
    assert order_of(module) == "SSSSW.WW.W"
    assert_equal(module, blocks, WEIGHTS)


def test_a_gather_that_is_read_after_later_ones_delays_none_of_them():
    """A block needs its own weights before the table that is gathered first, which is waited for last."""

    def fn(x, w, v):
        first, second = gathered(w), gathered(v)
        return (x @ second).sin() @ first, second

    values = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 3)
    module = Overlap().run(traced(fn, *values))
    assert order_of(module) == "SSW.W"
    assert order_of(Prefetch().run(module)) == "SSW.W"
    assert_equal(module, fn, values)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(1, 3), st.sampled_from((None, False, True)))
def test_any_order_of_gathers_and_readers(starts, reads, ahead, merged_late):
    """merged_late: are gathers joined after their waits were put in the order of their readers? None: not joined."""

    def fn(*shards):
        whole = {i: gathered(shards[i]) for i in starts}
        x = torch.ones(3, 3)
        for i in reads:
            x = (x @ whole[i]).sin()
        return (x,)

    shards = tuple(torch.randn(3, 3) for _ in range(4))
    module = traced(fn, *shards)
    module = Overlap().run(module) if merged_late else module
    module = module if merged_late is None else MergeGathers(bucket_bytes=80).run(module)
    assert_equal(Prefetch(ahead).run(Overlap().run(module)), fn, shards)


def test_what_a_gather_sends_may_be_read_before():
    """A cast shard stays where it is first read, though gathers around it move."""

    def fn(w, v):
        cast = v.double()
        read = cast.sin()
        return gathered(w.double()).sin(), gathered(cast), read

    shards = torch.randn(3, 4), torch.randn(3, 4)
    assert_equal(MergeGathers().run(traced(fn, *shards)), fn, shards)
    assert_equal(Prefetch().run(Overlap().run(traced(fn, *shards))), fn, shards)
