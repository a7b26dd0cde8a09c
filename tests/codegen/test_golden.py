"""The printed source of a dozen groups; `--update-golden` rewrites it."""

import pytest
import torch
import torch.nn.functional as F

from autopar.runtime import random_ops  # noqa: F401 - registers torch.ops.autopar
from tests.codegen.traced import one_kernel, with_gradients
from tests.golden_files import check_golden

aten = torch.ops.aten
WIDE, ROW = (64, 128), (128,)


def rotary(x, cos, sin):
    a, b = x.transpose(1, 2).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def norm_backward(g, x, mean, rstd, w, residual):
    dx, dw, db = aten.native_layer_norm_backward(g, x, [128], mean, rstd, w, w, [True, True, True])
    return residual + dx, dw, db


def rms(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


GROUPS = {
    "bias_gelu": (lambda x, b: F.gelu(x + b), (WIDE, ROW)),
    "residual_layer_norm": (
        lambda x, y, w, b: aten.native_layer_norm(x + y, [128], w, b, 1e-5),
        (WIDE, WIDE, ROW, ROW),
    ),
    "layer_norm_backward": (norm_backward, (WIDE, WIDE, (64, 1), (64, 1), ROW, WIDE)),
    "rms_norm": (rms, (WIDE, ROW)),
    "odd_rms_norm": (rms, ((5, 77), (77,))),
    "swiglu": (lambda x, y: F.silu(x) * y, (WIDE, WIDE)),
    "swiglu_backward": (with_gradients(lambda x, y: F.silu(x) * y, 2), (WIDE, WIDE, WIDE)),
    "rotary": (rotary, ((2, 16, 4, 32), (16, 16), (16, 16))),
    "softmax": (lambda x: aten._softmax(x * 0.125, -1, False), (WIDE,)),
    "wide_softmax": (lambda x: aten._softmax(x * 0.125, -1, False), ((64, 128256),)),
    "log_softmax_backward": (lambda g, y: aten._log_softmax_backward_data(g, y, -1, torch.bfloat16), (WIDE, WIDE)),
    "bias_gradient": (lambda g, x: ((y := aten.gelu_backward(g, x, approximate="tanh")), y.sum(0)), (WIDE, WIDE)),
    "causal_mask": (lambda x: (x.masked_fill(torch.ones(64, 128).triu(1) > 0, float("-inf"))).exp(), (WIDE,)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_printed_source(request, name):
    function, shapes = GROUPS[name]
    group = one_kernel(function, *(torch.empty(s, dtype=torch.bfloat16) for s in shapes))
    check_golden(request, f"kernels/{name}", group.code.printed.text)


def test_dropout_source(request):
    def dropped(x, y, key):
        return x + torch.ops.autopar.dropout(y, key, 0.1)

    group = one_kernel(dropped, torch.empty(WIDE), torch.empty(WIDE), torch.tensor([1, 0]))
    check_golden(request, "kernels/dropout", group.code.printed.text)
