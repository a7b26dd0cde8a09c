"""`torch.autograd.detect_anomaly` on a parallel module: it asks each gradient for NaNs, and DTensor has no answer.

Enters: nothing. Leaves: DTensor's rule for "is any element true": the tensor is gathered first. Refused: nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def allow_anomaly_mode() -> None:
    """Teach DTensor the op, once a process."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.aten._is_any_true.default)
    def whole(x: Any) -> list[Any]:
        return [([Replicate()], [Replicate()])]
