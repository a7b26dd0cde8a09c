"""Functions as graphs of ATen ops, and as kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.code import Code
from autopar.codegen.demand import known
from autopar.codegen.group import FusedGroup
from autopar.codegen.views import SPLITS, packet, view_of
from autopar.passes.fuse import one_group


def trace(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The function's ATen ops; gradients that it takes inside are ops like others."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def one_kernel(function: Callable[..., Any], *inputs: Tensor) -> FusedGroup:
    """The whole function as one group.

    Raises: Unfusable: it cannot be one kernel.
    """
    module = trace(function, *inputs)
    calls = [n for n in module.graph.nodes if n.op == "call_function" and view_of(n) is None]
    unknown = [n.name for n in calls if not known(n) and packet(n) not in SPLITS and "getitem" not in n.name]
    assert not unknown, f"no formula for {unknown}"
    return one_group(module, "interpreter")


def with_gradients(function: Callable[..., Tensor], count: int) -> Callable[..., tuple[Tensor, ...]]:
    """function and the gradients of its first `count` inputs for an incoming gradient, the last input."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:count]]
        with torch.enable_grad():
            out = function(*leaves, *inputs[count:-1])
        return (out, *torch.autograd.grad(out, leaves, inputs[-1]))

    return run


__all__ = ["Code", "one_kernel", "trace", "with_gradients"]
