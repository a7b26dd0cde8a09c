"""The U-Net of denoising diffusion in plain PyTorch: long skips from every step down to the same step up.

Residual blocks with group norm, SiLU and the time embedding; self-attention at some resolutions; strided convolutions
down, nearest-neighbour doubling up; each result on the way down is concatenated on the way up.
Enters: noisy images [N, C, I, I], time steps [N], and the noise for a loss. Leaves: the mean squared error, or the
predicted noise [N, C, I, I]. Refused: an image that cannot be halved as often as there are levels; a width that the
groups of the norms do not divide.

Shape suffixes: N images, C channels, I image side, S = I I pixels, E width of the time embedding, Z sinusoid pairs.
Source: Ho et al. 2020, appendix B (with its asymmetric padding before a strided convolution, as in its code).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.common import Linear, example_images

STEPS = 1000  # of the noising process: Ho et al. 2020, section 4


@dataclass(frozen=True, slots=True)
class UNetConfig:
    """Sizes of a U-Net.

    image: side in pixels. width: channels of the first level. multiples: of each level, which halves the side.
    blocks: of a level on the way down; one more on the way up. attention: sides at which blocks attend. groups: of the
    norms.
    """

    image: int
    width: int
    multiples: tuple[int, ...]
    blocks: int = 2
    attention: tuple[int, ...] = (16,)
    groups: int = 32
    channels: int = 3

    def __post_init__(self) -> None:
        if self.image % 2 ** (len(self.multiples) - 1):
            raise ValueError(
                f"UNetConfig: an image of {self.image} pixels cannot be halved {len(self.multiples) - 1} times"
            )
        if self.width % self.groups:
            raise ValueError(f"UNetConfig: {self.groups} groups do not divide width {self.width}; change one of them")

    @property
    def layers(self) -> int:
        """Residual blocks: down, in the middle and up."""
        return len(self.multiples) * (2 * self.blocks + 1) + 2


class Residual(nn.Module):
    """A residual block, [N, C, I, I] and the time embedding [N, E] to [N, C', I, I]; `attends`: attention follows."""

    def __init__(
        self, config: UNetConfig, inside: int, outside: int, attends: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups, inside, eps=1e-6, device=device, dtype=dtype)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, device=device, dtype=dtype)
        self.time_proj = Linear(4 * config.width, outside, device=device, dtype=dtype)
        self.norm2 = nn.GroupNorm(config.groups, outside, eps=1e-6, device=device, dtype=dtype)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, device=device, dtype=dtype)
        same = inside == outside
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, device=device, dtype=dtype)
        self.attention = Attention(config, outside, device, dtype) if attends else nn.Identity()

    def forward(self, x_NCII: Tensor, time_NE: Tensor) -> Tensor:
        h_NCII = self.conv1(F.silu(self.norm1(x_NCII)))
        h_NCII = h_NCII + self.time_proj(F.silu(time_NE))[:, :, None, None]
        h_NCII = self.conv2(F.silu(self.norm2(h_NCII)))
        return self.attention(self.shortcut(x_NCII) + h_NCII)


class Attention(nn.Module):
    """One head of attention over all pixels with a residual, [N, C, I, I] to [N, C, I, I]."""

    def __init__(self, config: UNetConfig, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.groups, width, eps=1e-6, device=device, dtype=dtype)
        self.q_proj = Linear(width, width, device=device, dtype=dtype)
        self.k_proj = Linear(width, width, device=device, dtype=dtype)
        self.v_proj = Linear(width, width, device=device, dtype=dtype)
        self.o_proj = Linear(width, width, device=device, dtype=dtype)

    def forward(self, x_NCII: Tensor) -> Tensor:
        h_NSC = self.norm(x_NCII).flatten(2).transpose(1, 2)
        q_NSC, k_NSC, v_NSC = self.q_proj(h_NSC), self.k_proj(h_NSC), self.v_proj(h_NSC)
        out_N1SC = F.scaled_dot_product_attention(q_NSC[:, None], k_NSC[:, None], v_NSC[:, None])
        out_NCS = self.o_proj(out_N1SC.squeeze(1)).transpose(1, 2)
        return x_NCII + out_NCS.unflatten(2, x_NCII.shape[2:])


class Down(nn.Module):
    """Halve the resolution with a strided convolution, padded at the right and the bottom only."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2, device=device, dtype=dtype)

    def forward(self, x_NCII: Tensor) -> Tensor:
        return self.conv(F.pad(x_NCII, (0, 1, 0, 1)))


class Up(nn.Module):
    """Double the resolution by repeating pixels, then a convolution."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, device=device, dtype=dtype)

    def forward(self, x_NCII: Tensor) -> Tensor:
        return self.conv(F.interpolate(x_NCII, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """The noise predictor.

    Args:    batch: images that `example_inputs` makes; forward takes any number.
             device, dtype: where and as what the parameters are created.
    """

    def __init__(
        self,
        config: UNetConfig,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.batch = config, batch
        width, side = config.width, config.image
        self.time1 = Linear(width, 4 * width, device=device, dtype=dtype)
        self.time2 = Linear(4 * width, 4 * width, device=device, dtype=dtype)
        self.stem = nn.Conv2d(config.channels, width, 3, padding=1, device=device, dtype=dtype)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        inside, skips = width, [width]
        for level, multiple in enumerate(config.multiples):
            for _ in range(config.blocks):
                self.down.append(Residual(config, inside, width * multiple, side in config.attention, device, dtype))
                inside = width * multiple
                skips.append(inside)
            if level < len(config.multiples) - 1:
                self.down.append(Down(inside, device, dtype))
                skips.append(inside)
                side //= 2
        self.middle1 = Residual(config, inside, inside, True, device, dtype)
        self.middle2 = Residual(config, inside, inside, False, device, dtype)
        for level, multiple in reversed(list(enumerate(config.multiples))):
            for _ in range(config.blocks + 1):
                self.up.append(
                    Residual(config, inside + skips.pop(), width * multiple, side in config.attention, device, dtype)
                )
                inside = width * multiple
            if level:
                self.up.append(Up(inside, device, dtype))
                side *= 2
        self.norm = nn.GroupNorm(config.groups, inside, eps=1e-6, device=device, dtype=dtype)
        self.head = nn.Conv2d(inside, config.channels, 3, padding=1, device=device, dtype=dtype)

    def forward(self, images: Tensor, steps: Tensor, noise: Tensor | None = None) -> Tensor:
        """Noisy images [N, C, I, I] and steps int64 [N] to their noise; with noise to its mean squared error."""
        time_NE = self.time2(F.silu(self.time1(self._sinusoids(steps).to(images.dtype))))
        x_NCII = self.stem(images)
        skips = [x_NCII]
        for module in self.down:
            x_NCII = module(x_NCII, time_NE) if isinstance(module, Residual) else module(x_NCII)
            skips.append(x_NCII)
        x_NCII = self.middle2(self.middle1(x_NCII, time_NE), time_NE)
        for module in self.up:
            if isinstance(module, Residual):
                x_NCII = module(torch.cat((x_NCII, skips.pop()), dim=1), time_NE)
            else:
                x_NCII = module(x_NCII)
        predicted_NCII = self.head(F.silu(self.norm(x_NCII)))
        return predicted_NCII if noise is None else F.mse_loss(predicted_NCII, noise)

    def _sinusoids(self, steps_N: Tensor) -> Tensor:
        """Sines and cosines of the step at geometrically falling frequencies, float32 [N, width]."""
        half = self.config.width // 2
        frequency_Z = torch.exp(torch.arange(half, device=steps_N.device) * (-math.log(10000.0) / (half - 1)))
        angle_NZ = steps_N.float()[:, None] * frequency_Z
        return torch.cat((angle_NZ.sin(), angle_NZ.cos()), dim=1)

    def example_inputs(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, object]]:
        """`((images, steps, noise), {})` for the configured batch, on the parameters' device and in their dtype."""
        c, like = self.config, self.head.weight
        images, steps = example_images(self.batch, c.channels, c.image, STEPS, like)
        # The noise a perfect model would find in a batch that is nothing else: the images, upside down for variety.
        return (images, steps, images.flip(2)), {}
