"""What decides which program runs, and what all ranks must agree on before one does.

Enters: the flat inputs of a call, the module's mode, what was changed on it. Leaves: a key, and its digest with what
else the ranks compare. Refused: nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.check import digest, value_digest
from autopar.runtime.tree import Changes

Key = tuple[bool, str, tuple[Any, ...], Changes, tuple[str, ...]]
"""Mode, structure and leaves of the inputs, what was changed on parts, parameters that are frozen no longer."""


def key_of(training: bool, spec: Any, leaves: Sequence[Any], changes: Changes, unfrozen: tuple[str, ...]) -> Key:
    return (training, str(spec), tuple(map(_described, leaves)), changes, unfrozen)


def digest_of(told: Any, values: Sequence[Any]) -> int:
    """values: those whose plain tensors are to be equal, too."""
    mine = [digest(re.sub(r" at 0x[0-9a-f]+", "", str(told)))]  # where an object lies in memory says nothing
    mine += [value_digest(x) for x in values if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
    return digest(str(mine))


def _described(leaf: Any) -> tuple[Any, ...]:
    """What decides which program runs; of a DTensor its local shape, since ranks know no other before they talk."""
    if isinstance(leaf, DTensor):
        placements = tuple(map(str, leaf.placements))
        return (tuple(leaf.to_local().shape), leaf.dtype, leaf.requires_grad, placements)
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return (type(leaf).__name__, repr(leaf))


def short(key: Key) -> str:
    text = f"training={key[0]}, inputs {[d for d in key[2]]}"
    return text if len(text) < 300 else text[:297] + "..."
