"""A graph as a Python function that calls torch's ops without detours.

Enters: a graph module. Leaves: its `forward` as a function. Refused: nothing.

The code that torch.fx prints looks up `torch.ops.aten.mm.default` in four steps at every call, and then goes through a
Python method of the op: 3 of the 5 microseconds that a small op takes. Here every op is looked up once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

_OP = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def bound(module: GraphModule) -> Callable[..., Any]:
    """The module's forward; a change of its graph is not seen any more."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def name_of(found: re.Match[str]) -> str:
        op = getattr(getattr(getattr(torch.ops, found[1]), found[2]), found[3])
        call = getattr(op, "_op", op)  # what the op's own __call__ calls
        name = f"_call_{found[1]}_{found[2]}_{found[3]}"
        while names.setdefault(name, call) is not call:
            name += "_"
        return f"{name}("

    source = _OP.sub(name_of, code.src)
    exec(compile(source, f"<graph of {type(module).__name__}>", "exec"), names)
    forward: Callable[..., Any] = functools.partial(names["forward"], module)
    return forward
