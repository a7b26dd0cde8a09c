"""The zoo: plain PyTorch models with their published sizes; nothing in them knows of parallelism."""

from autopar.models.gpt import GPT, GPTConfig
from autopar.models.llama import Llama, LlamaConfig
from autopar.models.sizes import SIZES, Size, build, names

__all__ = ["GPT", "SIZES", "GPTConfig", "Llama", "LlamaConfig", "Size", "build", "names"]
