"""Kernels build without a GPU for four architectures: no spills, 16-byte reads of aligned rows, few extra bytes."""

import pytest
import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget

from tests.bench.kernels import byte_ratio, compile_function, for_cuda
from tests.codegen.traced import one_kernel, with_gradients


def residual_norm(x, y, w, b):
    a = x + y
    return a, torch.ops.aten.native_layer_norm(a, [w.numel()], w, b, 1e-5)[0]


def gated(x, y):
    return F.silu(x) * y


def gelu_gated(x, y):
    return F.gelu(x, approximate="tanh") * y


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def kernels():
    wide, rows = empty(2048, 1024), empty(1024)
    return {
        "residual_norm": one_kernel(residual_norm, wide, wide, rows, rows).code,
        "gated": one_kernel(with_gradients(gated, 2), wide, wide, wide).code,
        "gelu_gated": one_kernel(
            with_gradients(lambda x, y: F.gelu(x, approximate="tanh") * y, 2), wide, wide, wide
        ).code,
        "odd": one_kernel(residual_norm, empty(33, 77), empty(33, 77), empty(77), empty(77)).code,
        "column_sums": one_kernel(lambda x, y: ((x * y).sum(0), x * y), wide, wide).code,
        "swept": one_kernel(lambda x, w: torch.softmax(x * w, -1), empty(64, 128256), empty(128256)).code,
        "dropout": one_kernel(
            lambda x, k: torch.ops.autopar.dropout(x * 2, k, 0.1), wide, torch.zeros(2, dtype=torch.int64)
        ).code,
    }


@pytest.mark.parametrize("name", ["residual_norm", "gated", "gelu_gated", "odd", "column_sums", "swept", "dropout"])
def test_no_spills_and_wide_reads(kernels, name):
    for number, launch in enumerate(kernels[name].printed.launches):
        made = for_cuda(kernels[name], launch, 90)
        assert made.spilled_bytes == 0
        if name != "odd" and number == 0:
            assert made.widest_load_bytes == 16
    assert byte_ratio(kernels[name]) <= (1.51 if name == "swept" else 1.05)  # such rows are read twice


@pytest.mark.parametrize("name", ["gated", "gelu_gated"])
def test_a_gated_unit_and_its_backward_move_each_number_once(kernels, name):
    """Two inputs, the gradient; the product and two gradients: one kernel for all."""
    assert sum(b.size_bytes for b in kernels[name].kernel.buffers) == 6 * 2048 * 1024 * 2


@pytest.mark.parametrize(("rows", "width"), [(5, 1), (5, 16), (5, 64), (5, 128), (2, 1024), (1, 2048)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_few_rows_do_not_spill(rows, width, capability):
    """One short sequence: steps of fewer elements than four warps have threads; long rows with many threads each."""

    def norm_backward(g, h, x, mean, rstd, w, r):
        g = g + h
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(g, x, [width], mean, rstd, w, w, [True, True, True])
        return dw, db, r + dx, (r + dx).sum(0, keepdim=True)

    many, row, each = empty(rows, width), empty(width), empty(rows, 1)
    code = one_kernel(norm_backward, many, many, many, each, each, row, many).code
    for launch in code.printed.launches:
        assert (launch.warps == 1) == (width <= 128)
        assert for_cuda(code, launch, capability).spilled_bytes == 0


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)])
def test_other_architectures(kernels, target):
    for name in ("residual_norm", "column_sums", "swept"):
        for launch in kernels[name].printed.launches:
            assert compile_function(kernels[name], launch, GPUTarget(*target)).asm
