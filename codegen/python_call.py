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
from torch.fx import Graph, Node

from autopar.codegen.group import FusedGroup
from autopar.codegen.python_kernels import Kernels
from autopar.codegen.python_literal import BUILTINS, LITERAL_ELEMENTS, tensor_text, value_text
from autopar.errors import UnsupportedOpError
from autopar.program import record

RESERVED = BUILTINS | set("torch aten triton tl parameters inputs forward groups graphs constants axes".split())
"""Names of every file that no variable may hide; `Writer.reserve` adds those of one file."""
RANDOM = "autopar.runtime.random"
"""Imported where a program draws numbers."""
_OF_MODULE = {
    **dict.fromkeys(("key", "dropout", "keep", "uniform", "normal"), "random_ops"),
    **dict.fromkeys(("ctc_loss", "ctc_loss_backward"), "ctc"),
    "part": "transfer",
}
"""Ops of ours that an exported file can run -> the module of `autopar.runtime` that defines them."""


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

    def reserve(self, graph: Graph) -> None:
        """Before any name is given: what the graph's lines call, and what the file imports, is no variable's name."""
        for node in graph.nodes:
            if node.op == "call_module" or (node.op == "call_function" and node.target is not operator.getitem):
                self.taken.add(self.function(node).partition(".")[0])
        self.taken.update(name for names in self.imports.values() for name in names)

    def name(self, node: Node, path: str) -> str:
        """A variable after the user's module and the op: `layers_0_mlp_gelu`."""
        parts = path.split("/")
        words = "_".join(p for p in parts[:-1] if p) if len(parts) > 1 else path
        base = re.sub(r"\W+", "_", words or path, flags=re.ASCII).strip("_").lower() or "value"
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
        return comment_text(self.layout_of(node) if layout else "", node)

    def call(self, node: Node) -> str:
        """The right-hand side."""
        if node.op == "get_attr":
            return self.literal(node)
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
        text = tensor_text(tensor)
        if text is None:
            raise UnsupportedOpError(
                f"{node.name} ({record(node).where}): a constant of {tensor.numel()} elements; an exported file writes "
                f"out values that are known, at most {LITERAL_ELEMENTS}: make it a buffer of the model"
            )
        return text

    def function(self, node: Node) -> str:
        """What a node calls; the file imports or prints it."""
        target = node.target
        if node.op == "call_module":
            module: Any = node.graph.owning_module
            group = module.get_submodule(str(target))
            assert isinstance(group, FusedGroup)
            self.imports.setdefault("autopar.runtime.exported", set()).update(self.kernels.helpers(group.code))
            return self.kernels.function(group.code)
        if isinstance(target, torch._ops.OpOverload):
            namespace, _, name = target._schema.name.partition("::")
            if namespace == "autopar" and name not in _OF_MODULE:
                raise UnsupportedOpError(
                    f"{node.name} ({record(node).where}): {name} lives in the process that captured"
                )
            if namespace == "autopar":
                self.imports.setdefault("autopar.runtime", set()).add(_OF_MODULE[name])
            if namespace == "autopar" and name == "key":
                self.imports.setdefault(RANDOM, set()).update({"Draw", "drawing"})
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
        return value_text(value)


def comment_text(layout: str, node: Node) -> str:
    """How a value lies, if not the same on all ranks, and the line of the model that made the node."""
    where = record(node).where.replace("\\", "/").rpartition("/")[2]
    parts = [p for p in (layout if layout != "[I]" else "", where) if p]
    return f"  # {' '.join(parts)}" if parts else ""
