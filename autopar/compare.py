"""Two runs of one model, compared: the error of each tensor, the bounds of "equal", and the report.

Enters: what two runs gave (loss, outputs, gradients, buffers, parameters after steps) as plain tensors by name.
Leaves: a `Report`. Refused: nothing; what is missing, or of another shape, has an infinite error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

CATEGORIES = ("loss", "outputs", "grads", "params_after_step", "buffers")

LEARNING_RATE = 1e-3
"""Of the AdamW steps. Also the length of one of them, and so the scale of the error of a parameter whose true gradient
is zero (the bias of attention's keys): rounding errors alone move it."""

TINY_GRADIENT = 1e-6
"""A gradient below this share of the model's largest one is measured against that."""

ROUGH = 1.5
"""bfloat16 and float16: error to the float64 result, over that of one device in the same dtype."""

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""By category, then by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The error of one tensor and where it is largest."""

    category: str
    name: str
    error: float
    index: tuple[int, ...] = ()
    reference: float = math.nan
    parallel: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found; equal on every rank.

    Fields:  loss: of one device and of the mesh, None where the model was not differentiated.
             max_error: the largest error in each category. bounds: what each may be; None: not judged in this dtype.
             worst: name of the tensor whose error is largest against its bound; worst_category, worst_index (its
             element), worst_values (there, on one device and on the mesh), worst_op (the op that made it, and the
             user's line). reference: what the mesh was compared with. plan: degrees, zero, schedule, micro-batches.
    """

    equal: bool
    world_size: int
    dtype: str
    loss: tuple[float, float] | None
    max_error: Mapping[str, float]
    bounds: Mapping[str, float | None]
    worst: str
    worst_category: str
    worst_op: str
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float]
    reference: str
    plan: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON data, but for infinities and NaN, which JSON lacks."""
        return {
            "equal": self.equal,
            "world_size": self.world_size,
            "dtype": self.dtype,
            "loss": None if self.loss is None else list(self.loss),
            "max_error": dict(self.max_error),
            "worst": self.worst,
            "plan": dict(self.plan),
            "bounds": dict(self.bounds),
            "worst_category": self.worst_category,
            "worst_op": self.worst_op,
            "worst_index": list(self.worst_index),
            "worst_values": list(self.worst_values),
            "reference": self.reference,
        }

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "NOT EQUAL"
        lines = [f"{verdict}: {self.world_size} ranks against {self.reference}, {self.dtype}"]
        if self.loss is not None:
            lines.append(f"loss {self.loss[0]!r} on one device, {self.loss[1]!r} on the mesh")
        for name, error in self.max_error.items():
            bound = self.bounds[name]
            lines.append(f"{name}: {error:.2e}" + (f" (may be {bound:.2e})" if bound is not None else ""))
        if self.worst:
            one, mesh = self.worst_values
            at = f"[{', '.join(map(str, self.worst_index))}]"
            lines.append(f"worst: {self.worst_category} {self.worst}{at}: {one!r} on one device, {mesh!r} on the mesh")
            lines.append(f"made by {self.worst_op}")
        return "\n".join(lines)


def bounds_of(dtype: torch.dtype, lower: bool, single: Mapping[str, float] | None) -> dict[str, float | None]:
    """The largest error in each category that counts as equal.

    Args:    lower: a float64 model that computes its loss in a narrower dtype.
             single: bfloat16 and float16: the errors of one device in that dtype to the float64 result.
    """
    if dtype == torch.float64:
        every: dict[str, float | None] = dict.fromkeys(CATEGORIES, 1e-6 if lower else 1e-9)
        return every | {"params_after_step": 1e-4 if lower else 1e-9}
    if dtype == torch.float32:
        # Adam divides gradients that are rounding errors by each other: parameters are shown, not judged.
        return dict.fromkeys(CATEGORIES, 1e-5) | {"params_after_step": None}
    assert single is not None
    # Errors below one rounding of the result are luck, also those of the single device.
    least = torch.finfo(dtype).eps / 2
    # One step of Adam turns by the sign of a gradient, which rounding alone decides for some: parameters are shown.
    return {c: None if c == "params_after_step" else max(ROUGH * single[c], least) for c in CATEGORIES}


def zero_gradients(exact: Tensors) -> frozenset[str]:
    """Names of the gradients that count as zero in a float64 run: in a narrower dtype they are rounding errors."""
    sizes = {name: _magnitude(t) for name, t in exact["grads"].items()}
    return frozenset(name for name, size in sizes.items() if size <= TINY_GRADIENT * max(sizes.values()))


def differences(found: Tensors, expected: Tensors, zeros: frozenset[str] = frozenset()) -> list[Difference]:
    """One for each tensor of either run. zeros: gradients that are measured against the model's largest one."""
    largest = max((_magnitude(t) for t in expected["grads"].values()), default=0.0)
    floor = TINY_GRADIENT * largest
    unmoved = zero_gradients(expected)
    out = []
    for category in CATEGORIES:
        names = [*expected[category], *(n for n in found[category] if n not in expected[category])]
        for name in names:
            mine, theirs = found[category].get(name), expected[category].get(name)
            scale = floor
            if category == "params_after_step" and name in unmoved:
                scale = max(floor, LEARNING_RATE)
            elif category == "grads" and name in zeros:
                scale = largest
            out.append(_difference(category, name, mine, theirs, scale))
    return out


def _difference(
    category: str, name: str, found: torch.Tensor | None, expected: torch.Tensor | None, floor: float
) -> Difference:
    if found is None or expected is None:
        # No gradient at all and a gradient of zeros are the same update.
        held = found if found is not None else expected
        nothing = category == "grads" and held is not None and not held.any()
        return Difference(category, name, 0.0 if nothing else math.inf)
    if found.shape != expected.shape:
        return Difference(category, name, math.inf)
    if not expected.numel():
        return Difference(category, name, 0.0)
    wide = torch.complex128 if expected.is_complex() or found.is_complex() else torch.float64
    a, b = found.detach().to(expected.device, wide), expected.detach().to(wide)
    gap = (a - b).abs()
    gap[(a == b) | (a.isnan() & b.isnan())] = 0.0  # equal infinities, and NaN where one device has NaN
    gap[gap.isnan()] = math.inf
    scale = max(_magnitude(expected), floor)
    largest, at = gap.reshape(-1).max(dim=0)
    error = float(largest) / scale if float(largest) and scale else (math.inf if float(largest) else 0.0)
    index = torch.unravel_index(at, gap.shape)
    return Difference(
        category,
        name,
        error,
        tuple(int(i) for i in index),
        float(b.reshape(-1)[at].real),
        float(a.reshape(-1)[at].real),
    )


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return float(torch.where(wide.isfinite(), wide, 0.0).max())


def max_errors(found: list[Difference]) -> dict[str, float]:
    """The largest error in each category."""
    return {c: max((d.error for d in found if d.category == c), default=0.0) for c in CATEGORIES}


def worst_of(found: list[Difference], bounds: Mapping[str, float | None]) -> Difference | None:
    """The tensor whose error is largest against its bound; None when nothing differs."""

    def rank(d: Difference) -> float:
        bound = bounds[d.category]
        return d.error / bound if bound is not None else 0.0

    return max((d for d in found if d.error > 0), key=rank, default=None)
