"""The program of one rank as a Python file that a person can read, and that runs.

Enters: the program after the shard pass, its mesh and the rank; and its lowered graphs, when the backward is to stand
in the file, too. Leaves: the file's text. It imports torch, and of autopar `autopar.runtime.exported` (groups and
kernel arguments) and, where gradients come from autograd, the differentiable moves of `autopar.runtime.moves`; where
random numbers are drawn, `autopar.runtime.random`; and the module of whatever other runtime function the program calls.
`forward` takes this rank's parameters by name and its inputs in order. Refused (`UnsupportedOpError`): an op that no
import names, such as a user's own `autograd.Function`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from textwrap import TextWrapper

from torch.fx import Graph, GraphModule, Node

from autopar.codegen.python_call import RANDOM, Writer, comment_text
from autopar.codegen.python_kernels import Kernels
from autopar.codegen.python_literal import LITERAL_ELEMENTS, tensor_text
from autopar.dump import layout_text
from autopar.dump_lowered import of_user_value
from autopar.mesh import LogicalMesh
from autopar.passes.lower import Graphs
from autopar.program import Program, Source, record
from autopar.runtime.backward_split import Split

_LINES = TextWrapper(
    110, initial_indent=8 * " ", subsequent_indent=12 * " ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True, eq=False)
class Traced:
    """graphs: forward and backward. differentiable: the results that get a gradient, in order. halves: of the backward,
    where weight gradients may be made later: for inputs, for weights, and how they fit together."""

    graphs: Graphs
    differentiable: tuple[int, ...]
    halves: tuple[GraphModule, GraphModule, Split] | None = None


def python_text(
    program: Program, mesh: LogicalMesh, rank: int, device: str = "cpu", graphs: Traced | None = None
) -> str:
    """The text of the file.

    Args:    device: what the file's tensors are made on. graphs: of this program; without them autograd differentiates.
    Raises:  UnsupportedOpError: an op that cannot be imported by name.
    """
    return _Whole(program, mesh, rank, device, graphs).text()


TABLES = {"PARAMETERS": "parameter", "BUFFERS": "buffer", "CONSTANTS": "constant", "INPUTS": "input"}
"""The tables of a file -> the kind of source that each lists."""


class File(ABC):
    """What all exported files have: a head with the axes and what the program reads, kernels, functions."""

    def __init__(self, program: Program, mesh: LogicalMesh, rank: int, device: str) -> None:
        self.program, self.mesh, self.rank, self.device = program, mesh, rank, device
        self.axes = tuple(a.name for a in mesh.axes)
        self.kernels = Kernels()
        self.imports: dict[str, set[str]] = {
            "autopar.runtime.exported": {"check", "connect"},
            "autopar.runtime.moves": {"use_groups"},
        }

    def text(self) -> str:
        body = list(self.body())
        kernels = list(self.kernels.text())
        if kernels and self.device == "cpu":
            self.imports["autopar.runtime.exported"].add("need_interpreter")
        return "\n".join((*self._head(bool(kernels)), *kernels, *body)) + "\n"

    @abstractmethod
    def body(self) -> Iterator[str]:
        """What follows the kernels; with `forward`."""

    def about(self) -> Iterator[str]:
        """What the docstring says after its first line."""
        yield "`forward(parameters, inputs)` takes this rank's part of each parameter and buffer by name, and of each"
        yield "input in order; under `use_groups(groups())` it gives its part of each output. A comment shows how a"
        yield "value lies on the mesh, where it is not the same on every rank, and the line of the model that made it."
        if len(self.constants) < len(self._placeholders("constant")):
            yield "`parameters` holds the tensors of CONSTANTS, too."
        if self.new_values:
            yield "The outputs in NEW_VALUES are what forward writes to buffers or parameters; the caller keeps them."
        if RANDOM in self.imports:
            yield "It draws random numbers: call it under `drawing(Draw(seed, stream))`, too, with the same seed and"
            yield "stream on every rank and another stream in each call (a parallelized module takes 2 k in its k-th"
            yield "call in training, counted from 0)."
        if self.interpreted:
            yield "Triton's interpreter runs its kernels: set TRITON_INTERPRET=1 before Triton is imported."

    @cached_property
    def constants(self) -> dict[str, str]:
        """The tensors that forward makes and the file writes out, as text."""
        found = {}
        for node, source in self._placeholders("constant"):
            value = self.program.state[source.path]
            text = tensor_text(value) if value.shape == node.meta["val"].shape else None
            if text is not None:
                found[source.path] = text
        return found

    @property
    def new_values(self) -> dict[int, str]:
        """Outputs that are new values -> of what."""
        return {i: s.path for i, s in enumerate(self.program.sinks) if s.kind == "state"}

    @property
    def interpreted(self) -> bool:
        """Are there kernels, for a CPU? Known when all functions are printed."""
        return "need_interpreter" in self.imports["autopar.runtime.exported"]

    def writer(self) -> Writer:
        return Writer(self.layout_of, self.imports, self.kernels, device=True)

    def _head(self, kernels: bool) -> Iterator[str]:
        program, mesh = self.program, self.mesh
        at = ", ".join(f"{a.name} {i} of {a.size}" for a, i in zip(mesh.axes, mesh.coordinate(self.rank), strict=True))
        yield f'"""{program.name}: the program of rank {self.rank} of {mesh.size}{f" ({at})" if at else ""}.'
        yield ""
        yield from self.about()
        yield '"""'
        yield ""
        yield "import torch"
        if kernels:
            yield "import triton"
            yield "import triton.language as tl"
        yield ""
        for module, names in sorted(self.imports.items()):
            yield f"from {module} import {', '.join(sorted(names))}"
        yield ""
        yield "aten = torch.ops.aten"
        yield f"DEVICE = torch.device({self.device!r})"
        if self.interpreted:
            yield "need_interpreter()"
        yield ""
        yield "AXES = {"
        for place, axis in enumerate(mesh.axes):
            lines = {mesh.group(place, mesh.coordinate(r)) for r in range(mesh.size)}
            yield f"    {axis.name!r}: {[list(line) for line in sorted(lines)]},"
        yield "}"
        yield '"""For each axis the ranks that differ on that axis alone."""'
        for name, kind in TABLES.items():
            yield from self._table(name, kind)
        if self.new_values:
            yield ""
            yield "NEW_VALUES = {"
            yield from (f"    {place}: {path!r}," for place, path in self.new_values.items())
            yield "}"
            yield '"""The outputs, by place, that are new values of buffers or parameters."""'
        yield ""
        yield ""
        yield "def groups():"
        yield '    """The process groups behind the axes, for this rank; every rank calls this once."""'
        yield f"    return connect(AXES, {self.rank}, {mesh.size})"
        if self.constants:
            yield ""
            yield ""
            yield "def constants():"
            yield '    """Tensors that forward makes or takes from outside the model; `parameters` may hold others."""'
            yield "    return {"
            for path, text in self.constants.items():
                yield from _LINES.wrap(f"{path!r}: {text},")
            yield "    }"

    def _table(self, name: str, kind: str) -> Iterator[str]:
        """Shapes and dtypes of what the caller gives; nothing where there is none."""
        found = self._given(kind)
        if not found:
            return
        yield ""
        yield f"{name} = {{"
        for node, source in found:
            value = node.meta["val"]
            used = next(iter(node.users), node) if kind == "constant" else node
            comment = comment_text(self.layout_of(node), used)
            yield f"    {source.path!r}: ({tuple(value.shape)}, {value.dtype}),{comment}"
        yield "}"
        if kind == "constant":
            yield '"""Tensors that forward makes, or takes from outside the model, where the comment says. They have no'
            yield f'values here: more than {LITERAL_ELEMENTS} elements, or a model that was exported without values."""'

    def _given(self, kind: str) -> list[tuple[Node, Source]]:
        """What the caller gives of a kind."""
        return [(node, source) for node, source in self._placeholders(kind) if source.path not in self.constants]

    def forward_head(self) -> Iterator[str]:
        """The first lines of `forward`."""
        named = ", ".join(f"**{name}" for name, kind in TABLES.items() if kind != "input" and self._given(kind))
        yield ""
        yield ""
        yield "def forward(parameters, inputs):"
        if self.constants:
            yield "    parameters = {**constants(), **parameters}"
        yield f"    check(parameters, {{{named}}}, inputs, {'INPUTS' if self._given('input') else '{}'})"

    def layout_of(self, node: Node) -> str:
        return layout_text(record(node), self.axes)

    def _placeholders(self, *kinds: str) -> list[tuple[Node, Source]]:
        pairs = zip(self.program.placeholders, self.program.sources, strict=True)
        return [(n, s) for n, s in pairs if s.kind in kinds]


class _Whole(File):
    """A program that is one function."""

    def __init__(self, program: Program, mesh: LogicalMesh, rank: int, device: str, graphs: Traced | None) -> None:
        super().__init__(program, mesh, rank, device)
        self.graphs = graphs

    def body(self) -> Iterator[str]:
        return self._graphs(self.graphs) if self.graphs is not None else self._forward()

    def about(self) -> Iterator[str]:
        yield from super().about()
        yield "Autograd gives the gradients." if self.graphs is None else "Its backward is `backward_graph`."

    def _forward(self) -> Iterator[str]:
        """One function under autograd."""
        write = self.writer()
        write.reserve(self.program.graph)
        yield from self.forward_head()
        for node, source in self._placeholders("parameter", "buffer", "constant"):
            if node.users:
                yield f"    {write.name(node, source.path)} = parameters[{source.path!r}]"
        tensors = self._placeholders("input")
        if tensors:
            names = [write.name(n, s.path) for n, s in tensors]
            yield f"    {', '.join(names)}{',' if len(names) == 1 else ''} = inputs"
        yield from lines_of(self.program.graph, write, lambda node: True)
        values = self.program.output.args[0]
        assert isinstance(values, (tuple, list))
        yield f"    return {write.value(tuple(values))}"

    def _graphs(self, traced: Traced) -> Iterator[str]:
        """Two functions, and one that is both to autograd."""
        sources, graphs = self.program.sources, traced.graphs
        forward, saved = self.writer(), self.writer()
        places = graphs.forward.graph.find_nodes(op="placeholder")
        paths = {n.name: s.path for n, s in zip(places, sources, strict=True)}
        laid = of_user_value(self.program)
        yield from function_lines("forward_graph", graphs.forward.graph, forward, paths, laid)
        yield from function_lines("backward_graph", graphs.backward.graph, saved, paths, laid)
        yield ""
        yield ""
        yield f"graphs = Graphs(forward_graph, backward_graph, {graphs.results}, {traced.differentiable})"
        self.imports["autopar.runtime.exported"].add("Graphs")
        yield from self.forward_head()
        yield "    return graphs("
        place = 0
        for source in sources:
            yield f"        {f'inputs[{place}]' if source.kind == 'input' else f'parameters[{source.path!r}]'},"
            place += source.kind == "input"
        yield "    )"


def function_lines(
    name: str, graph: Graph, write: Writer, paths: Mapping[str, str], laid: Callable[[Node], bool], axes: bool = True
) -> Iterator[str]:
    """A graph as a function of its placeholders. paths: what they are called. axes: groups' names are its first."""
    write.reserve(graph)
    yield ""
    yield ""
    yield f"def {name}("
    if axes:
        yield "    axes,"
    for node in graph.find_nodes(op="placeholder"):
        path = "gradient" if "tangents" in node.name else paths.get(node.name) or _path(node)
        yield f"    {write.name(node, path)},  # {_shape(node)}"
    yield "):"
    yield from lines_of(graph, write, laid)
    values = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(values, (tuple, list))
    yield "    return ("
    yield from (f"        {write.value(v)}," for v in values)
    yield "    )"


def lines_of(graph: Graph, write: Writer, laid: Callable[[Node], bool]) -> Iterator[str]:
    """A line for each op; what is not read again is let go. laid: is a node's layout its own?"""
    block = ""
    order = {n: i for i, n in enumerate(graph.nodes)}
    last = {n: max(n.users, key=order.__getitem__, default=None) for n in order}
    made = {n for n in order if n.op not in ("placeholder", "output")}
    for node in (n for n in order if n in made):
        known = record(node)
        if known.block != block:
            block = known.block
            yield ""
            yield f"    # {block or 'of no block'}"
        yield f"    {write.name(node, _path(node))} = {write.call(node)}{write.comment(node, laid(node))}"
        gone = [write.names[i] for i in node.all_input_nodes if last[i] is node and i in made]
        if gone:
            yield f"    del {', '.join(gone)}"


def _path(node: Node) -> str:
    """What a variable is named after."""
    return record(node).op or node.name


def _shape(node: Node) -> str:
    values = node.meta.get("val")
    tensors = values if isinstance(values, (tuple, list)) else [values]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors if t is not None)
