"""torch.autograd.grad inside forward becomes the ops of the backward: values and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from autopar.capture import call_program, capture
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.norm, self.body = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6), body
        self.conv, self.step = nn.Conv1d(4, 6, 3, padding=1), nn.Parameter(torch.tensor(0.1))
        self.double()

    def net(self, x: Tensor) -> Tensor:
        return self.norm(self.two(torch.tanh(self.one(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def penalty(m: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = grad(m.net(x).square().sum(), x, create_graph=True)  # by the name it was imported under
    return (g.norm(dim=-1) - 1).square()


def second_derivative(m: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = m.two(F.silu(m.one(x)))  # (torch's own third derivative of layer_norm is not that of its formula)
    first = grad(y, x, torch.ones_like(y), create_graph=True)[0]
    return grad(first[:, 0].sum(), x, create_graph=True)[0] + y


def inner_steps(m: Net, x: Tensor) -> Tensor:
    w, b = m.one.weight, m.one.bias
    for _ in range(2):
        g = torch.autograd.grad(F.linear(x, w, b).square().mean(), {"w": w, "b": b}, create_graph=True)
        w, b = w - m.step * g["w"], b - m.step * g["b"]
    return F.linear(x, w, b)


def through_parts_and_writes(m: Net, x: Tensor) -> Tensor:
    h = m.net(x)
    left, right = h.chunk(2, -1)
    y = torch.cat([left * right, left.exp()], -1)
    y[:, 1] *= 2
    g = torch.autograd.grad(
        [y.square().sum(), left.sum()], [h, right], [torch.tensor(2.0).double(), None], create_graph=True
    )
    return g[0] + F.pad(g[1], (0, 3))


def of_images(m: Net, x: Tensor) -> Tensor:
    z = x.view(-1, 1, 6).repeat(1, 4, 1).requires_grad_()
    h = F.avg_pool1d(F.leaky_relu(m.conv(z), 0.2), 2).softmax(1).amax(-1)
    return torch.autograd.grad(h.square().sum(), z, create_graph=True)[0].flatten(1)


def without_gradient_of_its_own(m: Net, x: Tensor) -> Tensor:
    h = m.net(x)
    with torch.no_grad():
        with torch.enable_grad():
            z, other = h.detach().requires_grad_(), torch.ones(2).requires_grad_()
            g, nothing = torch.autograd.grad(m.two(F.gelu(m.one(z))).square().sum(), (z, other), allow_unused=True)
            assert nothing is None
            (zero,) = torch.autograd.grad(z.sum(), (other,), materialize_grads=True)
    return h - g + zero.sum()


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def through_a_function(m: Net, x: Tensor) -> Tensor:
    h = m.one(x)
    return torch.autograd.grad(Half.apply(h).sum(), h, create_graph=True)[0] + Half.apply(h)


BODIES = (
    penalty, second_derivative, inner_steps, through_parts_and_writes, of_images, without_gradient_of_its_own,
    through_a_function,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_values_and_gradients_are_eagers(body: Callable[[Net, Tensor], Tensor]) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Net(body)
    program = capture(model, (x.clone(),), {})
    assert not any("autopar::grad" in str(n.target) for n in program.calls)
    state = program.state | {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    expected, found = model(x.clone()), call_program(program, (x.clone(),), {}, state)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    for name, p in model.named_parameters():
        mine = state[name].grad
        if p.grad is None or not p.grad.any():
            assert mine is None or not mine.any(), name
        else:
            torch.testing.assert_close(mine, p.grad, rtol=1e-11, atol=1e-12, msg=name)


def unused(m: Net, x: Tensor) -> Tensor:
    return torch.autograd.grad(m.one(x).sum(), m.step)[0]


def random(m: Net, x: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    return torch.autograd.grad(F.dropout(m.net(z), 0.5).sum(), z, create_graph=True)[0]


@pytest.mark.parametrize(("body", "said"), [(unused, "not have been used"), (random, "taken through this")])
def test_what_has_no_such_ops_is_refused_at_its_line(body: Callable[[Net, Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said) as error:
        capture(Net(body), (torch.ones(4, 6, dtype=torch.float64),), {})
    assert __file__ in str(error.value)


def test_torch_is_as_it_was() -> None:
    before = torch.autograd.grad.__code__
    capture(Net(penalty), (torch.ones(4, 6, dtype=torch.float64),), {})
    assert torch.autograd.grad.__code__ is before
