"""Mixed precision: in which dtype a model computes, in which its gradients are reduced, and what is stored.

Enters: `precision=` of `parallelize`, and the model. Leaves: a frozen `Precision`, and the copy of the model that is
captured under it (parameters without memory, in the dtype that the ops read). Refused, with a `PlanError`: other words,
dtypes that are none of floating point, and dtypes that the device lacks.

The stored parameters are the master weights, which the optimizer updates. A program casts a shard before it gathers it,
so half the bytes are sent; gradients are cast before they are reduced, and come back in the master's dtype.

    precision                 compute       reduce           master weights       inputs
    "fp32" "bf16" "fp16"      that          float32          at least float32     cast to compute
    MixedPrecisionPolicy      param_dtype   reduce_dtype     as the model's       as cast_forward_inputs says
                                            (param_dtype)

In a pipeline the gradients of micro-batches are added up, and reduced once, in the master's dtype.
All parameters are cast, those of norms too; buffers stay as they are, as under FSDP2. `output_dtype` is the dtype of
the outputs. With fp16 scale the loss by `torch.amp.GradScaler`: it agrees on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import PlanError

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """See the module docstring; `None` leaves a dtype as it is."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    at_least: torch.dtype | None = None
    """The narrowest dtype of a master weight."""

    @property
    def name(self) -> str | None:
        """What the cost model calls it."""
        return next((name for name, dtype in NAMES.items() if dtype == self.compute), None)

    def master(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a parameter of the model is stored in."""
        wider = self.at_least is not None and dtype.is_floating_point and dtype.itemsize < self.at_least.itemsize
        return self.at_least if wider and self.at_least is not None else dtype

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the ops read a parameter in."""
        return self.compute if self.compute is not None and dtype.is_floating_point else dtype

    def inputs(self, values: Any) -> Any:
        """A nest of inputs as the program takes them."""
        return _floats_to(values, self.compute) if self.cast_inputs else values

    def outputs(self, values: Any) -> Any:
        """A nest of outputs as the user gets them."""
        return _floats_to(values, self.output)


def parse_precision(value: Any) -> Precision | None:
    """Of a name or a `MixedPrecisionPolicy`. Raises: PlanError."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in NAMES:
            raise PlanError(f"precision={value!r}: must be fp32, bf16, fp16 or a MixedPrecisionPolicy")
        return Precision(NAMES[value], torch.float32, at_least=torch.float32)
    if not hasattr(value, "param_dtype") or not hasattr(value, "reduce_dtype"):
        raise PlanError(f"precision={value!r}: must be fp32, bf16, fp16 or a MixedPrecisionPolicy")
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(value, field, None)
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise PlanError(f"precision {field}={dtype}: must be a floating-point dtype of 2 bytes or more")
    compute = value.param_dtype
    output = getattr(value, "output_dtype", None)
    return Precision(compute, value.reduce_dtype or compute, output, getattr(value, "cast_forward_inputs", True))


def check_device(precision: Precision | None, device: torch.device) -> None:
    """Raises: PlanError where the device has no such dtype."""
    for dtype in (precision.compute, precision.reduce) if precision else ():
        lacks = dtype == torch.float64 and device.type == "mps"
        if device.type == "cuda" and dtype == torch.bfloat16:
            lacks = not torch.cuda.is_bf16_supported(including_emulation=False)
        if lacks:
            raise PlanError(f"precision: {dtype} is not what {device.type} devices of this kind compute in; use fp16")


def skeleton(model: nn.Module, precision: Precision | None = None) -> nn.Module:
    """A copy of the module to capture; its parameters have shapes, devices and the dtypes that ops read, but no
    memory."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        dtype = precision.computed(p.dtype) if precision else p.dtype
        if p.is_meta and dtype == p.dtype:
            continue
        empty = torch.empty_like(p.detach(), dtype=dtype)
        if not p.is_meta:
            empty.untyped_storage().resize_(0)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return deep_copy(model, memo)


def deep_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """`copy.deepcopy` of a module, also after a forward that kept its results; an attribute that cannot be copied (a
    lock, a handle) is shared. memo: what stands for parts of the module, by id."""
    memo = memo or {}
    with _results_copied():
        try:
            return copy.deepcopy(model, dict(memo))
        except (TypeError, RuntimeError, NotImplementedError):
            pass
        for value in (v for m in model.modules() for v in vars(m).values()):
            try:
                copy.deepcopy(value, dict(memo))
            except (TypeError, RuntimeError, NotImplementedError):
                if not any(value is table for m in model.modules() for table in (m._modules, m._parameters)):
                    memo[id(value)] = value
        return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _results_copied() -> Iterator[None]:
    """Copy what a forward left on the module (weight_norm's weight, a kept activation), which torch refuses to, as
    values without a gradient."""
    original = torch.Tensor.__deepcopy__

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not tensor.is_leaf:
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return original(tensor, memo)  # type: ignore[no-untyped-call]

    torch.Tensor.__deepcopy__ = copied  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__deepcopy__ = original  # type: ignore[method-assign]


def masters(model: nn.Module, state: dict[str, torch.Tensor], precision: Precision) -> dict[str, torch.Tensor]:
    """The model's own parameters, in the dtypes they are stored in, for those of its skeleton in a captured state."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return {path: own[path].detach().to(precision.master(own[path].dtype)) for path in state if path in own}


def _floats_to(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)
