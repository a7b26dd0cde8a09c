"""Random graphs of pointwise ops, reductions, views and casts: fused and interpreted, forward and backward, they equal
eager.
"""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autopar.codegen import tiles
from autopar.codegen.group import FusedGroup
from autopar.passes.fuse import Fuse
from tests.codegen.traced import trace, with_gradients

UNARY = (
    torch.tanh,
    torch.sin,
    torch.sigmoid,
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
    torch.relu,
    lambda x: x * 0.5 + 1,
    lambda x: (x * x + 1).rsqrt(),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.softmax(-1),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: x.transpose(0, 1).sin().transpose(0, 1),
    lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
    lambda x: x.reshape(-1, x.shape[-1]).cos().view(x.shape),
    lambda x: x.sum(-1, keepdim=True) * 0.1 + x,
)
BINARY = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: x + y[:1, :1],
    lambda x, y: x / (y * y + 1),
)


ROWWISE = (
    lambda x: x.softmax(-1),
    lambda x: (x * 3).softmax(-1) * x,
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: (x * 2).log_softmax(-1),
    torch.sin,
)


@st.composite
def programs(draw, widths=(1, 2, 8, 13), unary=UNARY):
    """(function of two tensors and a weight, shape): some steps, each of values made before."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.sampled_from(widths)))
    steps = draw(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=7)
    )

    def function(x, y, w):
        made = [x, y * w]
        for op, i, j in steps:
            op %= len(unary) + len(BINARY)
            a, b = made[-1 - i % 2], made[j % len(made)]
            made.append(unary[op](a) if op < len(unary) else BINARY[op - len(unary)](a, b))
        return made[-1] + made[-2] + 0.1 * (x + y * w)

    return function, shape


SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],  # shrinking would trace thousands of graphs
}


@settings(max_examples=12, **SETTINGS)
@given(programs())
def test_equal_eager_forward_and_backward(program):
    check(program)


@settings(max_examples=8, **SETTINGS)
@given(programs((13, 19), ROWWISE))
def test_equal_eager_when_rows_are_swept(program):
    """As if a program held 8 columns at most: rows of 13 take two tiles, of 19 three, the last with a mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_fits", lambda *_: False)
        patch.setattr(tiles, "_swept", lambda kernel, _: tiles.Tile(1, 8, kernel.row_count, 1, 1, 4, swept=True))
        check(program)


def check(program):
    function, shape = program
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(s, generator=generator) for s in (shape, shape, shape[-1:], shape))
    both = with_gradients(function, 3)
    found = Fuse("interpreter").run(trace(both, *inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = found(*inputs)
    expected = both(*(t.double() for t in inputs))
    for out, reference in zip(results, expected, strict=True):
        assert (out - reference).abs().max() <= 2e-5 * reference.abs().max().clamp(min=1)
    assert all(m.mode == "interpreter" for m in found.modules() if isinstance(m, FusedGroup))
