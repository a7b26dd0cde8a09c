"""The zoo: plain PyTorch models with their published sizes; nothing in them knows of parallelism."""

from autopar.models.gpt import GPT, GPTConfig
from autopar.models.llama import Llama, LlamaConfig
from autopar.models.moe import MoE, MoEConfig
from autopar.models.resnet import ResNet, ResNetConfig
from autopar.models.sizes import SIZES, Size, build, names
from autopar.models.t5 import T5, T5Config
from autopar.models.unet import UNet, UNetConfig
from autopar.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "SIZES",
    "T5",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "MoE",
    "MoEConfig",
    "ResNet",
    "ResNetConfig",
    "Size",
    "T5Config",
    "UNet",
    "UNetConfig",
    "ViT",
    "ViTConfig",
    "build",
    "names",
]
