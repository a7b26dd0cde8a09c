"""A vision transformer (ViT) classifier in plain PyTorch.

Patches are embedded by a convolution; a class token goes before them; learned positions, layer norm before each half of
a layer, attention over all patches, an exact-GELU feed-forward network; the class token is classified.
Enters: images [N, C, I, I], and labels [N] for a loss. Leaves: the mean cross entropy, or logits [N, K].
Refused: an image that the patches do not divide; a width that the heads do not divide.

Shape suffixes: N images, C colours, I image side, P patches a side, S = P P + 1 tokens, E embedding width, H heads,
D width of a head, F feed-forward width, K classes.
Source: Dosovitskiy et al. 2021, section 3.1 and table 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Linear, Table, class_loss, example_images


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Sizes of a ViT.

    image, patch: sides in pixels. layers, heads: counts. width, ff_width: features. classes: of the head.
    """

    image: int
    patch: int
    layers: int
    heads: int
    width: int
    ff_width: int
    classes: int = 1000
    channels: int = 3

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise ValueError(f"ViTConfig: patches of {self.patch} do not divide an image of {self.image} pixels")
        if self.width % self.heads:
            raise ValueError(f"ViTConfig: {self.heads} heads do not divide width {self.width}; change one of them")

    @property
    def tokens(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image // self.patch) ** 2 + 1


class Attention(nn.Module):
    """Attention over all tokens of an image, [N, S, E] to [N, S, E]."""

    def __init__(self, config: ViTConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv_proj = Linear(config.width, 3 * config.width, device=device, dtype=dtype)
        self.o_proj = Linear(config.width, config.width, device=device, dtype=dtype)

    def forward(self, x_NSE: Tensor) -> Tensor:
        N, S, E = x_NSE.shape
        q_NHSD, k_NHSD, v_NHSD = (
            t.view(N, S, self.heads, E // self.heads).transpose(1, 2) for t in self.qkv_proj(x_NSE).chunk(3, dim=-1)
        )
        out_NHSD = F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD)
        return self.o_proj(out_NHSD.transpose(1, 2).reshape(N, S, E))


class Layer(nn.Module):
    """One encoder layer, [N, S, E] to [N, S, E]."""

    def __init__(self, config: ViTConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6, device=device, dtype=dtype)
        self.attention = Attention(config, device, dtype)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6, device=device, dtype=dtype)
        self.up_proj = Linear(config.width, config.ff_width, device=device, dtype=dtype)
        self.down_proj = Linear(config.ff_width, config.width, device=device, dtype=dtype)

    def forward(self, x_NSE: Tensor) -> Tensor:
        x_NSE = x_NSE + self.attention(self.norm1(x_NSE))
        h_NSF = F.gelu(self.up_proj(self.norm2(x_NSE)))
        return x_NSE + self.down_proj(h_NSF)


class ViT(nn.Module):
    """The classifier.

    Args:    batch: images that `example_inputs` makes; forward takes any number.
             device, dtype: where and as what the parameters are created.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.batch = config, batch
        self.patch_embedding = nn.Conv2d(
            config.channels, config.width, config.patch, stride=config.patch, device=device, dtype=dtype
        )
        self.class_token = Table(1, 1, config.width, device=device, dtype=dtype)
        self.position_embedding = Table(1, config.tokens, config.width, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, device, dtype) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6, device=device, dtype=dtype)
        self.head = Linear(config.width, config.classes, device=device, dtype=dtype)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images [N, C, I, I] to logits [N, K]; with labels int64 [N] to their mean cross entropy."""
        x_NEPP = self.patch_embedding(images)
        x_NSE = x_NEPP.flatten(2).transpose(1, 2)
        class_N1E = self.class_token().expand(x_NSE.shape[0], -1, -1)
        x_NSE = torch.cat((class_N1E, x_NSE), dim=1) + self.position_embedding()
        for layer in self.layers:
            x_NSE = layer(x_NSE)
        logits_NK = self.head(self.norm(x_NSE)[:, 0])
        return logits_NK if labels is None else class_loss(logits_NK, labels)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """`((images, labels), {})` for the configured batch, on the parameters' device and in their dtype."""
        c = self.config
        return example_images(self.batch, c.channels, c.image, c.classes, self.head.weight), {}
