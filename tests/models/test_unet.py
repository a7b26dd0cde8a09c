"""models/unet.py: shapes at every level, the loss, long skips, refusals."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autopar.models import UNet, UNetConfig
from autopar.models.unet import Attention, Residual

CONFIG = UNetConfig(image=8, width=8, multiples=(1, 2), blocks=1, attention=(4,), groups=4)


def make(**changes):
    torch.manual_seed(0)
    return UNet(replace(CONFIG, **changes), batch=3, dtype=torch.float64)


def test_noise_loss_and_gradients():
    model = make()
    (images, steps, noise), kwargs = model.example_inputs()
    assert (images.shape, images.dtype, steps.shape, noise.shape) == ((3, 3, 8, 8), torch.float64, (3,), images.shape)
    assert kwargs == {}
    predicted = model(images, steps)
    assert predicted.shape == images.shape
    loss = model(images, steps, noise)
    torch.testing.assert_close(loss, F.mse_loss(predicted, noise), rtol=1e-12, atol=0)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_every_result_on_the_way_down_returns_on_the_way_up():
    model = make()
    (images, steps, _), _ = model.example_inputs()
    taken = []
    for module in model.up:
        if isinstance(module, Residual):
            module.register_forward_pre_hook(lambda _, args: taken.append(tuple(args[0].shape[1:])))
    model(images, steps)
    # widths: the skip's channels are added to what comes from below; sides: 4, then 8
    assert taken == [(16 + 16, 4, 4), (16 + 8, 4, 4), (16 + 8, 8, 8), (8 + 8, 8, 8)]


def test_attention_stands_at_the_given_sides_and_in_the_middle():
    attends = [isinstance(m.attention, Attention) for m in make().modules() if isinstance(m, Residual)]
    assert attends == [False, True, True, True, False, False, True, False]  # down, up, middle
    assert sum(isinstance(m.attention, Attention) for m in make(attention=()).modules() if isinstance(m, Residual)) == 1


def test_the_time_step_matters():
    model = make()
    (images, steps, _), _ = model.example_inputs()
    assert (model(images, steps) - model(images, steps + 1)).abs().amax(dim=(1, 2, 3)).min() > 0


def test_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="an image of 9 pixels cannot be halved 1 times"):
        make(image=9)
    with pytest.raises(ValueError, match="3 groups do not divide width 8"):
        make(groups=3)
