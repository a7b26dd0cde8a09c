"""Bytes a parameter occupies in each role, and bytes a device has for them.

Enters: optimizer, width of the stored parameters, precision; a profile and the user's memory limit.
Leaves: bytes a parameter (`ParameterBytes`), usable bytes a device.
Refused, with a `PlanError` naming the value: optimizers, precisions and sizes that are none.

    role            whole precision (w bytes)     bf16 or fp16 compute
    weights         w                             max(w, 4): the fp32 master weights are the stored parameters
    compute copy    0                             2
    gradients       w                             max(w, 4): they are reduced in fp32
    adamw           2 max(w, 4): two moments      the same
    sgd             max(w, 4): one momentum buffer

torch's AdamW keeps the moments of a 2-byte parameter in 2 bytes; we count 4, since training at that width without fp32
moments loses small updates and most trainers keep them in fp32 (pass ``optimizer=4`` for torch's own). Plain SGD
without momentum needs none: pass 0.

Source: Rajbhandari et al. 2020 (ZeRO), section 3.1: 16 bytes a parameter for mixed-precision Adam with 2-byte
gradients; we count gradients in fp32, which makes 18.
"""

import re
from dataclasses import dataclass
from typing import Any

from autopar.cost.hardware import Profile
from autopar.errors import PlanError

# State buffers of the parameter's size.
_OPTIMIZER_STATES = {"adamw": 2, "sgd": 1, "none": 0}
# Width of the compute copy; None where the parameters themselves are computed with.
_COMPUTE_BYTES = {None: None, "fp32": 4, "bf16": 2, "fp16": 2}
_UNIT_BYTES = {"b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes for one element of a parameter in each role; each role can be sharded or offloaded on its own.

    Fields:  weights: stored, what the optimizer updates. compute_copy: what the ops read, 0 when they read `weights`.
             gradients: accumulated. optimizer: its states.
    """

    weights: float
    compute_copy: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes when nothing is sharded."""
        return self.weights + self.compute_copy + self.gradients + self.optimizer


def parameter_bytes(optimizer: str | int, element_bytes: int, precision: str | None = None) -> ParameterBytes:
    """Bytes a parameter by role.

    Args:    optimizer: "adamw", "sgd", "none", or the bytes a parameter that its states take.
             element_bytes: width of the user's parameters.
             precision: "fp32", "bf16", "fp16": compute in it with fp32 master weights and reduction; None: as stored.
    Raises:  PlanError: no such optimizer or precision.
    """
    compute = _compute_bytes(precision)
    stored = element_bytes if compute is None else max(element_bytes, 4)
    copy = 0 if compute is None or compute == stored else compute
    return ParameterBytes(stored, copy, stored, optimizer_bytes(optimizer, element_bytes, precision))


def optimizer_bytes(optimizer: str | int, element_bytes: int, precision: str | None = None) -> float:
    """Bytes of optimizer state for one element of a parameter; arguments and errors as `parameter_bytes`."""
    _compute_bytes(precision)
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return float(optimizer)
    if isinstance(optimizer, str) and optimizer in _OPTIMIZER_STATES:
        return float(_OPTIMIZER_STATES[optimizer] * max(element_bytes, 4))
    raise PlanError(
        f"optimizer {optimizer!r} is none of {', '.join(_OPTIMIZER_STATES)}, nor a number of bytes a parameter"
    )


def usable_bytes(profile: Profile, memory: int | str | None = None) -> int:
    """Bytes a plan may use on each device.

    Args:    memory: bytes, or a text such as "70GiB", "80GB", "512 MiB"; it may exceed the device's (to plan for
             another one). None: the device's memory less the profile's reserve.
    Raises:  PlanError: not a positive size.
    """
    if memory is None:
        return profile.memory_bytes - profile.reserve_bytes
    size: Any = memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", memory.lower())
        unit = match and (match[2] or "b")
        size = int(float(match[1]) * _UNIT_BYTES[unit]) if match and unit in _UNIT_BYTES else None
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise PlanError(f"memory {memory!r} is not a positive size; write bytes as an int, or a text such as '70GiB'")
    return size


def _compute_bytes(precision: str | None) -> int | None:
    if precision not in _COMPUTE_BYTES:
        raise PlanError(f"precision {precision!r} is none of fp32, bf16, fp16")
    return _COMPUTE_BYTES[precision]
