"""autopar/load_model.py: names lead to modules and batches of the sizes asked for; the others are refused."""

import json

import pytest
import torch

from autopar.load_model import ModelNameError, load_model

FACTORIES = """
import torch


class Net(torch.nn.Module):
    def __init__(self, batch=4):
        super().__init__()
        self.batch, self.linear = batch, torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)

    def example_inputs(self):
        return (torch.zeros(self.batch, 3),), {}


def sized(batch=4):
    return Net(batch)


class Namespace:
    @staticmethod
    def triple():
        return Net(), (torch.ones(2, 3),), {"x": None}


def wrong():
    return "no model"


def broken():
    raise RuntimeError("the factory's own")


number = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module `toys_of_<test>` in the working folder, and its name."""
    name = f"toys_of_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    (tmp_path / f"{name}_bad.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_the_zoo_is_on_meta_with_the_sizes_asked_for():
    found = load_model("llama3-8b", batch=4, seq=16)
    assert [tuple(t.shape) for t in found.args] == [(4, 16)] * 2
    assert all(p.is_meta for p in found.module.parameters())
    assert found.name == "llama3-8b"


@pytest.mark.parametrize(("device", "seq"), [("meta", 128), ("cpu", 64)])
def test_the_zoo_has_default_sizes(device, seq):
    found = load_model("gpt-tiny", batch=None, seq=None, device=device)
    assert tuple(found.args[0].shape) == (8, seq)
    assert {p.device.type for p in found.module.parameters()} == {device}


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpt-tyni", {}, r"unknown model 'gpt-tyni': did you mean 'gpt-tiny'\?"),
        ("gpt-tiny", {"seq": 4096}, "seq 4096 exceeds the 128 positions"),
        ("no.such.module:f", {}, "there is no module 'no'"),
        ("json:no_such_factory", {}, "module 'json' has no 'no_such_factory'"),
        (":f", {}, "model ':f'"),
        ("hf:/no/such/folder", {}, "there is no file '/no/such/folder'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name, sizes, message):
    with pytest.raises(ModelNameError, match=message):
        load_model(name, batch=sizes.get("batch"), seq=sizes.get("seq"))


def test_a_factory_makes_the_model_and_its_batch(factories):
    assert tuple(load_model(f"{factories}:Net", batch=None, seq=None).args[0].shape) == (4, 3)
    assert tuple(load_model(f"{factories}:sized", batch=6, seq=None).args[0].shape) == (6, 3)
    found = load_model(f"{factories}:Namespace.triple", batch=None, seq=None)
    assert torch.equal(found.args[0], torch.ones(2, 3))
    assert found.kwargs == {"x": None}


@pytest.mark.parametrize(
    ("attribute", "batch", "message"),
    [
        ("wrong", None, r"wrong\(\) returned str, neither a module"),
        ("number", None, "number is int, not a function"),
        ("Namespace.triple", 2, "the factory takes no 'batch', so --batch cannot be kept"),
    ],
)
def test_a_factory_that_makes_no_model_is_refused(factories, attribute, batch, message):
    with pytest.raises(ModelNameError, match=message):
        load_model(f"{factories}:{attribute}", batch=batch, seq=None)


def test_errors_of_the_factory_are_its_own(factories):
    with pytest.raises(RuntimeError, match="the factory's own"):
        load_model(f"{factories}:broken", batch=None, seq=None)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_model(f"{factories}_bad:sized", batch=None, seq=None)


_GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64, "vocab_size": 11}
_VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 8,
    "image_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 8,
}


@pytest.mark.parametrize(
    ("config", "kind", "shapes"),
    [
        (_GPT2, "GPT2LMHeadModel", {"input_ids": (4, 48), "labels": (4, 48)}),
        (_GPT2 | {"architectures": ["GPT2Model"]}, "GPT2Model", {"input_ids": (4, 48)}),
        (_GPT2 | {"architectures": ["os"]}, "GPT2LMHeadModel", {"input_ids": (4, 48), "labels": (4, 48)}),
        (_VIT, "ViTForImageClassification", {"pixel_values": (4, 3, 16, 16), "labels": (4,)}),
    ],
)
def test_a_transformers_config_needs_no_weights(tmp_path, config, kind, shapes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model(f"hf:{tmp_path}", batch=4, seq=48)
    assert type(found.module).__name__ == kind
    assert {name: tuple(t.shape) for name, t in found.kwargs.items()} == shapes
    assert all(p.is_meta for p in found.module.parameters())


def test_a_transformers_config_can_have_real_weights(tmp_path):
    (tmp_path / "gpt.json").write_text(json.dumps(_GPT2))
    found = load_model(f"hf:{tmp_path / 'gpt.json'}", batch=2, seq=8, device="cpu")
    assert torch.isfinite(found.module(**found.kwargs).loss)


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "no_such_type"}', "[]"])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNameError, match=r"no config transformers can read") as caught:
        load_model(f"hf:{tmp_path}", batch=None, seq=None)
    assert "\n" not in str(caught.value)
