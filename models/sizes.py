"""The zoo's table: published sizes by name, and the function that builds one.

Enters: a name, a global batch and a sequence length. Leaves: an `nn.Module` with `.config` and `.example_inputs()`.
Refused: unknown names, empty batches, sequences that the model has no positions for; all as `ValueError`.
Models of images have no sequence: they take any `seq` and do not read it.
"""

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.models.gpt import GPT, GPTConfig
from autopar.models.llama import Llama, LlamaConfig
from autopar.models.moe import MoE, MoEConfig
from autopar.models.resnet import ResNet, ResNetConfig
from autopar.models.t5 import T5, T5Config
from autopar.models.unet import UNet, UNetConfig
from autopar.models.vit import ViT, ViTConfig

_GPT2 = "Radford et al. 2019, table 2; parameters counted in the released checkpoints"
# Table 2.1 prints 24 heads of 128 for the 1.3B model and width 5140 for the 13B model, which do not multiply out; the
# sizes here are those of Cerebras-GPT (Dey et al. 2023), which corrected both. That makes the 13B one 12.85B
# (the table prints 13.0B), so for it the last digit that counts is that of its name.
_GPT3 = "Brown et al. 2020, table 2.1; parameters as printed there"
_LLAMA2 = "Touvron et al. 2023 and the released checkpoints' config.json; parameters counted in them"
_LLAMA3 = "Grattafiori et al. 2024, table 3, and the released checkpoints' config.json; parameters counted in them"
_MIXTRAL = "Jiang et al. 2024 and the released checkpoints' config.json; parameters counted in them"
_VIT = "Dosovitskiy et al. 2021, table 1; parameters as torchvision's documentation counts the same sizes"
_RESNET = "He et al. 2016, table 1; parameters as torchvision's documentation counts them"
_WIDE = "Zagoruyko & Komodakis 2016, table 8; parameters as torchvision's documentation counts them"
_T5 = "Raffel et al. 2020, section 3.7, and the released checkpoints' config.json; parameters counted in them"
_T5_11 = "the released T5 1.1 checkpoints' config.json (Raffel et al. 2020's repository); parameters counted in them"
_DDPM = "Ho et al. 2020, appendix B; parameters as printed there"
_OURS = "ours, for demonstrations and tests"

Config = GPTConfig | LlamaConfig | MoEConfig | ViTConfig | ResNetConfig | T5Config | UNetConfig


@dataclass(frozen=True, slots=True)
class Size:
    """One published model.

    published: parameters as the source gives them, a tied head counted once; None where the model is ours.
    resolution: the unit of the last digit that the source prints (1: an exact count).
    """

    config: Config
    published: int | None
    resolution: int
    source: str


def _gpt(context: int, layers: int, heads: int, width: int) -> GPTConfig:
    # Both papers: the feed-forward width is 4 widths, and the byte-pair vocabulary has 50,257 tokens.
    return GPTConfig(vocab=50257, context=context, layers=layers, heads=heads, width=width, ff_width=4 * width)


def _llama2(layers: int, heads: int, kv_heads: int, width: int, ff_width: int) -> LlamaConfig:
    return LlamaConfig(
        vocab=32000, context=4096, layers=layers, heads=heads, kv_heads=kv_heads, width=width, ff_width=ff_width
    )


def _llama3(layers: int, heads: int, width: int, ff_width: int) -> LlamaConfig:
    return LlamaConfig(
        vocab=128256,
        context=8192,
        layers=layers,
        heads=heads,
        kv_heads=8,
        width=width,
        ff_width=ff_width,
        rotary_base=500000.0,
    )


def _mixtral(layers: int, heads: int, width: int, ff_width: int, context: int) -> MoEConfig:
    return MoEConfig(
        vocab=32000,
        context=context,
        layers=layers,
        heads=heads,
        kv_heads=8,
        width=width,
        ff_width=ff_width,
        rotary_base=1000000.0,
    )


def _vit(patch: int, layers: int, heads: int, width: int) -> ViTConfig:
    return ViTConfig(image=224, patch=patch, layers=layers, heads=heads, width=width, ff_width=4 * width)


def _t5(layers: int, heads: int, head_width: int, width: int, ff_width: int, gated: bool = False) -> T5Config:
    # 32,100 pieces, padded to a multiple of 128.
    return T5Config(
        vocab=32128,
        context=512,
        layers=layers,
        heads=heads,
        head_width=head_width,
        width=width,
        ff_width=ff_width,
        gated=gated,
        tied=not gated,
    )


_TINY_GPT = GPTConfig(vocab=512, context=128, layers=4, heads=8, width=128, ff_width=512)
_TINY_LLAMA = LlamaConfig(vocab=512, context=128, layers=4, heads=8, kv_heads=4, width=128, ff_width=384)
_TINY_MOE = MoEConfig(
    vocab=512, context=128, layers=4, heads=8, kv_heads=4, width=128, ff_width=192, experts=4, capacity=1.25, every=2
)
_TINY_VIT = ViTConfig(image=32, patch=8, layers=4, heads=8, width=128, ff_width=512, classes=10)
_TINY_RESNET = ResNetConfig(blocks=(2, 2, 2, 2), bottleneck=True, width=16, width_factor=2, classes=10, image=32)
_TINY_T5 = T5Config(vocab=512, context=128, layers=2, heads=8, head_width=16, width=128, ff_width=384)
_TINY_UNET = UNetConfig(image=16, width=32, multiples=(1, 2), blocks=1, attention=(8,), groups=8)

SIZES: dict[str, Size] = {
    "gpt-tiny": Size(_TINY_GPT, None, 1, _OURS),
    "gpt2": Size(_gpt(1024, 12, 12, 768), 124_439_808, 1, _GPT2),
    "gpt2-medium": Size(_gpt(1024, 24, 16, 1024), 354_823_168, 1, _GPT2),
    "gpt2-large": Size(_gpt(1024, 36, 20, 1280), 774_030_080, 1, _GPT2),
    "gpt2-xl": Size(_gpt(1024, 48, 25, 1600), 1_557_611_200, 1, _GPT2),
    "gpt3-1.3b": Size(_gpt(2048, 24, 16, 2048), 1_300_000_000, 100_000_000, _GPT3),
    "gpt3-2.7b": Size(_gpt(2048, 32, 32, 2560), 2_700_000_000, 100_000_000, _GPT3),
    "gpt3-6.7b": Size(_gpt(2048, 32, 32, 4096), 6_700_000_000, 100_000_000, _GPT3),
    "gpt3-13b": Size(_gpt(2048, 40, 40, 5120), 13_000_000_000, 1_000_000_000, _GPT3),
    "gpt3-175b": Size(_gpt(2048, 96, 96, 12288), 175_000_000_000, 1_000_000_000, _GPT3),
    "llama-tiny": Size(_TINY_LLAMA, None, 1, _OURS),
    "llama2-7b": Size(_llama2(32, 32, 32, 4096, 11008), 6_738_415_616, 1, _LLAMA2),
    "llama2-13b": Size(_llama2(40, 40, 40, 5120, 13824), 13_015_864_320, 1, _LLAMA2),
    "llama2-70b": Size(_llama2(80, 64, 8, 8192, 28672), 68_976_648_192, 1, _LLAMA2),
    "llama3-8b": Size(_llama3(32, 32, 4096, 14336), 8_030_261_248, 1, _LLAMA3),
    "llama3-70b": Size(_llama3(80, 64, 8192, 28672), 70_553_706_496, 1, _LLAMA3),
    "llama3-405b": Size(_llama3(126, 128, 16384, 53248), 405_853_388_800, 1, _LLAMA3),
    "moe-tiny": Size(_TINY_MOE, None, 1, _OURS),
    "mixtral-8x7b": Size(_mixtral(32, 32, 4096, 14336, 32768), 46_702_792_704, 1, _MIXTRAL),
    "mixtral-8x22b": Size(_mixtral(56, 48, 6144, 16384, 65536), 140_620_634_112, 1, _MIXTRAL),
    "vit-tiny": Size(_TINY_VIT, None, 1, _OURS),
    "vit-b16": Size(_vit(16, 12, 12, 768), 86_567_656, 1, _VIT),
    "vit-b32": Size(_vit(32, 12, 12, 768), 88_224_232, 1, _VIT),
    "vit-l16": Size(_vit(16, 24, 16, 1024), 304_326_632, 1, _VIT),
    "vit-l32": Size(_vit(32, 24, 16, 1024), 306_535_400, 1, _VIT),
    "vit-h14": Size(_vit(14, 32, 16, 1280), 632_045_800, 1, _VIT),
    "resnet-tiny": Size(_TINY_RESNET, None, 1, _OURS),
    "resnet18": Size(ResNetConfig((2, 2, 2, 2), bottleneck=False), 11_689_512, 1, _RESNET),
    "resnet34": Size(ResNetConfig((3, 4, 6, 3), bottleneck=False), 21_797_672, 1, _RESNET),
    "resnet50": Size(ResNetConfig((3, 4, 6, 3), bottleneck=True), 25_557_032, 1, _RESNET),
    "resnet101": Size(ResNetConfig((3, 4, 23, 3), bottleneck=True), 44_549_160, 1, _RESNET),
    "resnet152": Size(ResNetConfig((3, 8, 36, 3), bottleneck=True), 60_192_808, 1, _RESNET),
    "wide-resnet50": Size(ResNetConfig((3, 4, 6, 3), bottleneck=True, width_factor=2), 68_883_240, 1, _WIDE),
    "wide-resnet101": Size(ResNetConfig((3, 4, 23, 3), bottleneck=True, width_factor=2), 126_886_696, 1, _WIDE),
    "t5-tiny": Size(_TINY_T5, None, 1, _OURS),
    "t5-small": Size(_t5(6, 8, 64, 512, 2048), 60_506_624, 1, _T5),
    "t5-base": Size(_t5(12, 12, 64, 768, 3072), 222_903_552, 1, _T5),
    "t5-large": Size(_t5(24, 16, 64, 1024, 4096), 737_668_096, 1, _T5),
    "t5-3b": Size(_t5(24, 32, 128, 1024, 16384), 2_851_598_336, 1, _T5),
    "t5-11b": Size(_t5(24, 128, 128, 1024, 65536), 11_307_321_344, 1, _T5),
    "t5-xl": Size(_t5(24, 32, 64, 2048, 5120, gated=True), 2_849_757_184, 1, _T5_11),
    "t5-xxl": Size(_t5(24, 64, 64, 4096, 10240, gated=True), 11_135_332_352, 1, _T5_11),
    "unet-tiny": Size(_TINY_UNET, None, 1, _OURS),
    "ddpm-cifar10": Size(UNetConfig(image=32, width=128, multiples=(1, 2, 2, 2)), 35_700_000, 100_000, _DDPM),
    "ddpm-256": Size(UNetConfig(image=256, width=128, multiples=(1, 1, 2, 2, 4, 4)), 114_000_000, 1_000_000, _DDPM),
}

MODELS: dict[type, Callable[..., nn.Module]] = {
    GPTConfig: GPT,
    LlamaConfig: Llama,
    MoEConfig: MoE,
    ViTConfig: ViT,
    ResNetConfig: ResNet,
    T5Config: T5,
    UNetConfig: UNet,
}
"""What each config builds."""


def names() -> tuple[str, ...]:
    """The zoo's names, in the order of the table."""
    return tuple(SIZES)


def build(
    name: str,
    *,
    batch: int,
    seq: int,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> nn.Module:
    """Make the model `name`, with parameters created directly on `device`; on meta this costs no memory and no time.

    Args:    batch, seq: the global batch (sequences) and tokens a sequence that its `example_inputs()` will have.
             changes: fields of the config to replace, such as `layers=2`.
    Raises:  ValueError: an unknown name, batch or seq below 1, more tokens than positions, an impossible config.
             TypeError: a change to a field that the config does not have.
    Source:  `SIZES[name].source`.
    """
    if name not in SIZES:
        near = difflib.get_close_matches(name, SIZES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown model {name!r}: {hint}known are {', '.join(SIZES)}")
    if batch < 1 or seq < 1:
        raise ValueError(f"{name}: batch {batch} and seq {seq} must both be at least 1")
    config = dataclasses.replace(SIZES[name].config, **changes)  # type: ignore[arg-type]  # checked by replace itself
    common: dict[str, Any] = {"batch": batch, "device": device, "dtype": dtype}
    if hasattr(config, "context"):
        common["seq"] = seq
    return MODELS[type(config)](config, **common)
