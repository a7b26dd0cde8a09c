"""The normalize pass: golden text, equal numbers, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autopar.dump import program_text
from tests.golden_files import check_golden
from tests.rules.prove import program_of

LOGITS = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
LABELS = torch.tensor([1, -100, 4, 0, -100, 2])


def run(fn: Callable, *tensors: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """The normalised program's output and its ops."""
    program = program_of(fn, tensors)
    values = dict(zip(program.placeholders, tensors, strict=True))
    for node in program.calls:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    return values[program.output.args[0][0]], [str(n.target) for n in program.calls]


def test_golden_mean_cross_entropy(request: pytest.FixtureRequest) -> None:
    program = program_of(lambda x, y: F.cross_entropy(x, y), (LOGITS, LABELS))
    check_golden(request, "normalize_cross_entropy", program_text(program))


def test_a_mean_loss_becomes_a_sum_and_a_global_count() -> None:
    value, ops = run(lambda x, y: F.cross_entropy(x, y), LOGITS, LABELS)
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, LABELS), rtol=1e-14, atol=0)
    assert "aten.div.Tensor" in ops
    assert "aten.ne.Scalar" in ops


def test_a_sum_loss_is_left_alone() -> None:
    _, ops = run(lambda x, y: F.cross_entropy(x, y, reduction="sum"), LOGITS, LABELS)
    assert ops == ["aten.cross_entropy_loss.default"]


def test_dropout_that_drops_nothing_goes() -> None:
    _, ops = run(lambda x: F.dropout(x, 0.5, training=False) * 2, LOGITS)
    assert ops == ["aten.mul.Tensor"]


def test_a_factory_that_reads_only_a_dtype_reads_nothing() -> None:
    value, ops = run(lambda x: x.new_ones(3) + 1, LOGITS)
    assert value.dtype == torch.float64
    assert ops[0] == "aten.full.default"
