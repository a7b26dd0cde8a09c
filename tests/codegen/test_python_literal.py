"""codegen/python_literal.py: the text of a value, evaluated, is that value."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.python_literal import LITERAL_ELEMENTS, number_text, tensor_text, value_text

INF, NAN = float("inf"), float("nan")
NUMBERS = (3, True, 0.1, -0.0, 1e-320, 1e22, INF, -INF, NAN, 1 + 2j, complex(-0.0, NAN), complex(-INF, -0.0))


def evaluated(text):
    return eval(text, {"torch": torch, "DEVICE": torch.device("cpu")})


def bits(number):
    """Tells NaN and the signs of zeros."""
    parts = (number.real, number.imag)
    return type(number), [(math.isnan(p), 0.0 if math.isnan(p) else p, math.copysign(1, p)) for p in parts]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers(number):
    assert bits(evaluated(number_text(number))) == bits(number)


def test_values():
    for value in (None, "a", torch.float32, torch.strided, torch.contiguous_format, slice(0, 2), 1.5):
        assert evaluated(value_text(value)) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, NAN], [INF, -INF]]),
        torch.tensor([0.1, -0.0, 1e-45]),
        torch.tensor([0.1, NAN, 3.4], dtype=torch.bfloat16),
        torch.tensor([0.1, INF], dtype=torch.float8_e5m2),
        torch.tensor([complex(NAN, -INF), 1 - 2j]),
        torch.tensor([True, False]),
        torch.tensor([2**62, -1]),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.ones(2, 3).t(),
    ],
)
def test_tensors(tensor):
    found = evaluated(tensor_text(tensor))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert [bits(a) for a in found.flatten().tolist()] == [bits(b) for b in tensor.flatten().tolist()]


def test_tensors_that_are_not_written():
    assert tensor_text(torch.ones(LITERAL_ELEMENTS)) is not None
    assert tensor_text(torch.ones(LITERAL_ELEMENTS + 1)) is None
    assert tensor_text(torch.ones(2, device="meta")) is None
    assert tensor_text(FakeTensorMode().from_tensor(torch.ones(2))) is None
