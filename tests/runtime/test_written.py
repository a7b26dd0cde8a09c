"""What forward writes to parameters and buffers is kept for the next step, and not seen by the backward of this one."""

import copy

import pytest
import torch
from torch import nn

import autopar


class Written(nn.Module):
    """Each block reads a buffer before it moves it, and its weight after it was made smaller."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        for block in self.blocks:
            before = self.mean.clone()
            with torch.no_grad():
                block.weight.mul_(0.95).clamp_(-0.2, 0.2)
            x = x + (block(x * before) * before).tanh()
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x.square().mean()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_steps_equal_eager(recompute):
    torch.manual_seed(0)
    eager, x = Written().double(), torch.randn(4, 6, dtype=torch.float64)
    m = autopar.parallelize(
        copy.deepcopy(eager), autopar.Mesh("1", device="cpu"), example_args=(x,), pin={"recompute": recompute}
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (m, eager)]
    for _ in range(3):
        for model in (m, eager):
            model(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = m.full_state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
