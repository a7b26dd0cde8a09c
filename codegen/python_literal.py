"""Values as Python text that means them again: numbers, torch's own things, short tensors.

Enters: what stands in a graph beside its nodes. Leaves: text that an exported file evaluates, where `torch` is imported
and `DEVICE` says where tensors are made. Refused: tensors that are long or have no values, with None.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LITERAL_ELEMENTS = 1024
"""The longest tensor that is written out."""
BUILTINS = frozenset(("float", "complex"))
"""The names that numbers are written with."""


def number_text(value: complex) -> str:
    """NaN and the infinities have no literal, and complex literals lose the signs of zeros."""
    if isinstance(value, complex):
        return f"complex({number_text(value.real)}, {number_text(value.imag)})"
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f'float("{float(value)}")'
    return repr(value)


def value_text(value: Any) -> str:
    """A value without nodes and tensors in it."""
    if isinstance(value, (int, float, complex)):
        return number_text(value)
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


def tensor_text(tensor: Tensor) -> str | None:
    """None: it has more than `LITERAL_ELEMENTS` elements, or no values here."""
    if tensor.numel() > LITERAL_ELEMENTS or tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    if not tensor.numel():
        return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype}, device=DEVICE)"
    return f"torch.tensor({_nested(tensor.tolist())}, dtype={tensor.dtype}, device=DEVICE)"


def _nested(value: Any) -> str:
    return f"[{', '.join(map(_nested, value))}]" if isinstance(value, list) else number_text(value)
