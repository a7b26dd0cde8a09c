"""Examples: given, the model's own, made from a transformers config, or a TypeError that says what to pass."""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import call_program, capture, example_of
from autopar.capture.inputs import input_paths, separate
from autopar.errors import CaptureError


class Own(nn.Linear):
    def example_inputs(self):
        return (torch.ones(2, 3),), {}


def test_given_examples_win():
    args, kwargs = example_of(Own(3, 3), (1,), {"a": 2})
    assert (args, kwargs) == ((1,), {"a": 2})
    assert example_of(Own(3, 3), (), {"a": 2}) == ((), {"a": 2})


def test_models_own_example():
    args, kwargs = example_of(Own(3, 3))
    assert torch.equal(args[0], torch.ones(2, 3))
    assert kwargs == {}


def test_bad_example_inputs():
    class Bad(nn.Linear):
        def example_inputs(self):
            return torch.ones(2)

    with pytest.raises(TypeError, match=r"Bad\.example_inputs\(\) must return \(args, kwargs\)"):
        example_of(Bad(3, 3))


def test_missing_example():
    with pytest.raises(TypeError, match=r"Linear.*example_args.*example_kwargs.*example_inputs"):
        example_of(nn.Linear(3, 3))


def causal():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    ))  # fmt: skip


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ))  # fmt: skip


def vision():
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("build", "names"),
    [(causal, ["input_ids", "labels"]), (classifier, ["input_ids", "labels"]), (vision, ["pixel_values"])],
    ids=["causal", "classifier", "vision"],
)
def test_transformers_models_make_their_own(build, names):
    model = build()
    args, kwargs = example_of(model)
    assert (args, list(kwargs)) == ((), names)
    program = capture(model, args, kwargs)
    assert len([s for s in program.sources if s.kind == "input"]) == len(names)
    if build is causal:
        assert kwargs["input_ids"].shape == (8, 16)
        assert kwargs["input_ids"] is not kwargs["labels"]


def test_example_on_the_models_device():
    with torch.device("meta"):
        model = causal()
    assert example_of(model)[1]["input_ids"].is_meta


def test_separate_shares_nothing():
    x = torch.ones(3, requires_grad=True)
    (a, b), kwargs = separate(nn.Linear(3, 3), (x, x), {"n": 3, "deep": [x]})
    assert len({id(t) for t in (a, b, kwargs["deep"][0], x)}) == 4
    assert len({t.data_ptr() for t in (a, b, kwargs["deep"][0], x)}) == 4
    assert a.requires_grad
    assert kwargs["n"] == 3


def test_paths():
    tree = ((1, {"b": 2}), {"x": {"table": 3}, "y": [4]})
    assert input_paths(tree) == ["args[0]", "args[1]['b']", "kwargs['x']['table']", "kwargs['y'][0]"]


class Mode(enum.Enum):
    TANH = 1
    RELU = 2


class Told(nn.Linear):
    def forward(self, x, mode, *, scale, kind=None, rows=None):
        h = super().forward(x.to(kind)) * float(scale)
        return (h.tanh() if mode is Mode.TANH else h.relu())[rows]


@pytest.mark.parametrize("mode", Mode)
def test_dtypes_enums_slices_and_numbers_of_numpy_are_arguments(mode):
    model, x = Told(3, 3), torch.randn(4, 3, dtype=torch.float64)
    named = {"rows": slice(1, 3), "kind": torch.float32, "scale": np.float64(2.0)}
    program = capture(model, (x, mode), named)
    assert program.in_values[1] is mode
    assert torch.equal(call_program(program, (x, mode), named), model(x, mode, **named))


class Holder:
    def __init__(self, x):
        self.x = x


class Opened(nn.Linear):
    def forward(self, held):
        return super().forward(held.x)


def test_an_object_that_may_hold_tensors_is_refused():
    with pytest.raises(CaptureError, match="type that torch cannot take apart"):
        capture(Opened(3, 3), (Holder(torch.ones(2, 3)),), {})
