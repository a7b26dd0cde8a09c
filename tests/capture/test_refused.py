"""Gradient hooks and backward() in forward would be lost in a graph: each is refused by name or line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * 2)
    return h * 3


def backpropagated(h: Tensor) -> Tensor:
    h.sum().backward()
    return h


@pytest.mark.parametrize(("body", "said"), [(hooked, "gradient hook"), (backpropagated, "torch.autograd.grad")])
def test_calls_in_forward_are_refused_at_their_line(body: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Net(body), (torch.ones(3, 4),), {})
    assert said in str(error.value)
    assert f"{__file__}:{body.__code__.co_firstlineno + 1}" in str(error.value)


def on_parameter(model: Net) -> None:
    model.fc.weight.register_hook(lambda g: g * 2)


def after_accumulation(model: Net) -> None:
    model.fc.weight.register_post_accumulate_grad_hook(lambda p: None)


def on_module(model: Net) -> None:
    model.fc.register_full_backward_hook(lambda module, before, after: None)


@pytest.mark.parametrize(
    ("register", "named"), [(on_parameter, "fc.weight"), (after_accumulation, "fc.weight"), (on_module, "fc (Linear)")]
)
def test_hooks_are_refused_by_name(register: Callable[[Net], None], named: str) -> None:
    model = Net()
    register(model)
    with pytest.raises(CaptureError, match="hook") as error:
        capture(model, (torch.ones(3, 4),), {})
    assert str(error.value).startswith(f"{named}: a ")


class Inner(torch.autograd.Function):
    """Takes a gradient inside its own forward, which stays whole."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(y.pow(3).sum(), y)
        ctx.save_for_backward(g)
        return g

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def test_a_function_may_differentiate_inside() -> None:
    program = capture(Net(Inner.apply), (torch.ones(3, 4),), {})
    assert any("autopar" in str(n.target) for n in program.calls)


def test_torch_is_as_it_was() -> None:
    before = torch.Tensor.register_hook, torch.autograd.grad
    with pytest.raises(CaptureError):
        capture(Net(hooked), (torch.ones(3, 4),), {})
    assert (torch.Tensor.register_hook, torch.autograd.grad) == before
