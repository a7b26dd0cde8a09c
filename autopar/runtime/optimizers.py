"""Optimizers that torch cannot run on sharded parameters are refused by name at their first step.

What enters: the parameters of a parallel module. What leaves: nothing. Refused: optimizers that change shards in place
as DTensor cannot (torch 2.13 fails inside its dispatch); where no parameter is cut they may run. All others of
torch.optim run as on one device; tests hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import PlanError

REFUSED = {
    "Adafactor": "takes the root of a norm in place, which DTensor cannot do to a shard's",
    "Rprop": "writes by index into a gradient, which DTensor cannot do to a shard's",
}
"""Class of torch.optim -> why."""
REFUSED_FUSED = ("SGD", "Adagrad")
"""Whose fused kernels DTensor does not know, cut or whole."""


class Sharded:
    """The parameters of all parallel modules, looked up when an optimizer steps."""

    def __init__(self) -> None:
        self._refs: weakref.WeakValueDictionary[int, DTensor] = weakref.WeakValueDictionary()
        self._hooked = False

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        ours = [p for p in parameters if isinstance(p, DTensor)]
        self._refs.update({id(p): p for p in ours})
        if ours and not self._hooked:
            register_optimizer_step_pre_hook(self._check)
            self._hooked = True

    def _is_ours(self, parameter: torch.Tensor) -> bool:
        return self._refs.get(id(parameter)) is parameter

    def _check(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        ours = [p for group in optimizer.param_groups for p in group["params"] if self._is_ours(p)]
        names = {c.__name__ for c in type(optimizer).__mro__}
        if ours and names.intersection(REFUSED_FUSED) and any(group.get("fused") for group in optimizer.param_groups):
            raise PlanError(
                f"{type(optimizer).__name__}(fused=True) cannot step DTensors in this torch: leave fused out, or pass "
                "foreach=True"
            )
        self._refuse_state(optimizer, ours)
        why = next((REFUSED[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in REFUSED), None)
        if why is None:
            return
        if any(not placement.is_replicate() for p in ours for placement in p.placements):
            raise PlanError(
                f"{type(optimizer).__name__} cannot step sharded parameters: it {why}; use AdamW, SGD or Muon, or pin "
                "zero=0 and tp=1"
            )

    def _refuse_state(self, optimizer: torch.optim.Optimizer, ours: Iterable[torch.Tensor]) -> None:
        """What was loaded belongs to other parameters: of one device, or of other stages of a pipeline."""
        name = type(optimizer).__name__
        for p in ours:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor):
                    raise PlanError(
                        f"{name}: {key} is one device's, and the parameter a DTensor; load it by "
                        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict(m, optimizer, state, "
                        "options=StateDictOptions(full_state_dict=True))"
                    )
            if any("lr" in optimizer.defaults and "lr" not in group for group in optimizer.param_groups):
                raise PlanError(
                    f"{name} was loaded with groups of parameters of other stages of a pipeline: pass "
                    "options=StateDictOptions(flatten_optimizer_state_dict=True) where it is saved and loaded"
                )


SHARDED = Sharded()
