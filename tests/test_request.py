"""autopar/request.py: what can be offloaded, and what it is predicted to save and to cost."""

import json

import pytest
import torch
from torch import nn

import autopar
from autopar.cost import hardware


def planned(device, offload, zero=3):
    x = torch.ones(4, 4)
    mesh = autopar.Mesh("2", device=device)
    return autopar.plan(nn.Linear(4, 4), mesh, example_args=(x,), pin={"dp": 2, "zero": zero, "offload": offload})


@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_states_leave_the_device_for_the_host(device):
    kept, optimizer, parameters = (planned(device, word) for word in ("none", "optimizer", "parameters"))
    assert [p.offload for p in (kept, optimizer, parameters)] == ["none", "optimizer", "parameters"]
    states = [p.predicted["memory"]["parameters_gradients_optimizer"] for p in (kept, optimizer, parameters)]
    assert states == [20 / 2 * 16, 20 / 2 * 8, 0]
    assert "host" not in kept.predicted["memory"]
    assert optimizer.predicted["memory"]["host"] == parameters.predicted["memory"]["host"] == states[0]
    seconds = [p.predicted["breakdown_s"]["optimizer"] for p in (kept, optimizer, parameters)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_refuses_a_machine_whose_host_is_not_known(tmp_path):
    data = json.loads((hardware._PROFILES / "h100-sxm.json").read_text())
    del data["host_link_bytes_per_s"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert hardware.load_profile(str(path)).host_link_bytes_per_s == 0
    with pytest.raises(autopar.PlanError, match=r"pin offload: profile 'h100-sxm' has no host_link_bytes_per_s"):
        planned(str(path), "optimizer")
