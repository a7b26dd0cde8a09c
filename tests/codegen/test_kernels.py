"""Every kernel emitted for the zoo's language models equals its ATen ops, in Triton's interpreter."""

import pytest
import torch

from autopar.passes.fuse import Fuse
from tests.codegen.compare import check_group, groups
from tests.codegen.lowered import gpt, llama, lower_model

SIZES = ((2, 5, 24), (1, 1, 8), (2, 16, 64))
"""(batch, sequence, width): no multiple of a tile; one row; multiples of the tile."""


@pytest.fixture(scope="module")
def lowered():
    """Graphs by model, dtype and sizes; lowered once."""
    made = {}

    def get(model, dtype, sizes):
        key = (model, dtype, sizes)
        if key not in made:
            torch.manual_seed(0)
            module, inputs = model(*sizes)
            made[key] = lower_model(module.to(dtype), inputs)
        return made[key]

    return get


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", [gpt, llama])
def test_small_sizes(lowered, model, dtype):
    for sizes in SIZES[:1] if dtype == torch.float16 else SIZES:
        graphs = lowered(model, dtype, sizes)
        for graph in (graphs.forward, graphs.backward):
            found = groups(Fuse().run(graph))
            assert found
            for group in found:
                check_group(group)
