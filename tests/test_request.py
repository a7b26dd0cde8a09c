"""autopar/request.py: offloading is what a CPU does anyway, and is refused by name elsewhere."""

import pytest
import torch
from torch import nn

import autopar


def planned(device, offload):
    x = torch.ones(4, 4)
    mesh = autopar.Mesh("2", device=device)
    return autopar.plan(nn.Linear(4, 4), mesh, example_args=(x,), pin={"dp": 2, "zero": 3, "offload": offload})


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_states_of_a_cpu_are_in_host_memory(offload):
    assert planned("cpu", offload).offload == offload


def test_refuses_elsewhere():
    assert planned("h100-sxm", "none").offload == "none"
    with pytest.raises(autopar.PlanError, match=r"offload='optimizer'.*h100-sxm"):
        planned("h100-sxm", "optimizer")
