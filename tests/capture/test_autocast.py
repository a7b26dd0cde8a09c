"""A region under torch.autocast becomes casts in the graph; values, dtypes and gradients stay those of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import call_program, capture
from autopar.errors import CaptureError

HALF = torch.bfloat16


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.conv, self.lstm = nn.Linear(8, 8), nn.Conv1d(3, 3, 1), nn.LSTM(8, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            return self.body(self, x)


def linear(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.fc(x)) + net.fc.bias


def product(net: Net, x: Tensor) -> Tensor:
    return (x @ net.fc.weight).softmax(-1) @ net.fc.weight


def promoted(net: Net, x: Tensor) -> Tensor:
    return torch.cat([net.fc(x), x], -1)


def convolution(net: Net, x: Tensor) -> Tensor:
    return F.layer_norm(net.conv(x), (8,)).to(torch.float64)


def equation(net: Net, x: Tensor) -> Tensor:
    return torch.einsum("bsd,ed->bse", x, net.fc.weight)


def attention(net: Net, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(net.fc(x), x, x)


def inner_region_off(net: Net, x: Tensor) -> Tensor:
    h = net.fc(x)
    with torch.autocast("cpu", enabled=False):
        h = net.fc(h.float())
    return net.fc(h)


def written_in_place(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros(2, 3, 8)
    out[0] = net.fc(x)[0]
    return out.relu_()


def without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.fc(x)
    return net.fc(x) * scale


BODIES = [linear, product, promoted, convolution, equation, attention, inner_region_off, written_in_place,
          without_gradient]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_as_eager(body: Callable[[Net, Tensor], Tensor], dtype: torch.dtype) -> None:
    if dtype == torch.float64 and body is inner_region_off:
        dtype = torch.float32  # its cast is to float32
    model = Net(body).to(dtype)
    x = torch.randn(2, 3, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))
    program = capture(model, (x,), {})
    state = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    expected, found = model(x), call_program(program, (x,), {}, state)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (state[name].grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, state[name].grad), name
    casts = [n for n in program.calls if n.target is torch.ops.aten.to.dtype and n.args[1] is HALF]
    assert bool(casts) == (dtype == torch.float32)  # torch leaves float64 alone


def recurrent(net: Net, x: Tensor) -> Tensor:
    return net.lstm(x)[0]


def test_casts_inside_an_operator_are_refused_at_their_line() -> None:
    with pytest.raises(CaptureError, match="precision="):
        capture(Net(recurrent), (torch.zeros(2, 3, 8),), {})
