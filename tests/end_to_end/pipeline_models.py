"""Models whose stages are cut in ways of their own, in float64: plain layers, ties, cross attention, long skips, other
inputs and outputs.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.end_to_end import small_models

LLAMA_LAYERS = 4


def build(name):
    torch.manual_seed(0)
    return _BUILDERS[name]().double() if name in _BUILDERS else small_models.build(name)


def inputs(name, batch=8, seed=3):
    """(args, kwargs); some of the labels are ignored, unequally many in every micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    if name == "unet":
        images = torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)
        noise = torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)
        return (images, torch.randint(0, 100, (batch,), generator=generator)), {"target": noise}
    if name == "mixed":
        x = torch.randn(batch, 6, 16, generator=generator, dtype=torch.float64)
        mask = torch.rand(batch, 6, generator=generator) > 0.3
        table = torch.randn(batch, 16, generator=generator, dtype=torch.float64)  # the batch's size, and no batch
        picks = torch.randint(0, batch, (6,), generator=generator)
        return (x, {"mask": mask, "scale": 0.5, "nothing": None}), {"extra": [table, picks], "flag": True}
    if name == "t5":
        ids, labels = (torch.randint(1, 64, (batch, 8), generator=generator) for _ in range(2))
        return (ids, labels), {}
    args, kwargs = small_models.inputs(name, batch, 8, seed)
    key = "labels" if kwargs else 1
    if kwargs:
        kwargs = {**kwargs, key: _ignored(kwargs[key], generator)}
    else:
        args = (args[0], _ignored(args[1], generator))
    return args, kwargs


def _ignored(labels, generator):
    many = torch.rand(labels.shape, generator=generator) < torch.linspace(0.0, 0.8, len(labels))[:, None]
    return labels.masked_fill(many, -100)


def loss_of(output):
    return output["loss"] if type(output) is dict else small_models.loss_of(output)


def _t5():
    from autopar.models import T5, T5Config

    return T5(T5Config(vocab=64, context=8, layers=2, heads=4, head_width=8, width=32, ff_width=48))


class _Noise(nn.Module):
    """The loss of a diffusion model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, times, target):
        return F.mse_loss(self.model(images, times), target)


def _unet():
    from autopar.models import UNet, UNetConfig

    return _Noise(UNet(UNetConfig(image=8, width=8, multiples=(1, 2), blocks=1, attention=(4,), groups=4)))


class _Mixed(nn.Module):
    """Nested arguments, None, a flag, a mask and a table of the batch's size; the last layer reads early values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(16) / 4)

    def forward(self, x, options, extra, flag=False):
        table, picks = extra
        keep = options["mask"][..., None]
        first = x
        early = None
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * keep + (self.bias if flag else 0.0)
            early = x if i == 0 else early
        x = x + table[picks] * options["scale"] + early * first
        return {"loss": (x * keep).square().sum() / keep.sum(), "states": x, "count": keep.sum()}


_BUILDERS = {"t5": _t5, "unet": _unet, "mixed": _Mixed}
