"""autopar/compiled.py: lowered where gradients are wanted; what AOTAutograd refuses runs op by op, with one warning."""

import re
import warnings

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.launch import run_ranks_local


class Square(torch.autograd.Function):
    """Its backward leaves torch, which cannot be traced."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.numpy() * grad.numpy())  # the refused line


class Model(nn.Module):
    def __init__(self, function=None):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.function = nn.Linear(4, 3, dtype=torch.float64), function

    def forward(self, x):
        y = self.inner(x).tanh()
        return (y * y if self.function is None else self.function.apply(y)).sum()


def built(model):
    x = torch.randn(5, 4, dtype=torch.float64)
    return autopar.parallelize(model, autopar.Mesh("1"), example_args=(x,), backend="aot"), x


def compiled(m):
    (lowered,) = m._cache.values()
    return lowered.run


def test_a_refused_graph_warns_once_and_runs_op_by_op():
    m, x = built(Model(Square))
    with pytest.warns(UserWarning, match="backend='aot'") as caught:
        m(x).backward()
    (warning,) = caught
    text = str(warning.message)
    assert re.search(r"Square\.backward \(.*test_compiled\.py:\d+, `.*the refused line", text), text
    assert "\n" not in text
    grad, m.inner.weight.grad = m.inner.weight.grad.clone(), None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(x).backward()
    reference = Model()
    reference(x).backward()
    torch.testing.assert_close(grad, reference.inner.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(m.inner.weight.grad, grad)
    assert not compiled(m).graphs


def refused_in_a_rank(payload):
    m, x = built(Model(Square))
    try:
        m(x)
    except UserWarning as warning:
        return str(warning)[:13]
    return "ran op by op"


def test_in_ranks_of_tests_a_refused_graph_is_an_error():
    """See conftest: no test may pass because its ranks ran another program than the lowered one."""
    assert run_ranks_local("tests.test_compiled:refused_in_a_rank", 1, {}, 60.0) == ["backend='aot'"]


def test_without_gradients_nothing_is_lowered():
    m, x = built(Model())
    with torch.no_grad():
        m(x)
    assert not compiled(m).graphs
    m(x).backward()
    assert len(compiled(m).graphs) == 1
    m(x).backward()
    assert len(compiled(m).graphs) == 1


def test_a_parameter_frozen_and_thawed():
    """Which parameters take a gradient may change between calls."""
    m, x = built(Model())
    m.inner.bias.requires_grad_(False)
    m(x).backward()
    assert m.inner.bias.grad is None
    m.inner.bias.requires_grad_(True)
    m(x).backward()
    reference = Model()
    reference(x).backward()
    torch.testing.assert_close(m.inner.bias.grad, reference.inner.bias.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_inductor_compiles_both_graphs():
    """The same graphs, taken apart further, and one C++ kernel or more instead of the ops."""
    x = torch.randn(5, 4, dtype=torch.float64)
    m = autopar.parallelize(Model(), autopar.Mesh("1"), example_args=(x,), backend="inductor")
    reference = Model()
    for _ in range(2):
        loss, expected = m(x), reference(x)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for p, q in zip(m.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    assert compiled(m).graphs
    assert compiled(m).trained
    assert all(run is not compiled(m).eager for run in compiled(m).trained.values())
