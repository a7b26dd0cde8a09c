"""AdamW with one kernel a shard: parameter, gradient and both moments are read once, and written in place.

Enters: parameters, plain or `DTensor`s of a parallel module, of which each rank steps its own shard. Leaves: what
`torch.optim.AdamW` leaves, its state under the same names, so that either can load the other's checkpoint. What the
kernel does not do (amsgrad, maximize, sparse or complex gradients, shards on a CPU) is left to torch.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.code import Code
from autopar.codegen.group import run
from autopar.codegen.load import mode_of
from autopar.passes.fuse import one_group


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, its step in kernels.

    Args: as of `torch.optim.AdamW`. kernels: "auto" (on GPUs), "on" (elsewhere in Triton's interpreter), "off".
    Source: Loshchilov & Hutter 2019, algorithm 2.
    """

    def __init__(self, params: Any, *args: Any, kernels: str = "auto", **options: Any) -> None:
        super().__init__(params, *args, **options)
        self.kernels = kernels

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        left: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self._stepped(parameter, group):
                    left.append((parameter, parameter.grad))
        done = [p for group in self.param_groups for p in group["params"] if all(p is not q for q, _ in left)]
        grads = [(p, p.grad) for p in done]
        try:
            for parameter in done:
                parameter.grad = None  # torch's step passes over these
            if left:
                super().step()
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
        return loss

    def _stepped(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Step a parameter by its kernel, if it has one."""
        shard, grad = _local(parameter), _local(parameter.grad)
        mode = mode_of(self.kernels, shard.device.type)
        plain = not (group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor))
        if mode is None or not plain or shard.dtype not in (torch.float32, torch.float64) or not shard.numel():
            return False
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        values = (shard, grad, _local(state["exp_avg"]), _local(state["exp_avg_sq"]))
        if grad.is_sparse or not all(v.is_contiguous() for v in values):
            return False
        state["step"] += 1
        numbers = _numbers(group, float(state["step"]), shard)
        flat = [v.view(-1) for v in values]
        code, order = _kernel(shard.numel(), shard.dtype, grad.dtype, mode)
        given = (*flat, *numbers)
        run(code, tuple(given[i] for i in order), interpret=mode == "interpreter", into=(flat[0], flat[2], flat[3]))
        return True


def update(
    x: Tensor, grad: Tensor, mean: Tensor, square: Tensor, keep: Tensor, a: Tensor, b: Tensor, c: Tensor, rate: Tensor,
    root: Tensor, eps: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A step of elements: x keep - rate mean / (sqrt(square) / root + eps), of the new moments. a: 1 - beta1;
    b: beta2; c: 1 - beta2."""
    grad = grad.to(x.dtype)
    mean = mean + (grad - mean) * a
    square = square * b + grad * grad * c
    return x * keep - rate * mean / (square.sqrt() / root + eps), mean, square


def _numbers(group: dict[str, Any], step: float, like: Tensor) -> tuple[Tensor, ...]:
    """What `update` takes beside the shards, as tensors: they change with the step, and the kernel must not."""
    beta1, beta2 = group["betas"]
    rate = group["lr"] / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    keep = 1 - group["lr"] * group["weight_decay"]
    return torch.tensor(
        [keep, 1 - beta1, beta2, 1 - beta2, rate, root, group["eps"]], dtype=like.dtype, device=like.device
    ).unbind(0)


@cache
def _kernel(numel: int, dtype: torch.dtype, grad: torch.dtype, mode: str) -> tuple[Code, tuple[int, ...]]:
    """The kernel of shards of so many elements (the blocks of a model share it), and which of the arguments of `update`
    it is handed, in order."""
    shards = [torch.empty(numel, dtype=grad if i == 1 else dtype, device="meta") for i in range(4)]
    numbers = [torch.empty((), dtype=dtype, device="meta") for _ in range(7)]
    module = make_fx(update, tracing_mode="fake")(*shards, *numbers)
    group = one_group(module, mode)
    places = [n.name for n in module.graph.find_nodes(op="placeholder")]
    return group.code, tuple(places.index(n.name) for n in group.aten.graph.find_nodes(op="placeholder"))


def _local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
