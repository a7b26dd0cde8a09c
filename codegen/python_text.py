"""The program of one rank as a Python file that a person can read, and that runs.

Enters: the program after the shard pass, its mesh and the rank. Leaves: the file's text. It imports torch, and of
autopar the differentiable moves of `autopar.runtime.moves` (and the module of whatever other runtime function the
program calls); `forward` takes this rank's parameters by name and its inputs in order. Gradients come from autograd:
each move's backward is the one of the table of transitions. Refused (`UnsupportedOpError`): an op that no import names,
such as a user's own `autograd.Function`.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from autopar.dump import layout_text
from autopar.errors import UnsupportedOpError
from autopar.mesh import LogicalMesh
from autopar.program import Program, Source, record

_OF_MODULE = {
    **dict.fromkeys(("key", "dropout", "keep", "uniform", "normal"), "random_ops"),
    "ctc_loss": "ctc",
}
"""Ops of ours that an exported file can run -> the module of `autopar.runtime` that defines them."""


def python_text(program: Program, mesh: LogicalMesh, rank: int) -> str:
    """The text of the file.

    Raises:  UnsupportedOpError: an op that cannot be imported by name.
    """
    return _File(program, mesh, rank).text()


class _File:
    def __init__(self, program: Program, mesh: LogicalMesh, rank: int) -> None:
        self.program, self.mesh, self.rank = program, mesh, rank
        self.axes = tuple(a.name for a in mesh.axes)
        self.imports: dict[str, set[str]] = {"autopar.runtime.moves": {"AxisGroup", "use_groups"}}
        self.names: dict[Node, str] = {}
        self.taken = {"torch", "aten", "dist", "parameters", "inputs", "forward", "groups", "inf", "nan"}

    def text(self) -> str:
        body = list(self._body())
        return "\n".join((*self._head(), *body)) + "\n"

    def _head(self) -> Iterator[str]:
        program, mesh = self.program, self.mesh
        at = ", ".join(f"{a.name} {i} of {a.size}" for a, i in zip(mesh.axes, mesh.coordinate(self.rank), strict=True))
        yield f'"""{program.name}: the program of rank {self.rank} of {mesh.size}{f" ({at})" if at else ""}.'
        yield ""
        yield "`forward(parameters, inputs)` takes this rank's part of each parameter and buffer by name (constants"
        yield "too: tensors that forward takes from elsewhere), and of each input in order; under"
        yield "`use_groups(groups())` it gives its part of each output. Autograd gives the gradients. A comment shows"
        yield "how a value lies on the mesh, where it is not the same on every rank."
        yield '"""'
        yield ""
        yield "import torch"
        yield "import torch.distributed as dist"
        yield ""
        for module, names in sorted(self.imports.items()):
            yield f"from {module} import {', '.join(sorted(names))}"
        yield ""
        yield "aten = torch.ops.aten"
        yield ""
        yield "AXES = {"
        for place, axis in enumerate(mesh.axes):
            lines = {mesh.group(place, mesh.coordinate(r)) for r in range(mesh.size)}
            yield f'    "{axis.name}": {[list(line) for line in sorted(lines)]},'
        yield "}"
        yield '"""For each axis the ranks that differ on that axis alone."""'
        for kind, word in (
            ("parameter", "PARAMETERS"),
            ("buffer", "BUFFERS"),
            ("constant", "CONSTANTS"),
            ("input", "INPUTS"),
        ):
            found = self._placeholders(kind)
            if not found:
                continue
            yield ""
            yield f"{word} = {{"
            for node, source in found:
                value = node.meta["val"]
                shape = tuple(value.shape)
                layout = layout_text(record(node), self.axes)
                comment = f"  # {layout}" if layout not in ("", "[I]") else ""
                yield f'    "{source.path}": ({shape}, {value.dtype}),{comment}'
            yield "}"
        yield ""
        yield ""
        yield "def groups():"
        yield '    """The process groups behind the axes, for this rank; every rank calls this once."""'
        yield "    found = {}"
        yield "    for axis, lines in AXES.items():"
        yield "        for ranks in lines:"
        yield "            group = dist.new_group(ranks)"
        yield f"            if {self.rank} in ranks:"
        yield f"                found[axis] = AxisGroup(group, len(ranks), ranks.index({self.rank}))"
        yield "    return found"
        yield ""
        yield ""

    def _placeholders(self, *kinds: str) -> list[tuple[Node, Source]]:
        pairs = zip(self.program.placeholders, self.program.sources, strict=True)
        return [(n, s) for n, s in pairs if s.kind in kinds]

    def _body(self) -> Iterator[str]:
        yield "def forward(parameters, inputs):"
        for node, source in self._placeholders("parameter", "buffer", "constant"):
            if node.users:
                yield f"    {self._name(node, source.path)} = parameters[{source.path!r}]"
        tensors = self._placeholders("input")
        if tensors:
            names = [self._name(n, s.path) for n, s in tensors]
            yield f"    {', '.join(names)}{',' if len(names) == 1 else ''} = inputs"
        block = ""
        order = {n: i for i, n in enumerate(self.program.graph.nodes)}
        last = {n: max(n.users, key=order.__getitem__, default=None) for n in order}
        for node in self.program.calls:
            known = record(node)
            if known.block != block:
                block = known.block
                yield ""
                yield f"    # {block}"
            yield f"    {self._name(node, known.op)} = {self._call(node)}{self._comment(node)}"
            gone = [self.names[i] for i in node.all_input_nodes if last[i] is node and i.op == "call_function"]
            if gone:
                yield f"    del {', '.join(gone)}"
        values = self.program.output.args[0]
        assert isinstance(values, (tuple, list))
        yield f"    return {self._value(tuple(values))}"

    def _name(self, node: Node, path: str) -> str:
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

    def _comment(self, node: Node) -> str:
        layout = layout_text(record(node), self.axes)
        where = record(node).where.replace("\\", "/").rpartition("/")[2]
        parts = [p for p in (layout if layout != "[I]" else "", where) if p]
        return f"  # {' '.join(parts)}" if parts else ""

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            whole, item = node.args
            return f"{self._value(whole)}[{self._value(item)}]"
        given = [self._value(a) for a in node.args] + [f"{k}={self._value(v)}" for k, v in node.kwargs.items()]
        return f"{self._function(node)}({', '.join(given)})"

    def _function(self, node: Node) -> str:
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

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(self._value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)
