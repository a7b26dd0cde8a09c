"""torch.vmap in forward: plain operators with the values and gradients of the vmapped function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import call_program, capture
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.experts, self.body = nn.Linear(4, 4).double(), nn.Parameter(torch.randn(3, 4, 5).double()), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def over_experts(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(lambda w: torch.tanh(x @ w))(net.experts)


def over_samples(net: Net, x: Tensor) -> Tensor:
    return torch.func.vmap(net.fc, out_dims=1)(x)


def nested_and_named(net: Net, x: Tensor) -> Tensor:
    inner = torch.vmap(lambda a, b: {"s": a * b["w"].sum(), "n": a + 1}, in_dims=(0, {"w": None}))
    out = torch.vmap(inner, in_dims=(1, None), out_dims={"s": 0, "n": 1})(x, {"w": net.experts})
    return out["s"].sum(0) + out["n"].sum(1).sum()


@pytest.mark.parametrize("body", [over_experts, over_samples, nested_and_named], ids=lambda b: b.__name__)
def test_as_eager(body: Callable[[Net, Tensor], Tensor]) -> None:
    model, x = Net(body), torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = capture(model, (x,), {})
    assert all(isinstance(n.target, torch._ops.OpOverload) or "getitem" in str(n.target) for n in program.calls)
    state = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    expected, found = model(x), call_program(program, (x,), {}, state)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(state[name].grad, parameter.grad, rtol=1e-12, atol=1e-12)


def too_many(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(torch.sin)(x.expand(100, 6, 4).reshape(-1, 4))


def jacobian(net: Net, x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda v: net.fc(v).sin())(x[0])


@pytest.mark.parametrize(
    ("body", "said"), [(too_many, "600 slices"), (jacobian, "a gradient is taken inside forward in a way")]
)
def test_refused(body: Callable[[Net, Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said) as error:
        capture(Net(body), (torch.ones(6, 4, dtype=torch.float64),), {})
    assert "test_batched.py:" in str(error.value)
