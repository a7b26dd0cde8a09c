"""Norms, softmaxes and cross entropies of long rows as lowered graphs: compiled by `kernels.py` beside the models.

Nothing is computed: values are fake. Rows are 8192 tokens; the weight of a norm takes a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from autopar.codegen.group import FusedGroup
from autopar.passes.fuse import Fuse
from tests.codegen.lowered import lower_function

ROWS = 8192
HIDDEN, LONG = (5120, 8192, 12288, 16384), (32768, 65536)
VOCABULARIES = (50257, 128256)


def layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.layer_norm(total, (x.shape[-1],), weight, bias)


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return total, (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 0.125, -1)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def smoothed(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, label_smoothing=0.1)


FUNCTIONS = {
    "residual sum and layer norm": (layer_norm, "xxww", HIDDEN),
    "residual sum and RMS norm": (rms_norm, "xxw", HIDDEN),
    "scaled softmax": (softmax, "x", (*HIDDEN[2:], *LONG)),
    "cross entropy": (cross_entropy, "xt", VOCABULARIES),
    "smoothed cross entropy": (smoothed, "xt", VOCABULARIES[1:]),
}
"""Name -> function, its inputs (x: rows, w: a number a column, t: a target a row), widths."""


def groups(dtype: torch.dtype) -> Iterator[tuple[str, int, str, FusedGroup]]:
    """(function, width, which graph, group)."""
    for name, (function, inputs, widths) in FUNCTIONS.items():
        for width in widths:
            with FakeTensorMode():
                made = {
                    "x": lambda n=width: torch.empty(ROWS, n, dtype=dtype, requires_grad=True),
                    "w": lambda n=width: torch.empty(n, dtype=dtype, requires_grad=True),
                    "t": lambda n=width: torch.empty(ROWS, dtype=torch.int64),
                }
                graphs = lower_function(function, tuple(made[kind]() for kind in inputs))
                for which in ("forward", "backward"):
                    for group in Fuse().run(getattr(graphs, which)).modules():
                        if isinstance(group, FusedGroup):
                            yield name, width, which, group
