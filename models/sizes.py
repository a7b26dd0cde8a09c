"""The zoo's table: published sizes by name, and the function that builds one.

Enters: a name, a global batch and a sequence length. Leaves: an `nn.Module` with `.config` and `.example_inputs()`.
Refused: unknown names, empty batches, sequences that the model has no positions for; all as `ValueError`.
"""

import dataclasses
import difflib
from dataclasses import dataclass

import torch
from torch import nn

from autopar.models.gpt import GPT, GPTConfig
from autopar.models.llama import Llama, LlamaConfig

_GPT2 = "Radford et al. 2019, table 2; parameters counted in the released checkpoints"
# Table 2.1 prints 24 heads of 128 for the 1.3B model and width 5140 for the 13B model, which do not multiply out; the
# sizes here are those of Cerebras-GPT (Dey et al. 2023), which corrected both. That makes the 13B one 12.85B
# (the table prints 13.0B), so for it the last digit that counts is that of its name.
_GPT3 = "Brown et al. 2020, table 2.1; parameters as printed there"
_LLAMA2 = "Touvron et al. 2023 and the released checkpoints' config.json; parameters counted in them"
_LLAMA3 = "Grattafiori et al. 2024, table 3, and the released checkpoints' config.json; parameters counted in them"
_OURS = "ours, for demonstrations and tests"


@dataclass(frozen=True, slots=True)
class Size:
    """One published model.

    published: parameters as the source gives them, a tied head counted once; None where the model is ours.
    resolution: the unit of the last digit that the source prints (1: an exact count).
    """

    config: GPTConfig | LlamaConfig
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


_TINY_GPT = GPTConfig(vocab=512, context=128, layers=4, heads=8, width=128, ff_width=512)
_TINY_LLAMA = LlamaConfig(vocab=512, context=128, layers=4, heads=8, kv_heads=4, width=128, ff_width=384)

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
}


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
    if isinstance(config, GPTConfig):
        return GPT(config, batch=batch, seq=seq, device=device, dtype=dtype)
    return Llama(config, batch=batch, seq=seq, device=device, dtype=dtype)
