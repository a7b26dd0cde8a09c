"""What the zoo's models share: layers with their initial weights, example batches and the loss.

Enters: sizes. Leaves: plain torch modules and tensors. Refused: nothing; `sizes.build` checks names and sizes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_STD = 0.02  # GPT-2's: Radford et al. 2019, section 2.3, and its released code


class Linear(nn.Linear):
    """`nn.Linear` with weights from N(0, 0.02**2) and biases 0; on the meta device nothing is drawn.

    Not drawing also spares a process two seconds: torch imports its compiler to draw normal numbers on meta.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=_STD)
            if self.bias is not None:
                nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with weights from N(0, 0.02**2); on the meta device nothing is drawn."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=_STD)


class Table(nn.Module):
    """A learned tensor of N(0, 0.02**2) that is added or prepended as it is; on the meta device nothing is drawn."""

    def __init__(self, *shape: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=_STD)

    def forward(self) -> Tensor:
        return self.weight


def example_tokens(batch: int, seq: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and labels, each int64 [batch, seq]; the same values on every rank and in every call.

    `labels[b, s]` is the token after `ids[b, s]`: the shift is done here, not in the loss.
    """
    if device.type == "meta":
        empty = torch.empty(batch, seq, dtype=torch.int64, device=device)
        return empty, torch.empty_like(empty)
    # Drawn on the CPU, because generators of two devices differ.
    tokens = torch.randint(vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


def token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross entropy over all tokens, a scalar in the dtype of the logits; labels of -100 do not count."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def example_images(batch: int, channels: int, side: int, classes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Images [batch, channels, side, side] with the device and dtype of `like`, and labels int64 [batch].

    The same values on every rank and in every call.
    """
    shape = (batch, channels, side, side)
    if like.is_meta:
        return like.new_empty(shape), like.new_empty(batch, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(shape, generator=generator), torch.randint(classes, (batch,), generator=generator)
    return images.to(like), labels.to(like.device)


def class_loss(logits_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Mean cross entropy over all images, a scalar in the dtype of the logits."""
    return F.cross_entropy(logits_NK, labels_N)
