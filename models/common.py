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
