"""passes/drop_views.py: the same numbers, outputs of their own, and no view that another one already is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.drop_views import VIEWS, DropViews

aten = torch.ops.aten
X, W = torch.arange(24.0).reshape(4, 6), torch.arange(12.0).reshape(6, 2)


def check(fn, *values):
    """The pass's graph gives the same values with the same strides; gives the views that it has left."""
    module = make_fx(fn, tracing_mode="fake")(*values)
    module.graph.eliminate_dead_code()
    expected = fn(*values)
    found = DropViews().run(module)(*values)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == b.stride()
    return [n for n in module.graph.nodes if n.target in VIEWS]


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: (x.view(2, 12).view(4, 6).sin(),), 0),
        (lambda x: (x.t().t().sin(),), 0),
        (lambda x: (x.expand(4, 6).sin(), x[:].sin(), x.unsqueeze(0).squeeze(0).sin()), 0),
        (lambda x: (x.view(2, 12).view(3, 8).sin(),), 1),
        (lambda x: (x.t().sin(), x.t().cos(), x.permute(1, 0).exp()), 1),
        (lambda x: (x[0].sin(), x.select(0, 0).cos(), x[1].exp()), 2),
        (lambda x: (x.t().reshape(3, 8).sin(),), 2),  # a copy in between
        (lambda x: (x[1:].view(18).view(3, 6)[1:].sin(),), 2),  # a slice of the slice
        (lambda x: (x.view(24)[6:].view(18).view(3, 6).sin(), x[1:].sin()), 3),  # another way to the same elements
    ],
)
def test_views(fn, left):
    assert len(check(fn, X)) == left


def test_of_two_values():
    assert len(check(lambda x, w: (x.t() @ x.view(4, 6), x @ w.t().t(), w.t().sin()), X, W)) == 2


def test_views_that_are_handed_out_stay_tensors_of_their_own():
    views = check(lambda x: (x.sin().view(24), (y := x.sin()).view(4, 6), y, x.t(), x.t(), x.view(4, 6)), X)
    assert len(views) == 5


def test_values_that_later_ops_make_are_apart():
    assert len(check(lambda x: (x.t().sin().t(), x.sin().t().t().cos(), x.cos().t()), X)) == 3


OPS = (
    lambda x: x.t() if x.dim() == 2 else x.flatten(0, 1) if x.dim() > 2 else x.view(1, -1),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(2, -1) if x.numel() % 2 == 0 else x,
    lambda x: x.reshape(x.shape[0], 1, -1),
    lambda x: x.transpose(0, -1),
    lambda x: x.unsqueeze(0),
    lambda x: x.squeeze(0),
    lambda x: x[1:] if x.dim() and x.shape[0] > 2 else x,
    lambda x: x[..., :-1] if x.dim() and x.shape[-1] > 2 else x,
    lambda x: x[:],
    lambda x: x.expand(x.shape),
    lambda x: x.expand(3, *x.shape) if x.dim() < 3 else x,
    lambda x: x.detach(),
    lambda x: x.sin(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, len(OPS) - 1), min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_chains(chains, out):
    def fn(x):
        ends = []
        for chain in chains:
            end = x
            for i in chain:
                end = OPS[i](end)
            ends.append(end if out else end.cos())
        return tuple(ends)

    check(fn, X)
