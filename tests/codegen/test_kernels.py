"""Every kernel emitted for the zoo's language models equals its ATen ops, in Triton's interpreter."""

import pytest
import torch

from autopar.passes.fuse import Fuse
from tests.bench import kernels_run
from tests.codegen.compare import check_group, groups
from tests.codegen.lowered import gpt, llama, lower_model
from tests.end_to_end.architectures import ARCHITECTURES

HALVES = (torch.bfloat16, torch.float16)
CASES = [
    pytest.param(model, dtype, sizes, marks=() if often else pytest.mark.slow, id=f"{model.__name__}-{dtype}-{sizes}")
    for model in (gpt, llama)
    for dtype in (torch.float32, *HALVES)
    for sizes, often in (
        ((2, 5, 24), dtype != torch.float16),  # no multiple of a tile
        ((1, 1, 8), False),  # one row
        ((2, 16, 64), False),  # multiples of the tile
    )
]
"""(model, dtype, (batch, sequence, width))."""


@pytest.mark.parametrize(("model", "dtype", "sizes"), CASES)
def test_kernels_equal_their_ops(model, dtype, sizes):
    torch.manual_seed(0)
    module, inputs = model(*sizes)
    graphs = lower_model(module.to(dtype), inputs)
    for graph in (graphs.forward, graphs.backward):
        found = groups(Fuse().run(graph))
        assert found
        for group in found:
            check_group(group)


OFTEN = (("zoo-unet", "float32"), ("llama", "bfloat16"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.name}-{dtype}", marks=() if (case.name, dtype) in OFTEN else pytest.mark.slow)
        for case in kernels_run.cases()
        if case.name in ARCHITECTURES and (dtype := str(case.dtype).removeprefix("torch.")) != "float16"
    ],
)
def test_kernels_of_architectures(case):
    """As a user's model is lowered; `tests/bench/kernels.md` has the table of all."""
    found = kernels_run.check(case, {})
    assert found.wrong == []
    assert min(found.kernels.values()) > 0
