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


class Sharded:
    """The cut parameters of all parallel modules, looked up when an optimizer steps."""

    def __init__(self) -> None:
        self._refs: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._hooked = False

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        cut = [p for p in parameters if isinstance(p, DTensor) and any(not x.is_replicate() for x in p.placements)]
        self._refs.update({id(p): p for p in cut})
        if cut and not self._hooked:
            register_optimizer_step_pre_hook(self._check)
            self._hooked = True

    def _check(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        why = next((REFUSED[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in REFUSED), None)
        if why is None:
            return
        if any(self._refs.get(id(p)) is p for group in optimizer.param_groups for p in group["params"]):
            raise PlanError(
                f"{type(optimizer).__name__} cannot step sharded parameters: it {why}; use AdamW, SGD or Muon, or pin "
                "zero=0 and tp=1"
            )


SHARDED = Sharded()
