"""models/gpt.py: shapes, loss, head, and the same numbers as transformers' GPT-2."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from autopar.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab=61, context=12, layers=2, heads=4, width=32, ff_width=48)


def make(**changes):
    torch.manual_seed(0)
    return GPT(replace(CONFIG, **changes), batch=3, seq=7, dtype=torch.float64)


def test_logits_have_the_batch_sequence_and_vocabulary():
    model = make()
    (ids, labels), kwargs = model.example_inputs()
    assert (ids.shape, labels.shape, kwargs) == ((3, 7), (3, 7), {})
    assert model(ids).shape == (3, 7, 61)
    assert model(ids[:2, :5]).shape == (2, 5, 61)


def test_loss_is_the_mean_cross_entropy_of_all_tokens():
    model = make()
    (ids, labels), _ = model.example_inputs()
    log_probability = torch.log_softmax(model(ids), dim=-1)
    expected = -sum(log_probability[b, s, labels[b, s]] for b in range(3) for s in range(7)) / 21
    loss = model(ids, labels)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.dim() == 2)


def test_labels_are_the_next_tokens_and_every_call_gives_the_same():
    model = make()
    (ids, labels), _ = model.example_inputs()
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    assert all(torch.equal(a, b) for a, b in zip((ids, labels), make().example_inputs()[0], strict=True))


def test_a_token_does_not_see_later_ones():
    model = make()
    (ids, _), _ = model.example_inputs()
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 61
    difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:4].max() == 0
    assert difference[4:].min() > 0


def test_a_tied_head_is_the_embedding_and_gets_both_gradients():
    model = make(tied=True)
    assert model.lm_head.weight is model.token_embedding.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    (ids, labels), _ = model.example_inputs()
    model(ids, labels).backward()

    untied = make(tied=False)
    missing = untied.load_state_dict(model.state_dict())
    assert not missing.missing_keys
    untied(ids, labels).backward()
    total = untied.lm_head.weight.grad + untied.token_embedding.weight.grad
    torch.testing.assert_close(model.token_embedding.weight.grad, total, rtol=1e-10, atol=1e-15)


def test_fused_and_separate_projections_agree():
    fused, separate = make(fused_qkv=True), make(fused_qkv=False)
    state = {}
    for name, value in fused.state_dict().items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                state[name.replace("qkv_proj", f"{part}_proj")] = rows
        else:
            state[name] = value
    separate.load_state_dict(state)
    (ids, _), _ = fused.example_inputs()
    torch.testing.assert_close(fused(ids), separate(ids), rtol=1e-12, atol=1e-12)


def test_equals_transformers_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_positions=12, n_embd=32, n_layer=2, n_head=4, n_inner=48, attn_implementation="sdpa"
        )
    )
    reference = reference.double().eval()
    renames = (
        ("transformer.", ""),
        ("wte", "token_embedding"),
        ("wpe", "position_embedding"),
        ("h.", "layers."),
        ("ln_1", "norm1"),
        ("ln_2", "norm2"),
        ("ln_f", "norm"),
        ("attn.c_attn", "attention.qkv_proj"),
        ("attn.c_proj", "attention.o_proj"),
        ("mlp.c_fc", "mlp.up_proj"),
        ("mlp.c_proj", "mlp.down_proj"),
    )
    state = {}
    for name, value in reference.state_dict().items():
        transposed = ".c_" in name and value.dim() == 2  # transformers keeps these weights as [in, out]
        for old, new in renames:
            name = name.replace(old, new)
        state[name] = value.T if transposed else value
    model = make(fused_qkv=True)
    model.load_state_dict(state)
    (ids, labels), _ = model.example_inputs()
    with torch.no_grad():
        logits = reference(ids).logits
        torch.testing.assert_close(model(ids), logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(ids, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_refuses_more_tokens_than_positions():
    with pytest.raises(ValueError, match="seq 13 exceeds the 12 positions"):
        GPT(CONFIG, seq=13)
    with pytest.raises(ValueError, match="seq 13 exceeds the 12 positions"):
        make()(torch.zeros(1, 13, dtype=torch.int64))


def test_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="5 heads do not divide width 32"):
        make(heads=5)
