"""models/resnet.py: the same numbers as transformers' ResNet, wide blocks, batch statistics, refusals."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autopar.models import ResNet, ResNetConfig

CONFIG = ResNetConfig(blocks=(2, 1), bottleneck=True, width=8, classes=5, image=16)

KINDS = (torch.nn.Conv2d, torch.nn.BatchNorm2d)


def make(**changes):
    torch.manual_seed(0)
    return ResNet(replace(CONFIG, **changes), batch=3, dtype=torch.float64)


@pytest.mark.parametrize(("bottleneck", "factor"), [(False, 1), (True, 1), (True, 2)])
def test_logits_loss_and_gradients(bottleneck, factor):
    model = make(bottleneck=bottleneck, width_factor=factor)
    (images, labels), kwargs = model.example_inputs()
    assert (images.shape, images.dtype, labels.shape, kwargs) == ((3, 3, 16, 16), torch.float64, (3,), {})
    logits = model(images)
    assert logits.shape == (3, 5)
    loss = model(images, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels), rtol=1e-12, atol=0)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.stem.norm.num_batches_tracked == 2


def test_a_wide_block_is_wider_inside_only():
    block, wide = make().stages[1][0], make(width_factor=2).stages[1][0]
    assert [tuple(c.conv.weight.shape[:2]) for c in block.convs] == [(16, 32), (16, 16), (64, 16)]
    assert [tuple(c.conv.weight.shape[:2]) for c in wide.convs] == [(32, 32), (32, 32), (64, 32)]


@pytest.mark.parametrize("bottleneck", [False, True])
def test_equals_transformers_resnet(bottleneck):
    from transformers.models.resnet.configuration_resnet import ResNetConfig as ReferenceConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    torch.manual_seed(1)
    out = [32, 64] if bottleneck else [8, 16]
    kind = "bottleneck" if bottleneck else "basic"
    config = ReferenceConfig(embedding_size=8, hidden_sizes=out, depths=[2, 1], layer_type=kind, num_labels=5)
    reference = ResNetForImageClassification(config).double().train()
    model = make(bottleneck=bottleneck)
    ours, theirs = [m for m in model.modules() if isinstance(m, KINDS)], _shortcuts_last(reference)
    for mine, other in zip(ours, theirs, strict=True):
        mine.load_state_dict(other.state_dict())
    model.head.load_state_dict(reference.classifier[1].state_dict())
    (images, _), _ = model.example_inputs()
    torch.testing.assert_close(model(images), reference(images).logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours[-1].running_var, theirs[-1].running_var, rtol=1e-10, atol=1e-12)


def _shortcuts_last(reference):
    """Their convolutions and norms in our order: a block's shortcut after its layers."""
    found = [m for m in reference.resnet.embedder.modules() if isinstance(m, KINDS)]
    for stage in reference.resnet.encoder.stages:
        for layer in stage.layers:
            found += [m for m in layer.layer.modules() if isinstance(m, KINDS)]
            found += [m for m in layer.shortcut.modules() if isinstance(m, KINDS)]
    return found


def test_refuses_wide_basic_blocks():
    with pytest.raises(ValueError, match="basic blocks have no inner width"):
        make(bottleneck=False, width_factor=2)
