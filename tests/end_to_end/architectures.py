"""Small models of the families in transformers, and the zoo's own, each with one global batch; the same on every rank.

Sizes are the least at which every kind of layer of a family appears and two ranks divide heads, widths and vocabulary.
Dropout is off, but for `llama-lora-dropout`, whose masks one device (mesh `1`) and any plan draw alike.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import torch
from torch import nn

BATCH, SEQ, VOCAB, WIDTH, PIXELS = 4, 6, 32, 16, 8
SIDE = 16
"""Of images for networks that halve them three times: the statistics of a batch norm over few pixels are noise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A family. `module`: of transformers, imported once before the ranks part. `model`, `inputs`: in float32.

    `batch_dims`: of `parallelize`, for models with several batches that no op ties before the loss.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[tuple, dict]]
    module: str | None = None
    batch_dims: dict[str, int] | None = None

    @property
    def preload(self) -> tuple[str, ...]:
        return () if self.module is None else (f"transformers.models.{self.module}.modeling_{self.module}",)


def build(name: str, dtype: torch.dtype, training: bool) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name].model().to(dtype).train(training)


def inputs(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[tuple, dict]:
    """(args, kwargs) of a call with labels; floating-point tensors in `dtype`."""
    args, kwargs = ARCHITECTURES[name].inputs(torch.Generator().manual_seed(seed))

    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def _hf(family: str, model: str, config: str | None = None, **sizes: object) -> Callable[[], nn.Module]:
    """A transformers model: `model` of `transformers.models.family`."""

    def make() -> nn.Module:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        found = getattr(configuration, config or model.partition("For")[0] + "Config")(**sizes)
        return getattr(modeling, model)(found)

    return make


def _tokens(generator: torch.Generator, seq: int = SEQ) -> torch.Tensor:
    """No token is a padding token."""
    return torch.randint(3, VOCAB, (BATCH, seq), generator=generator)


def _text(generator: torch.Generator) -> tuple[tuple, dict]:
    return (), {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _ignored(generator: torch.Generator) -> tuple[tuple, dict]:
    """As masked language models are trained: few labels count, and not as many in each row; some rows are padded."""
    ids, labels = _tokens(generator), _tokens(generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.6] = -100
    labels[:1] = -100
    labels[1:2, 0] = 5
    mask = torch.ones_like(ids)
    mask[2:3, -2:] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _images(generator: torch.Generator, side: int = PIXELS) -> tuple[tuple, dict]:
    pixels = torch.randn(BATCH, 3, side, side, generator=generator)
    return (), {"pixel_values": pixels, "labels": torch.randint(4, (BATCH,), generator=generator)}


def _speech(generator: torch.Generator) -> tuple[tuple, dict]:
    features = torch.randn(BATCH, 8, 12, generator=generator)
    return (), {"input_features": features, "labels": _tokens(generator)}


def _pairs(generator: torch.Generator) -> tuple[tuple, dict]:
    ids = _tokens(generator)
    ids[:, -1] = VOCAB - 1  # the end token, at which CLIP reads the text
    pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
    return (), {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


class LoraLinear(nn.Module):
    """W x + (alpha / r) B A dropout(x): the frozen layer and a trained correction of rank r.

    Source: Hu et al. 2021, section 4.1. B is drawn, not 0, so that A has a gradient.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, alpha / rank, nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * self.scale


def _lora(dropout: float) -> nn.Module:
    model = _LLAMA().requires_grad_(False)
    for layer in model.model.layers:
        for parent, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "down_proj")):
            setattr(parent, name, LoraLinear(getattr(parent, name), 4, 8.0, dropout))
    return model


ZOO = {
    "moe": {"vocab": VOCAB, "layers": 2, "heads": 4, "kv_heads": 2, "width": WIDTH, "ff_width": 8},
    "vit": {"image": PIXELS, "patch": 4, "layers": 2, "heads": 4, "width": WIDTH, "ff_width": 24, "classes": 4},
    "resnet": {"blocks": (2, 1), "width": 4, "width_factor": 2, "classes": 4, "image": SIDE},
    "t5": {"vocab": VOCAB, "layers": 2, "heads": 4, "head_width": 4, "width": WIDTH, "ff_width": 24, "buckets": 8},
    "unet": {"image": PIXELS, "width": 8, "groups": 4, "attention": (4,)},
}
"""Changes to the zoo's `-tiny` models."""


def _zoo(name: str) -> nn.Module:
    from autopar import models

    return models.build(f"{name}-tiny", batch=BATCH, seq=SEQ, device="cpu", **ZOO[name])


def _zoo_inputs(name: str, generator: torch.Generator) -> tuple[tuple, dict]:
    if name in ("moe", "t5"):
        return (_tokens(generator), _tokens(generator)), {}
    side = ZOO[name]["image"]
    images = torch.randn(BATCH, 3, side, side, generator=generator)
    if name == "unet":
        return (images, torch.randint(1000, (BATCH,), generator=generator), images.flip(2) + 1), {}
    return (images, torch.randint(4, (BATCH,), generator=generator)), {}


_COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**_COMMON, **_TOKEN_IDS, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 16}
_DECODER["use_cache"] = False
_NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = _hf("llama", "LlamaForCausalLM", **_DECODER)
_CLIP_PART = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        _hf("gpt2", "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4,
            n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
        _text, "gpt2"),
    "llama": Architecture(_LLAMA, _text, "llama"),
    "llama-lora": Architecture(lambda: _lora(0.0), _text, "llama"),
    "llama-lora-dropout": Architecture(lambda: _lora(0.5), _text, "llama"),
    "qwen3": Architecture(_hf("qwen3", "Qwen3ForCausalLM", **_DECODER, head_dim=8), _text, "qwen3"),
    "gemma3": Architecture(
        _hf("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", **_DECODER, head_dim=8, sliding_window=4,
            layer_types=["sliding_attention", "full_attention"]),
        _text, "gemma3"),
    "mixtral": Architecture(
        _hf("mixtral", "MixtralForCausalLM", **_DECODER, num_local_experts=4, num_experts_per_tok=2,
            output_router_logits=True, experts_implementation="batched_mm"),
        _text, "mixtral"),
    "deepseek-v3": Architecture(
        _hf("deepseek_v3", "DeepseekV3ForCausalLM", **{**_DECODER, "num_key_value_heads": 4}, moe_intermediate_size=8,
            n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
            first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=4, experts_implementation="batched_mm"),
        _text, "deepseek_v3"),
    "bert": Architecture(
        _hf("bert", "BertForMaskedLM", **_COMMON, **_NO_BERT_DROPOUT, intermediate_size=24, max_position_embeddings=16),
        _ignored, "bert"),
    "t5": Architecture(
        _hf("t5", "T5ForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=2,
            num_heads=4, dropout_rate=0.0, relative_attention_num_buckets=8, use_cache=False, decoder_start_token_id=0),
        _text, "t5"),
    "whisper": Architecture(
        _hf("whisper", "WhisperForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2,
            decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24,
            decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=6, max_target_positions=16, dropout=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
            suppress_tokens=None, begin_suppress_tokens=None),
        _speech, "whisper"),
    "vit": Architecture(
        _hf("vit", "ViTForImageClassification", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=24, image_size=PIXELS, patch_size=4, num_labels=4, **_NO_BERT_DROPOUT),
        _images, "vit"),
    "resnet": Architecture(
        _hf("resnet", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[16, 16], depths=[2, 1],
            layer_type="bottleneck", num_labels=4),
        functools.partial(_images, side=SIDE), "resnet"),
    "mamba2": Architecture(
        _hf("mamba2", "Mamba2ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_heads=4,
            head_dim=8, state_size=8, n_groups=2, chunk_size=4, expand=2, use_cache=False),
        _text, "mamba2"),
    "clip": Architecture(
        _hf("clip", "CLIPModel", "CLIPConfig", projection_dim=8,
            text_config={**_CLIP_PART, "vocab_size": VOCAB, "max_position_embeddings": 16, "bos_token_id": VOCAB - 2,
                         "eos_token_id": VOCAB - 1, "pad_token_id": 0},
            vision_config={**_CLIP_PART, "image_size": PIXELS, "patch_size": 4}),
        _pairs, "clip", {"kwargs['input_ids']": 0, "kwargs['pixel_values']": 0}),
    **{f"zoo-{n}": Architecture(functools.partial(_zoo, n), functools.partial(_zoo_inputs, n)) for n in ZOO},
}  # fmt: skip
