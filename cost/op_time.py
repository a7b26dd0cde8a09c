"""Seconds of single ops: what the planner's captured graphs and predictions from sizes have in common.

Enters: work, bytes, dtype, a hardware `Profile`, the constants `Fitted`. Leaves: seconds, or bytes where an op is bound
by memory; numbers or numpy arrays, which broadcast. Refused: nothing.

Products are in `compute`, collectives in `collective`; here is what lies between. `price` calls these functions for the
ops of a graph, `layer_time` and `training` for the sizes of a transformer, so that one figure serves both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.cost.compute import matmul_s, memory_bound_s
from autopar.cost.fitted import FITTED, Fitted
from autopar.cost.hardware import Profile
from autopar.cost.memory import ParameterBytes

COPIED_HEADS = 4
"""[derived] moves of an attention output's size around fused attention, each way: heads apart and together again."""


def product_s(flop: Any, m: Any, n: Any, k: Any, dtype: object, profile: Profile) -> tuple[Any, Any, Any]:
    """Seconds of ``[b, m, k] @ [b, k, n]``, of its gradient by the left and of that by the right operand.

    Args:    flop: 2 b m n k. Others as `matmul_s`, whose shape each result has.
    """
    flop, m, n, k = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (flop, m, n, k)))
    work, rows, columns, depth = np.stack([flop] * 3), np.stack([m, m, k]), np.stack([n, k, n]), np.stack([k, n, m])
    forward, left, right = matmul_s(work, rows, columns, depth, dtype, profile)
    return forward, left, right


def attention_s(
    flop: Any, head_size: float, dtype: object, profile: Profile, fitted: Fitted = FITTED, native: bool = False
) -> tuple[Any, Any]:
    """Seconds of fused attention, forward and backward.

    Args:    flop: of the scores and sums that are computed, the masked half left out. native: kernels written for the
             device, not portable ones.
    """
    speed = profile.native_attention_fraction if native else profile.attention_fraction
    narrow = (1 + fitted.flash_half_dim / head_size) / (1 + fitted.flash_half_dim / 128)
    forward = flop / (profile.peak(dtype) * profile.matmul_plateau * speed)
    forward = forward * narrow * odd_head(head_size, profile, fitted)
    return forward, 2.5 * forward / fitted.flash_backward  # five products where the forward makes two


def odd_head(head_size: float, profile: Profile, fitted: Fitted) -> float:
    """How many times longer products take whose heads are no whole number of vector loads."""
    return 1 / fitted.odd_head_fraction if head_size * 2 % profile.alignment_bytes else 1.0


def loss_bytes(logits: Any, element_bytes: int, fitted: Fitted = FITTED) -> tuple[Any, Any]:
    """Bytes that cross entropy moves, forward and backward.

    Narrow logits become 4-byte ones, which are read for maximum, sum and gradient; the gradient goes back.
    """
    logits = logits * fitted.logit_traffic
    return logits * (element_bytes + 4 * 4), logits * (element_bytes + 4 * 3)


def embedding_bytes(looked_up: Any, table: Any) -> tuple[Any, Any]:
    """Bytes of a lookup, and of adding gradients to rows of a cleared table; arguments: bytes of both tensors."""
    return 3 * looked_up, 3 * looked_up + 2 * table


def update_s(elements: Any, held: ParameterBytes, profile: Profile, fitted: Fitted = FITTED) -> Any:
    """Seconds of the optimizer: gradient, weight and states read, the latter two written, the copy for compute made.

    elements: on this device.
    """
    traffic = 2 * (held.weights + held.optimizer) + held.compute_copy + held.gradients
    return memory_bound_s(elements * traffic * fitted.update_traffic, profile)


def norm_s(elements: Any, held: ParameterBytes, profile: Profile, fitted: Fitted = FITTED) -> Any:
    """Seconds of what a training loop does with gradients beside the update: their norm, their scale, clearing them."""
    return memory_bound_s(elements * 3 * held.gradients * fitted.norm_traffic, profile)


def felt_s(compute_s: Any, wire_s: Any, fitted: Fitted = FITTED) -> Any:
    """What is felt of communication beside compute: where it sticks out, and a share of what is hidden."""
    hidden = np.minimum(wire_s, compute_s)
    return wire_s - hidden + fitted.overlap_slowdown * hidden
