"""The norm of gradients over the stages of a pipeline, as torch's clipping asks for it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad

from autopar.runtime import pipeline_state
from autopar.runtime.launch import CAPTURE, run_ranks_local

PARAMS = {"first": [3.0, 4.0], "shared": [12.0], "last": [84.0, 0.0]}
OWNERS = {"first": (0,), "shared": (0, 1), "last": (1,)}


def norms(payload: dict[str, object]) -> list[float]:
    """On two ranks: the norm of 2 and of infinity, and the gradients after clipping to half of it."""
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.runtime.process_mesh import Line

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "pp"))
    line = Line(rank, (0, 1), mesh.get_group("pp"), mesh)
    module = nn.Module()
    for name, owners in OWNERS.items():
        if rank in owners:
            parameter = nn.Parameter(torch.zeros(len(PARAMS[name])))
            parameter.grad = torch.tensor(PARAMS[name])
            module.register_parameter(name, parameter)
    pipeline_state.count_norms_over_stages(module, line, OWNERS)
    largest = nn.utils.clip_grad_norm_(module.parameters(), 1e6, norm_type=math.inf)
    two = nn.utils.clip_grad_norm_(module.parameters(), 42.5)
    stranger = nn.Parameter(torch.zeros(2))
    stranger.grad = torch.tensor([6.0, 8.0])
    other = nn.utils.clip_grad_norm_([stranger], 1e6)  # of no pipeline
    return [float(largest), float(two), float(other), *[float(p.grad.abs().max()) for p in module.parameters()]]


def test_stages_are_added_up_and_shared_gradients_counted_once() -> None:
    first, second = run_ranks_local("tests.runtime.test_pipeline_state:norms", 2, {}, 60, preload=CAPTURE)
    total = math.sqrt(3**2 + 4**2 + 12**2 + 84**2)
    assert total == pytest.approx(85, abs=0.1)
    scale = 42.5 / (total + 1e-6)
    assert first == pytest.approx([84.0, total, 10.0, 4 * scale, 12 * scale])
    assert second == pytest.approx([84.0, total, 10.0, 12 * scale, 84 * scale])


def copies(payload: dict[str, object]) -> list[float]:
    """On two ranks, all parameters on both, in float64: the norm, and a gradient after clipping."""
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.runtime.process_mesh import Line

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "pp"))
    module = nn.Module()
    module.register_parameter("both", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    module.both.grad = torch.full((3,), 1 / 3, dtype=torch.float64)
    pipeline_state.count_norms_over_stages(
        module, Line(dist.get_rank(), (0, 1), mesh.get_group("pp"), mesh), {"both": (0, 1)}
    )
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    return [float(norm), float(module.both.grad[0])]


def test_a_rank_that_counts_no_gradient_clips_its_copies_alike() -> None:
    first, second = run_ranks_local("tests.runtime.test_pipeline_state:copies", 2, {}, 60, preload=CAPTURE)
    assert first == second
    assert first[0] == pytest.approx(math.sqrt(3) / 3, rel=1e-15)


def test_without_a_pipeline_torchs_own_norm_is_asked() -> None:
    assert pipeline_state._TORCHS is not pipeline_state._total_norm
    assert float(clip_grad._get_total_norm([torch.tensor([3.0, 4.0])])) == 5.0
