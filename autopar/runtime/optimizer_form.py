"""The form in which torch's optimizers step the parameters of a parallel module, where the user leaves it to torch.

torch steps plain tensors on GPUs with `foreach` unless told otherwise, but takes `DTensor`s one by one: nine ops a
parameter, each through DTensor's dispatch (50 ms a step for 100 parameters).

What enters: the parameters of a parallel module. What leaves: nothing; during a step of Adam, AdamW or SGD a group
that says neither `foreach` nor `fused` says one of them, and nothing again afterwards. Numbers are the same but for
rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FORMS = {
    torch.optim.Adam: {"cpu": "fused", "cuda": "foreach"},
    torch.optim.AdamW: {"cpu": "fused", "cuda": "foreach"},
    torch.optim.SGD: {"cpu": "foreach", "cuda": "foreach"},
}
"""By type of device. On a CPU the temporaries of Adam's `foreach`, as large as the parameters, cost more than it saves.
"""


class Forms:
    """The parameters of all parallel modules, looked up when an optimizer steps."""

    def __init__(self) -> None:
        self._refs: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._changed: list[tuple[dict[str, Any], str]] = []
        self._hooked = False

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        self._refs.update({id(p): p for p in parameters if isinstance(p, DTensor)})
        if self._refs and not self._hooked:
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
            self._hooked = True

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._after()  # of a step that raised
        if type(optimizer) not in FORMS:  # a subclass may read its groups otherwise
            return
        for group in optimizer.param_groups:
            form = self._form(optimizer, group)
            if form is not None:
                group[form] = True
                self._changed.append((group, form))

    def _after(self, *_: object) -> None:
        for group, form in self._changed:
            group[form] = None
        self._changed.clear()

    def _form(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
        given = any(group.get(k) for k in ("capturable", "differentiable")) or isinstance(group["lr"], torch.Tensor)
        if given or group["foreach"] is not None or group["fused"] is not None:
            return None
        parameters = group["params"]
        ours = all(self._refs.get(id(p)) is p and p.is_floating_point() for p in parameters)
        if not ours or len({(id(p.device_mesh), p.device.type, p.dtype) for p in parameters}) != 1:
            return None
        form = FORMS[type(optimizer)].get(parameters[0].device.type)
        steps = [optimizer.state[p]["step"] for p in parameters if "step" in optimizer.state.get(p, ())]
        if form == "fused" and any(s.dtype != torch.float32 for s in steps):  # as its kernel reads them
            return None
        return form


STEPPED = Forms()
