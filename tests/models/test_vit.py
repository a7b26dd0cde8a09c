"""models/vit.py: the same numbers as transformers' ViT, shapes, loss, refusals."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autopar.models import ViT, ViTConfig

CONFIG = ViTConfig(image=8, patch=4, layers=2, heads=4, width=16, ff_width=24, classes=5)


def make(**changes):
    torch.manual_seed(0)
    return ViT(replace(CONFIG, **changes), batch=3, dtype=torch.float64)


def test_logits_loss_and_gradients():
    model = make()
    (images, labels), kwargs = model.example_inputs()
    assert (images.shape, images.dtype, labels.shape, kwargs) == ((3, 3, 8, 8), torch.float64, (3,), {})
    logits = model(images)
    assert logits.shape == (3, 5)
    loss = model(images, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels), rtol=1e-12, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_equals_transformers_vit():
    from transformers.models.vit.configuration_vit import ViTConfig as ReferenceConfig
    from transformers.models.vit.modeling_vit import ViTForImageClassification

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = ReferenceConfig(**sizes, image_size=8, patch_size=4, num_labels=5, layer_norm_eps=1e-6)
    reference = ViTForImageClassification(config).double().eval()
    model = make()
    theirs = reference.vit
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
        model.patch_embedding.load_state_dict(theirs.embeddings.patch_embeddings.projection.state_dict())
        model.class_token.weight.copy_(theirs.embeddings.cls_token)
        model.position_embedding.weight.copy_(theirs.embeddings.position_embeddings)
        model.norm.load_state_dict(theirs.layernorm.state_dict())
        model.head.load_state_dict(reference.classifier.state_dict())
        for mine, layer in zip(model.layers, theirs.layers, strict=True):
            a = layer.attention
            mine.attention.qkv_proj.weight.copy_(torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)))
            mine.attention.qkv_proj.bias.copy_(torch.cat((a.q_proj.bias, a.k_proj.bias, a.v_proj.bias)))
            mine.attention.o_proj.load_state_dict(a.o_proj.state_dict())
            mine.norm1.load_state_dict(layer.layernorm_before.state_dict())
            mine.norm2.load_state_dict(layer.layernorm_after.state_dict())
            mine.up_proj.load_state_dict(layer.mlp.fc1.state_dict())
            mine.down_proj.load_state_dict(layer.mlp.fc2.state_dict())
        (images, _), _ = model.example_inputs()
        torch.testing.assert_close(model(images), reference(images).logits, rtol=1e-10, atol=1e-10)


def test_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="patches of 3 do not divide an image of 8"):
        make(patch=3)
    with pytest.raises(ValueError, match="5 heads do not divide width 16"):
        make(heads=5)
