"""Small models of four families in float64, and one global batch of each; the same on every rank."""

import functools

import torch

BATCH, SEQ, VOCAB = 8, 8, 64


def build(name):
    """Biases and norms are drawn, too: zeros and ones would hide what is done to them."""
    torch.manual_seed(0)
    model = _BUILDERS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def inputs(name, batch=BATCH, seq=SEQ, seed=3):
    """(args, kwargs) of a training call; no token is a padding token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (batch, seq), generator=generator)
    labels = torch.randint(1, VOCAB, (batch, seq), generator=generator)
    return ((), {"input_ids": ids, "labels": labels}) if name.startswith("hf-") else ((ids, labels), {})


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def _gpt(tied=False):
    from autopar.models import GPT, GPTConfig

    return GPT(GPTConfig(vocab=VOCAB, context=16, layers=2, heads=4, width=32, ff_width=64, tied=tied))


def _llama(kv_heads=2):
    from autopar.models import Llama, LlamaConfig

    return Llama(
        LlamaConfig(vocab=VOCAB, context=16, layers=2, heads=4, kv_heads=kv_heads, width=32, ff_width=48),
    )


def _hf_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=16, **dropout))


def _hf_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes))


_BUILDERS = {
    "gpt": _gpt,
    "gpt-tied": functools.partial(_gpt, tied=True),
    "llama": _llama,
    "hf-gpt2": _hf_gpt2,
    "hf-llama": _hf_llama,
}
