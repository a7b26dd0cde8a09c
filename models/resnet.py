"""A residual convolutional classifier (ResNet, wide ResNet) in plain PyTorch.

A 7x7 stem, stages of basic or bottleneck blocks, each stage but the first at half the resolution, the mean over all
pixels, a linear head. The stride of a bottleneck is in its 3x3 convolution, as in torchvision.
Enters: images [N, C, I, I], and labels [N] for a loss. Leaves: the mean cross entropy, or logits [N, K].
Refused: a width factor for basic blocks, which have no inner width.

Shape suffixes: N images, C channels, I image side, K classes.
Source: He et al. 2016, table 1; Zagoruyko & Komodakis 2016 (wide: the inner width of a bottleneck times a factor).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Linear, class_loss, example_images


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """Sizes of a ResNet.

    blocks: in each of the stages. bottleneck: 1x1, 3x3, 1x1 convolutions with four times the width outside, or two 3x3.
    width: channels of the stem; each stage doubles it. width_factor: of the bottleneck's inner convolution.
    """

    blocks: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    width_factor: int = 1
    classes: int = 1000
    image: int = 224
    channels: int = 3

    def __post_init__(self) -> None:
        if self.width_factor != 1 and not self.bottleneck:
            raise ValueError("ResNetConfig: basic blocks have no inner width to widen; set bottleneck=True")

    @property
    def layers(self) -> int:
        """Convolutions on the longest way, and the head: the number in the name."""
        return (3 if self.bottleneck else 2) * sum(self.blocks) + 2


class ConvNorm(nn.Module):
    """A convolution without bias and its batch norm, [N, C, I, I] to [N, C', I / stride, I / stride]."""

    def __init__(
        self, inside: int, outside: int, kernel: int, stride: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            inside, outside, kernel, stride=stride, padding=kernel // 2, bias=False, device=device, dtype=dtype
        )
        self.norm = nn.BatchNorm2d(outside, device=device, dtype=dtype)

    def forward(self, x_NCII: Tensor) -> Tensor:
        return self.norm(self.conv(x_NCII))


class Block(nn.Module):
    """One residual block, [N, C, I, I] to [N, C', I / stride, I / stride]."""

    def __init__(
        self, config: ResNetConfig, inside: int, width: int, stride: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if config.bottleneck:
            inner, outside = width * config.width_factor, 4 * width
            shapes = [(inside, inner, 1, 1), (inner, inner, 3, stride), (inner, outside, 1, 1)]
        else:
            outside = width
            shapes = [(inside, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(ConvNorm(*shape, device, dtype) for shape in shapes)
        same = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if same else ConvNorm(inside, outside, 1, stride, device, dtype)

    def forward(self, x_NCII: Tensor) -> Tensor:
        h_NCII = x_NCII
        for conv in self.convs[:-1]:
            h_NCII = F.relu(conv(h_NCII))
        return F.relu(self.convs[-1](h_NCII) + self.shortcut(x_NCII))


class ResNet(nn.Module):
    """The classifier.

    Args:    batch: images that `example_inputs` makes; forward takes any number, of any size.
             device, dtype: where and as what the parameters are created.
    """

    def __init__(
        self,
        config: ResNetConfig,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.batch = config, batch
        self.stem = ConvNorm(config.channels, config.width, 7, 2, device, dtype)
        self.stages = nn.ModuleList()
        inside = config.width
        for number, count in enumerate(config.blocks):
            width, stage = config.width * 2**number, nn.Sequential()
            for position in range(count):
                stride = 2 if number and not position else 1
                stage.append(Block(config, inside, width, stride, device, dtype))
                inside = width * (4 if config.bottleneck else 1)
            self.stages.append(stage)
        self.head = Linear(inside, config.classes, device=device, dtype=dtype)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images [N, C, I, I] to logits [N, K]; with labels int64 [N] to their mean cross entropy."""
        x_NCII = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        for stage in self.stages:
            x_NCII = stage(x_NCII)
        logits_NK = self.head(x_NCII.mean(dim=(2, 3)))
        return logits_NK if labels is None else class_loss(logits_NK, labels)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """`((images, labels), {})` for the configured batch, on the parameters' device and in their dtype."""
        c = self.config
        return example_images(self.batch, c.channels, c.image, c.classes, self.head.weight), {}
