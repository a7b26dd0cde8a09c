"""models/t5.py: the same numbers as transformers' T5, what each side sees, the loss."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autopar.models import T5, T5Config

CONFIG = T5Config(vocab=61, context=12, layers=2, heads=4, head_width=6, width=16, ff_width=24, buckets=8, far=16)


def make(**changes):
    torch.manual_seed(0)
    return T5(replace(CONFIG, **changes), batch=3, seq=7, dtype=torch.float64)


@pytest.mark.parametrize("gated", [False, True])
def test_loss_and_gradients(gated):
    model = make(gated=gated, tied=not gated)
    (ids, labels), _ = model.example_inputs()
    labels[0, 3:] = -100
    start = torch.zeros(3, 1, dtype=torch.int64)
    logits = model(ids, decoder_ids=torch.cat((start, labels[:, :-1].clamp(min=0)), dim=1))
    assert logits.shape == (3, 7, 61)
    loss = model(ids, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()), rtol=1e-12, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_the_decoder_looks_back_and_the_encoder_everywhere():
    model = make()
    (ids, target), _ = model.example_inputs()
    logits = model(ids, decoder_ids=target)
    changed = target.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 61
    difference = (logits - model(ids, decoder_ids=changed)).abs().amax(dim=(0, 2))
    assert difference[:4].max() == 0
    assert difference[4:].min() > 0
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    assert (logits - model(changed, decoder_ids=target)).abs().amax(dim=(0, 2)).min() > 0


@pytest.mark.parametrize("gated", [False, True])
def test_equals_transformers_t5(gated):
    from transformers.models.t5.configuration_t5 import T5Config as ReferenceConfig
    from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

    torch.manual_seed(1)
    reference = T5ForConditionalGeneration(
        ReferenceConfig(
            vocab_size=61, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
            relative_attention_max_distance=16, feed_forward_proj="gated-gelu" if gated else "relu",
            tie_word_embeddings=not gated, decoder_start_token_id=0,
        )
    ).double().eval()  # fmt: skip
    model = make(gated=gated, tied=not gated)
    state = reference.state_dict()
    ours = {"embedding.weight": state["shared.weight"], "lm_head.weight": state["lm_head.weight"]}
    for side in ("encoder", "decoder"):
        block = f"{side}.block"
        ours[f"{side}.bias.table.weight"] = state[f"{block}.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        ours[f"{side}.norm.weight"] = state[f"{side}.final_layer_norm.weight"]
        for i in range(2):
            places = {"attention": ("0.SelfAttention", "norm1", 0)}
            if side == "decoder":
                places["cross_attention"] = ("1.EncDecAttention", "cross_norm", 1)
            for mine, (theirs, norm, place) in places.items():
                for letter in "qkvo":
                    ours[f"{side}.layers.{i}.{mine}.{letter}_proj.weight"] = state[
                        f"{block}.{i}.layer.{theirs}.{letter}.weight"
                    ]
                ours[f"{side}.layers.{i}.{norm}.weight"] = state[f"{block}.{i}.layer.{place}.layer_norm.weight"]
            last = f"{block}.{i}.layer.{1 if side == 'encoder' else 2}"
            ours[f"{side}.layers.{i}.norm2.weight"] = state[f"{last}.layer_norm.weight"]
            names = {"gate_proj": "wi_0", "up_proj": "wi_1"} if gated else {"up_proj": "wi"}
            for mine, theirs in {**names, "down_proj": "wo"}.items():
                ours[f"{side}.layers.{i}.mlp.{mine}.weight"] = state[f"{last}.DenseReluDense.{theirs}.weight"]
    model.load_state_dict(ours)
    ids = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(4))  # longer than `far`
    with torch.no_grad():  # transformers normalises in float32
        expected = reference(input_ids=ids, decoder_input_ids=ids[:, :20]).logits
        torch.testing.assert_close(model(ids, decoder_ids=ids[:, :20]), expected, rtol=1e-5, atol=1e-5)


def test_refuses_neither_labels_nor_decoder_ids():
    with pytest.raises(ValueError, match="pass labels for a loss, or decoder_ids"):
        make()(torch.zeros(1, 4, dtype=torch.int64))
