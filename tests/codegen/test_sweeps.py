"""Rows wider than a program: a loop over the columns for each round of reductions."""

import pytest
import torch

from autopar.codegen.group import run
from autopar.codegen.sweeps import online_pairs, read_again_bytes, sweeps
from autopar.codegen.tiles import extra_bytes
from tests.codegen.compare import check_group
from tests.codegen.traced import one_kernel

aten = torch.ops.aten
WIDTH = 40_003
"""No program holds such a row, and it is a multiple of nothing."""
ROWS = {
    "softmax": (lambda x, w, b: aten._softmax(x * w, -1, False), 2),
    "log_softmax": (lambda x, w, b: (aten._log_softmax(x + b, -1, False), (x + b).amax(-1)), 2),
    "layer_norm": (lambda x, w, b: (*aten.native_layer_norm(x, [WIDTH], w, b, 1e-5), x * 2), 3),
    "rms_norm": (lambda x, w, b: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w, 2),
    "softmax_backward": (lambda x, w, b: aten._softmax_backward_data(x * w, x.abs(), -1, x.dtype), 2),
    "log_sum_exp": (lambda x, w, b: x.amax(-1) + (x - x.amax(-1, keepdim=True)).exp().sum(-1).log(), 1),
    "sums": (lambda x, w, b: (x.sum(-1), (x * w).amin(-1, keepdim=True)), 1),
    "spread": (lambda x, w, b: (x * x).sum(-1, keepdim=True).expand(3, WIDTH) + 0.0, 2),
}
"""(function, how many loops it takes)."""


@pytest.mark.parametrize("name", ROWS)
def test_equals_its_ops(name):
    function, loops = ROWS[name]
    for dtype in (torch.float32, torch.bfloat16):
        row = torch.empty(WIDTH, dtype=dtype)
        group = one_kernel(function, torch.empty(3, WIDTH, dtype=dtype), row, row)
        assert group.code.printed.tile.swept
        assert group.code.printed.text.count("for start in range") == loops
        check_group(group)


def test_a_row_that_begins_with_nothing():
    """Tiles of -inf alone change neither maximum nor sum; a row of nothing else is not a number, as in eager."""
    group = one_kernel(lambda x: (aten._softmax(x, -1, False), x.exp().sum(-1)), torch.empty(3, WIDTH))
    x = torch.randn(3, WIDTH)
    x[0, :15_000] = float("-inf")
    x[1, 5_000:] = float("-inf")
    x[2] = float("-inf")
    found, _ = run(group.code, (x,), interpret=True)
    torch.testing.assert_close(found, x.softmax(-1), equal_nan=True, rtol=1e-5, atol=1e-9)


def test_a_maximum_and_its_sum_take_one_sweep():
    kernel = one_kernel(ROWS["softmax"][0], torch.empty(3, WIDTH), *[torch.empty(WIDTH)] * 2).code.kernel
    ((total, most),) = online_pairs(kernel).items()
    first, last = sweeps(kernel)
    assert first.reduces == (most, total)
    assert first.online == ((most, total),)
    assert last.reduces == ()
    assert last.stores == (0,)
    assert read_again_bytes(kernel) == 3 * WIDTH * 4  # the rows; the weight stays in the cache


def test_a_sum_with_another_maximum_takes_its_own_sweep():
    def function(x, y):
        return (x - y.amax(-1, keepdim=True)).exp().sum(-1)

    group = one_kernel(function, torch.empty(2, WIDTH), torch.empty(2, WIDTH))
    assert online_pairs(group.code.kernel) == {}
    assert len(sweeps(group.code.kernel)) == 3  # the last one has no loop: it ends the row
    check_group(group)


@pytest.mark.parametrize("width", [12_288, 16_384])
def test_rows_of_models_are_held(width):
    """The widths of the largest models take no second sweep: each number is read once."""
    row = torch.empty(width, dtype=torch.bfloat16)
    for name in ("softmax", "rms_norm"):
        group = one_kernel(ROWS[name][0], torch.empty(64, width, dtype=torch.bfloat16), row, row)
        assert not group.code.printed.tile.swept
        assert extra_bytes(group.code.kernel, group.code.printed.tile) == 0
