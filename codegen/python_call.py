"""Nodes as lines of Python: what a value is called, how an op is written, what a comment says of it.

Enters: nodes of a program or of a lowered graph, in order. Leaves: text, and the imports and kernels that it needs.
Refused (`UnsupportedOpError`): an op that no import names, such as a user's own `autograd.Function`.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autopar.codegen.group import FusedGroup
from autopar.codegen.python_kernels import Kernels
from autopar.errors import UnsupportedOpError
from autopar.program import record

RESERVED = frozenset("torch aten dist triton tl parameters inputs forward groups axes inf nan".split())
_OF_MODULE = {
    **dict.fromkeys(("key", "dropout", "keep", "uniform", "normal"), "random_ops"),
    **dict.fromkeys(("ctc_loss", "ctc_loss_backward"), "ctc"),
    "part": "transfer",
}
"""Ops of ours that an exported file can run -> the module of `autopar.runtime` that defines them."""
LITERAL_ELEMENTS = 1024
"""The longest constant that is written out."""


class Writer:
    """One function of the file. imports (module -> names) and kernels are shared by all of them."""

    def __init__(
        self, layout_of: Callable[[Node], str], imports: dict[str, set[str]], kernels: Kernels, device: bool
    ) -> None:
        """layout_of: what a comment says of how a value lies. device: tensors made in the function are made on the
        file's `DEVICE`."""
        self.layout_of, self.imports, self.kernels, self.device = layout_of, imports, kernels, device
        self.names: dict[Node, str] = {}
        self.taken: set[str] = set(RESERVED)

    def name(self, node: Node, path: str) -> str:
        """A variable after the user's module and the op: `layers_0_mlp_gelu`."""
        parts = path.split("/")
        words = "_".join(p for p in parts[:-1] if p) if len(parts) > 1 else path
        base = re.sub(r"\W+", "_", words or path).strip("_").lower() or "value"
        if keyword.iskeyword(base) or base[0].isdigit():
            base = f"v_{base}"
        name, number = base, 1
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        self.names[node] = name
        return name

    def comment(self, node: Node, layout: bool = True) -> str:
        known = self.layout_of(node) if layout else ""
        where = record(node).where.replace("\\", "/").rpartition("/")[2]
        parts = [p for p in (known if known != "[I]" else "", where) if p]
        return f"  # {' '.join(parts)}" if parts else ""

    def call(self, node: Node) -> str:
        """The right-hand side."""
        if node.op == "get_attr":
            return self.literal(node)
        if node.op == "call_module":
            module: Any = node.graph.owning_module
            group = module.get_submodule(str(node.target))
            assert isinstance(group, FusedGroup)
            self.imports.setdefault("autopar.runtime.exported", set()).update(self.kernels.helpers(group.code))
            return f"{self.kernels.function(group.code)}({', '.join(map(self.value, node.args))})"
        if node.target is operator.getitem:
            whole, item = node.args
            return f"{self.value(whole)}[{self.value(item)}]"
        given = [self.argument(node, i, a) for i, a in enumerate(node.args)]
        given += [f"{k}={self.value(v)}" for k, v in node.kwargs.items()]
        return f"{self.function(node)}({', '.join(given)})"

    def argument(self, node: Node, place: int, value: Any) -> str:
        """A process group, which lowered collectives know by name, is named by its axis."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and isinstance(value, str):
            if target._schema.arguments[place].name == "group_name":
                return f"axes[{value!r}]"
        return self.value(value)

    def literal(self, node: Node) -> str:
        owner: Any = node.graph.owning_module
        tensor = getattr(owner, str(node.target))
        if tensor.numel() > LITERAL_ELEMENTS:
            raise UnsupportedOpError(
                f"{node.name} ({record(node).where}): a constant of {tensor.numel()} elements; an exported file writes "
                f"out at most {LITERAL_ELEMENTS}: make it a buffer of the model"
            )
        return f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype}, device=DEVICE)"

    def function(self, node: Node) -> str:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            namespace, _, name = target._schema.name.partition("::")
            if namespace == "autopar" and name not in _OF_MODULE:
                raise UnsupportedOpError(
                    f"{node.name} ({record(node).where}): {name} lives in the process that captured"
                )
            if namespace == "autopar":
                self.imports.setdefault("autopar.runtime", set()).add(_OF_MODULE[name])
            overload = f".{target._overloadname}"
            return f"aten.{name}{overload}" if namespace == "aten" else f"torch.ops.{namespace}.{name}{overload}"
        module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
        if module.startswith("autopar.runtime.") or module.startswith("autopar.rules."):
            self.imports.setdefault(module, set()).add(name)
            return name
        if module.startswith("torch"):
            return f"{module}.{name}"
        raise UnsupportedOpError(f"{node.name} ({record(node).where}): {target} cannot be imported by an exported file")

    def value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, torch.device):
            return "DEVICE" if self.device and value.type != "meta" else f"torch.device({str(value)!r})"
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)
