"""passes/reuse.py: fewer copies, the same numbers, and nothing written that somebody still reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.merge_collectives import ALL_REDUCE, WAIT
from autopar.passes.overlap import Overlap
from autopar.passes.reuse import IN_PLACE, Reuse
from autopar.runtime.moves import move
from tests.golden_files import check_golden
from tests.passes.local_group import one_rank

aten = torch.ops.aten


def traced(fn, *values):
    module = make_fx(fn, tracing_mode="fake")(*values)
    module.graph.eliminate_dead_code()
    return module


def targets(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def check(fn, *values):
    """The pass's graph, run on fresh inputs: the same results, and inputs as they were."""
    module = Reuse().run(traced(fn, *values))
    kept = [v.clone() for v in values]
    torch.testing.assert_close(module(*values), fn(*kept), rtol=0, atol=0)
    torch.testing.assert_close(list(values), kept, rtol=0, atol=0)
    return module


X, W, B = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)


def test_a_product_takes_its_bias_in_place():
    module = check(lambda x, w, b: ((x @ w) + b).sin(), X, W, B)
    assert aten.add_.Tensor in targets(module)


def test_a_copy_that_nobody_changes_is_dropped():
    module = check(lambda x, w: x @ w.clone(), X, W)
    assert aten.clone.default not in targets(module)


def test_a_copy_that_is_handed_out_stays():
    for fn in (lambda x: x.clone(), lambda x: x.clone().view(9), lambda x: (x.clone().t(), x.sin())):
        assert aten.clone.default in targets(check(fn, X))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x + w,  # handed in
        lambda x, w: (y := x.sin(), y + w),  # handed out
        lambda x, w: (y := x.sin(), y.t() + w)[1] + y,  # a view is written, the memory read later
        lambda x, w: (y := x.sin(), y.view(9), y + w)[1:],  # a view is handed out
        lambda x, w: (y := x.sin(), y + 1, y.cos())[1:],  # read later
        lambda x, w: x[0].sin() + w,  # grows
        lambda x, w: x.sin().to(torch.int32) + w,  # another dtype
        lambda x, w: (y := x.split(1, 0), y[0] + 1, y[1])[1:],  # an item of a tuple
        lambda x, w: (y := x.sin(), parts := y.split(1, 0), y + 1, parts[1].cos())[2:],  # a part is read later
    ],
)
def test_refuses(fn):
    module = check(fn, X, W)
    first = next(t for t in targets(module) if "add" in str(t))
    assert first is aten.add.Tensor


def test_the_second_operand_of_a_sum_serves_too():
    module = check(lambda x, w: x + w.sin(), X, W)
    assert targets(module) == [aten.sin.default, aten.add_.Tensor]
    module = check(lambda x, w: x - w.sin(), X, W)
    assert targets(module)[-1] is aten.sub.Tensor
    check(lambda x: (y := x.sin()) + y, X)


def test_golden(request, tmp_path):
    """Buckets are reduced where they are made; what the user hands in is copied first."""

    def fn(a, b):
        c = torch.cat([a.clone(), b])
        return move(c, "dp", "P", "I").view(2, -1), move(a, "dp", "P", "I")

    with one_rank(tmp_path, "dp"):
        module = check(fn, X, W)
        assert targets(module).count(IN_PLACE[ALL_REDUCE]) == 1
        assert targets(module).count(ALL_REDUCE) == 1
        lines = [n.format_node() for n in module.graph.nodes if n.op == "call_function"]
        check_golden(request, "reuse_of_a_bucket", "\n".join(lines))


def test_what_is_being_sent_is_not_written(tmp_path):
    """The last reader of a value stands before the wait for what sends it."""

    def fn(a):
        y = a.sin()
        sent = move(y, "dp", "P", "S0", ((3,), (3,)))
        return y + 1, sent.cos()

    with one_rank(tmp_path, "dp"):
        module = Overlap().run(traced(fn, X))
        order = [t for t in targets(module) if t in (aten.add.Tensor, WAIT)]
        assert order == [aten.add.Tensor, WAIT]
        assert aten.add.Tensor in targets(Reuse().run(module))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_any_chain_gives_the_same_numbers(steps, outputs):
    ops = (
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: a - b,
        lambda a, b: a.t(),
        lambda a, b: a.clone(),
        lambda a, b: a.sin(),
        lambda a, b: torch.cat(a.split(1, 0)[::-1]),
        lambda a, b: a.split([1, 2], 0)[1].sum(0) + b,
    )

    def fn(x, w):
        values = [x, w]
        for op, i, j in steps:
            values.append(ops[op](values[i % len(values)], values[j % len(values)]))
        return tuple(values[-1 - (k % len(values))] for k in range(outputs + 1))

    check(fn, X.double(), W.double())
