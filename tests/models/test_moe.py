"""models/moe.py: dense experts equal transformers' Mixtral; with enough slots so do those; late tokens are dropped."""

from dataclasses import replace

import pytest
import torch

from autopar.models import MoE, MoEConfig
from autopar.models.moe import Mixture

CONFIG = MoEConfig(
    vocab=61, context=12, layers=2, heads=4, kv_heads=2, width=16, ff_width=24, rotary_base=10000.0, experts=4
)
CPU = torch.device("cpu")


def make(**changes):
    torch.manual_seed(0)
    return MoE(replace(CONFIG, **changes), batch=3, seq=7, dtype=torch.float64)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_logits_loss_and_gradients(capacity):
    model = make(capacity=capacity)
    (ids, labels), kwargs = model.example_inputs()
    assert (ids.shape, labels.shape, kwargs) == ((3, 7), (3, 7), {})
    assert model(ids).shape == (3, 7, 61)
    model(ids, labels).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_equals_transformers_mixtral():
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(1)
    config = MixtralConfig(**sizes, **heads, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    config._experts_implementation = "batched_mm"  # the one that computes in float64
    reference = MixtralForCausalLM(config).double().eval()
    model = make()
    state = {}
    for name, value in reference.state_dict().items():
        name = name.removeprefix("model.").replace("mlp.gate.weight", "mlp.router.weight")
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.transpose(1, 2).chunk(2, dim=-1)
            state |= {name.replace("gate_up_proj", "gate_proj.weight"): gate}
            state |= {name.replace("gate_up_proj", "up_proj.weight"): up}
        elif name.endswith("experts.down_proj"):
            state[f"{name}.weight"] = value.transpose(1, 2)
        else:
            state[name] = value
    model.load_state_dict(state)
    (ids, _), _ = model.example_inputs()
    with torch.no_grad():  # transformers normalises in float32
        torch.testing.assert_close(model(ids), reference(ids).logits, rtol=1e-5, atol=1e-6)


def test_with_a_slot_for_every_token_slots_equal_dense():
    dense, slots = make(), make(capacity=2.0)  # 4 experts, 2 of them a token: 2.0 is room for a whole sequence
    args, _ = dense.example_inputs()
    torch.testing.assert_close(slots(*args), dense(*args), rtol=1e-12, atol=1e-12)


def test_tokens_beyond_the_capacity_are_dropped_first_choices_last():
    config = replace(CONFIG, capacity=1.0)
    layer = Mixture(config, CPU, torch.float64)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0], layer.router.weight[1, 0] = 2.0, 1.0  # everybody wants expert 0, then expert 1
    x = torch.rand(1, 8, 16, dtype=torch.float64) + 0.5
    out, _ = layer(x)
    room = 4  # 8 tokens x 2 / 4 experts
    assert (out[0, :room].abs().amax(dim=1) > 0).all()
    assert out[0, room:].abs().max() == 0
    alone, _ = layer(x[:, :room])  # fewer tokens have less room
    assert alone[0, 2:].abs().max() == 0


def test_a_sequence_does_not_take_the_slots_of_another():
    layer = Mixture(replace(CONFIG, capacity=0.5), CPU, torch.float64)
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    together, _ = layer(x)
    torch.testing.assert_close(together[1:2], layer(x[1:2])[0], rtol=1e-12, atol=1e-14)


def test_balance_is_one_when_even_and_grows_to_the_number_of_experts():
    layer = Mixture(CONFIG, CPU, torch.float64)
    with torch.no_grad():
        layer.router.weight.zero_()
        assert layer(torch.randn(2, 6, 16, dtype=torch.float64))[1].item() == pytest.approx(1.0)
        layer.router.weight[:2] = 100.0
        assert layer(torch.ones(2, 6, 16, dtype=torch.float64))[1].item() == pytest.approx(2.0)  # 2 of 4 experts do all


def test_only_every_second_layer_has_experts():
    model = make(every=2, layers=4)
    assert [isinstance(layer.mlp, Mixture) for layer in model.layers] == [False, True, False, True]


def test_refuses_more_experts_a_token_than_there_are():
    with pytest.raises(ValueError, match="top_k 5 must be between 1 and the 4 experts"):
        make(top_k=5)
