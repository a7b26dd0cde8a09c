"""models/llama.py: shapes, loss, grouped heads, and the same numbers as transformers' Llama."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.models import Llama, LlamaConfig
from autopar.models.llama import rotary_table, rotate

CONFIG = LlamaConfig(vocab=61, context=12, layers=2, heads=4, kv_heads=2, width=32, ff_width=48)


def make(**changes):
    torch.manual_seed(0)
    return Llama(replace(CONFIG, **changes), batch=3, seq=7, dtype=torch.float64)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_have_the_batch_sequence_and_vocabulary(kv_heads):
    model = make(kv_heads=kv_heads)
    (ids, labels), kwargs = model.example_inputs()
    assert (ids.shape, labels.shape, kwargs) == ((3, 7), (3, 7), {})
    assert model(ids).shape == (3, 7, 61)
    assert model.layers[0].self_attn.k_proj.weight.shape == (8 * kv_heads, 32)


def test_loss_is_the_mean_cross_entropy_of_all_tokens():
    model = make()
    (ids, labels), _ = model.example_inputs()
    log_probability = torch.log_softmax(model(ids), dim=-1)
    expected = -sum(log_probability[b, s, labels[b, s]] for b in range(3) for s in range(7)) / 21
    loss = model(ids, labels)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_token_does_not_see_later_ones():
    model = make()
    (ids, _), _ = model.example_inputs()
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 61
    difference = (model(ids) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:4].max() == 0
    assert difference[4:].min() > 0


def test_a_rotated_product_depends_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = rotary_table(9, 8, 10000.0, q)
    turned_q = rotate(q.expand(1, 1, 9, 8), cos, sin)[0, 0]
    turned_k = rotate(k.expand(1, 1, 9, 8), cos, sin)[0, 0]
    # float32 angles, hence 1e-6
    torch.testing.assert_close(turned_q[5] @ turned_k[3], turned_q[8] @ turned_k[6], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned_q[0], q)
    assert (turned_q[5] @ turned_k[3] - turned_q[5] @ turned_k[4]).abs() > 1e-3


def test_a_tied_head_is_the_embedding():
    model = make(tied=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    (ids, labels), _ = model.example_inputs()
    model(ids, labels).backward()
    unused = sorted(set(range(61)) - set(ids.flatten().tolist()))
    assert model.embed_tokens.weight.grad[unused].abs().max() > 0  # these rows get a gradient through the head alone


def test_equals_transformers_llama():
    from transformers import LlamaConfig as ReferenceConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    reference = LlamaForCausalLM(
        ReferenceConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    reference = reference.double().eval()
    # transformers' norm computes in float32 whatever the dtype, which hides every difference below 1e-7.
    for parent in list(reference.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(32, eps=1e-5, dtype=torch.float64)
                norm.weight = nn.Parameter(torch.rand(32, dtype=torch.float64) + 0.5)
                setattr(parent, name, norm)
    model = make()
    model.load_state_dict({name.removeprefix("model."): value for name, value in reference.state_dict().items()})
    (ids, labels), _ = model.example_inputs()
    with torch.no_grad():
        logits = reference(ids).logits
        torch.testing.assert_close(model(ids), logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(ids, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="5 heads do not divide width 32"):
        make(heads=5)
    with pytest.raises(ValueError, match="3 key/value heads do not divide 4 heads"):
        make(kv_heads=3)
