"""models/sizes.py: the published sizes, and building by name."""

import time

import pytest
import torch

from autopar import models

PUBLISHED = [name for name in models.names() if models.SIZES[name].published]


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_match_the_published_count(name):
    size = models.SIZES[name]
    difference = abs(count(models.build(name, batch=1, seq=8)) - size.published)
    if size.resolution == 1:
        assert difference == 0
    else:  # the source rounds; what we build must round to what it prints
        assert difference <= size.resolution / 2


def test_the_largest_is_built_on_meta_at_once():
    start_s = time.perf_counter()
    model = models.build("llama3-405b", batch=1, seq=8192)
    assert time.perf_counter() - start_s < 2
    (ids, labels), _ = model.example_inputs()
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers(), ids, labels))
    assert ids.shape == (1, 8192)


TINY = [name for name in models.names() if name.endswith("-tiny")]


def test_each_kind_of_model_has_a_tiny_one():
    assert {type(models.SIZES[name].config) for name in TINY} == {type(s.config) for s in models.SIZES.values()}


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_tiny_models_learn_on_the_cpu(name):
    torch.manual_seed(0)
    model = models.build(name, batch=2, seq=16, device="cpu")
    args, kwargs = model.example_inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(*args, **kwargs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.log(torch.tensor(512.0)).item()) < 0.3  # small weights: nearly uniform guesses
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("name", ["vit-tiny", "resnet-tiny", "t5-tiny", "unet-tiny"])
def test_the_other_tiny_models_learn_too(name):
    torch.manual_seed(0)
    model = models.build(name, batch=2, seq=16, device="cpu")
    args, kwargs = model.example_inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(*args, **kwargs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_models_of_images_take_any_seq():
    (images, labels), _ = models.build("resnet50", batch=4, seq=999).example_inputs()
    assert images.shape == (4, 3, 224, 224)
    assert labels.shape == (4,)


def test_dtype_and_changes_reach_the_model():
    model = models.build("llama3-8b", batch=1, seq=8, dtype=torch.bfloat16, layers=2)
    assert len(model.layers) == model.config.layers == 2
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.width == 4096


def test_refuses_unknown_names_and_impossible_sizes():
    with pytest.raises(ValueError, match="unknown model 'llama3_8b': did you mean 'llama3-8b'"):
        models.build("llama3_8b", batch=1, seq=8)
    with pytest.raises(ValueError, match="batch 0 and seq 8 must both be at least 1"):
        models.build("gpt2", batch=0, seq=8)
    with pytest.raises(ValueError, match="exceeds the 1024 positions"):
        models.build("gpt2", batch=1, seq=2048)
    with pytest.raises(TypeError, match="depth"):
        models.build("gpt2", batch=1, seq=8, depth=3)
