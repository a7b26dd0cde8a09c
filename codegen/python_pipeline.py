"""The pipeline of one rank as a Python file that a person can read, and that runs.

Enters: the stages that the rank runs for each micro-batch, those of the others as what they take and give, and the
schedule; the lowered graphs of its stages, when the backward is to stand in the file, too. Leaves: the file's text: a
function for each different stage, the cut of each micro-batch, tables. Beside what `python_text` says it imports
`autopar.runtime.exported_pipeline`, which runs the schedule. Refused: as there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from autopar.codegen.python_literal import value_text
from autopar.codegen.python_text import File, Traced, function_lines
from autopar.dump import layout_text
from autopar.dump_lowered import of_user_value
from autopar.mesh import LogicalMesh
from autopar.passes.microbatch import AXIS
from autopar.program import Program, Source, record
from autopar.runtime.pipeline_program import Cuts, RankPart, Result, StageProgram, StageValues, Value
from autopar.schedule.table import Schedule

ACTIONS_A_LINE = 16
IN = 8 * " "
WIDTH = 110
RUNTIME = "autopar.runtime.exported_pipeline"


def pipeline_text(
    part: RankPart,
    schedule: Schedule,
    virtual: int,
    mesh: LogicalMesh,
    rank: int,
    device: str = "cpu",
    traced: Callable[[StageProgram], Traced | None] | None = None,
) -> str:
    """The text of the file.

    Args:    virtual: stages a rank. mesh: all axes, the pipeline last where it has one. device: what the file's tensors
             are made on. traced: the graphs of a stage, None for one without gradients; not given: autograd
             differentiates.
    Raises:  UnsupportedOpError: an op that cannot be imported by name.
    """
    return _Pipeline(part, schedule, virtual, mesh, rank, device, traced).text()


class _Pipeline(File):
    def __init__(
        self,
        part: RankPart,
        schedule: Schedule,
        virtual: int,
        mesh: LogicalMesh,
        rank: int,
        device: str,
        traced: Callable[[StageProgram], Traced | None] | None,
    ) -> None:
        super().__init__(part.whole, mesh, rank, device)
        self.part, self.schedule, self.virtual, self.traced = part, schedule, virtual, traced
        piped = bool(mesh.axes) and mesh.axes[-1].role == "pp"
        self.pipeline = mesh.axes[-1].name if piped else ""
        self.inside = tuple(a.name for a in (mesh.axes[:-1] if piped else mesh.axes))
        self.axes = (AXIS, *self.inside)  # as values lie
        self.at = mesh.coordinate(rank)[-1] if piped else 0
        self.functions: dict[tuple[int, str], str] = {}
        """The names of the stages' functions, by what they compute."""
        self.tabled: dict[str, str] = {}
        """The names of the tables of stages, by their text."""
        self.table_of: list[str] = []
        """By micro-batch."""
        self.imports[RUNTIME] = {"Here", "Pipelined", "Value", "output", "stage"}

    def about(self) -> Iterator[str]:
        yield from super().about()
        schedule, count = self.schedule, self.schedule.microbatches
        yield ""
        yield from textwrap.wrap(
            f"A call runs the schedule {schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, {count} "
            f"micro-batch{'es' if count > 1 else ''}, and gives every rank of the pipeline the outputs of all. With a "
            "loss among them a call in training runs all backwards, too, of the loss alone, and its `backward()` hands "
            "the gradients over. This rank's part of it, as work, stage and micro-batch (F: forward, B: backward; I, "
            "W: gradients of inputs, of weights):",
            104,
        )
        yield ""
        row = [f"{a.work}{a.stage}.{a.microbatch}" for a in schedule.rows[self.at]]
        for start in range(0, len(row), ACTIONS_A_LINE):
            yield "    " + " ".join(row[start : start + ACTIONS_A_LINE])

    def layout_of(self, node: Node) -> str:
        known = record(node)
        if known.layout is None or len(known.layout) != len(self.axes):
            return layout_text(known, self.inside)
        names = [known.parts.name(p) if known.parts is not None else repr(p) for p in known.layout]
        pairs = zip(names[1:], self.inside, strict=True)
        return f"[{' '.join(f'{text}@{axis}' for text, axis in pairs if text != 'I') or 'I'}]"

    def _placeholders(self, *kinds: str) -> list[tuple[Node, Source]]:
        read = {s.path for stage in self.part.here.values() for s in stage.sources}
        owners = self.part.program.owners
        return [
            (node, source)
            for node, source in super()._placeholders(*kinds)
            if source.kind != "parameter" or (source.path in read or not owners.get(source.path, (self.at,)))
        ]

    def body(self) -> Iterator[str]:
        functions: list[str] = []
        here: list[str] = []
        for (stage, microbatch), program in self.part.here.items():
            functions += self.function(program)
            name, cuts = self.functions[program.function_key], "None"
            if program.cuts is not None:
                cuts = f"cut_{stage}_{microbatch}"
                functions += self.cut_function(cuts, program.cuts, program.program)
                paths = ", ".join(map(repr, program.cuts.paths))
                cuts = f"Cut(({paths}{',' if len(program.cuts.paths) == 1 else ''}), {cuts})"
                self.imports[RUNTIME].add("Cut")
            here.append(f"        ({stage}, {microbatch}): Here({name}{'' if cuts == 'None' else f', {cuts}'}),")
        yield from functions
        yield from self.tables()
        yield from self.run(here)

    def function(self, stage: StageProgram) -> Iterator[str]:
        """A stage's function; nothing where an equal one is there."""
        key = stage.function_key
        if key not in self.functions:
            number = sum(index == stage.index for index, _ in self.functions)
            self.functions[key] = f"stage_{stage.index}" + (f"_{number + 1}" if number else "")
            yield from self.stage_lines(self.functions[key], stage)

    def stage_lines(self, name: str, stage: StageProgram) -> Iterator[str]:
        program = stage.program
        laid = of_user_value(program)
        traced = self.traced(stage) if self.traced is not None else None
        if traced is None:
            paths = {n.name: s.path for n, s in zip(program.placeholders, program.sources, strict=True)}
            yield from function_lines(name, program.graph, self.writer(), paths, lambda node: True, axes=False)
            return
        places = traced.graphs.forward.graph.find_nodes(op="placeholder")
        paths = {n.name: s.path for n, s in zip(places, program.sources, strict=True)}
        parts = [("forward", traced.graphs.forward), ("backward", traced.graphs.backward)]
        halves = ""
        if traced.halves is not None:
            inputs, weights, shape = traced.halves
            parts += [("backward_inputs", inputs), ("backward_weights", weights)]
            halves = f", Halves({name}_backward_inputs, {name}_backward_weights, {shape})"
            self.imports["autopar.runtime.exported"].update({"Halves"})
            self.imports.setdefault("autopar.runtime.backward_split", set()).add("Split")
        for which, module in parts:
            yield from function_lines(f"{name}_{which}", module.graph, self.writer(), paths, laid)
        self.imports["autopar.runtime.exported"].add("Graphs")
        yield ""
        yield ""
        given = f"{traced.graphs.results}, {traced.differentiable}{halves}"
        yield f"{name} = Graphs({name}_forward, {name}_backward, {given})"

    def cut_function(self, name: str, cuts: Cuts, program: Program) -> Iterator[str]:
        sources = {s.node: s.path for s in self.program.sources}
        return function_lines(name, cuts.graph, self.writer(), sources, lambda node: False, axes=False)

    def tables(self) -> Iterator[str]:
        """What every stage of every micro-batch takes and gives; equal ones once."""
        yield ""
        yield ""
        yield "# What each stage reads, receives from a stage, sends to stages, and gives: outputs with their shapes."
        for stages in self.part.program.stages:
            found = dict(stages) if not isinstance(stages, tuple) else {s.index: s for s in stages}
            text = "\n".join(line for stage in found.values() for line in _stage(stage))
            if text not in self.tabled:
                name = "STAGES" if not self.tabled else f"STAGES_{len(self.tabled) + 1}"
                self.tabled[text] = name
                yield f"{name} = {{"
                yield text
                yield "}"
            self.table_of.append(self.tabled[text])

    def run(self, here: list[str]) -> Iterator[str]:
        program, schedule = self.part.program, self.schedule
        kinds = ("parameter", "buffer", "constant")
        yield ""
        yield "PIPELINE = Pipelined("
        yield f"    schedule={(schedule.name, schedule.ranks, self.virtual, schedule.microbatches)!r},"
        yield "    axes=tuple(AXES),"
        yield f"    axis={self.pipeline!r},"
        yield f"    lines={f'AXES[{self.pipeline!r}]' if self.pipeline else '[]'},"
        yield f"    rank={self.rank},"
        yield from _argument("sources", tuple(s.path for s in program.sources if s.kind in kinds))
        yield from _argument("inputs", tuple(s.path for s in program.sources if s.kind == "input"))
        yield "    microbatches=("
        yield from textwrap.wrap(", ".join(self.table_of) + ",", WIDTH, initial_indent=IN, subsequent_indent=IN)
        yield "    ),"
        yield "    here={"
        yield from here
        yield "    },"
        yield "    results={"
        yield from (f"        {i}: {_output(result)}," for i, result in program.results.items())
        yield "    },"
        yield f"    outputs={program.outputs},"
        constants = ", ".join(f"{i}: {value_text(value)}" for i, value in program.constants.items())
        yield f"    constants={{{constants}}},"
        yield f"    loss={program.loss},"
        read = {s.path for stage in self.part.here.values() for s in stage.sources}
        yield from _argument("reductions", {path: moves for path, moves in program.reductions.items() if path in read})
        yield from _argument("owners", {path: ranks for path, ranks in program.owners.items() if len(ranks) > 1})
        yield f"    forward_only={program.forward_only},"
        yield ")"
        yield from self.forward_head()
        yield "    return PIPELINE(parameters, inputs)"


def _stage(stage: StageValues) -> Iterator[str]:
    yield f"    {stage.index}: stage("
    yield f"        {stage.index},"
    yield from _argument("reads", tuple(s.path for s in stage.sources), "        ")
    for name, pairs in (
        ("receives", [f"({source}, {_value(value)})" for source, value in stage.receives]),
        ("sends", [f"({_value(value)}, {readers!r})" for value, readers in stage.sends]),
    ):
        if pairs:
            yield f"        {name}=("
            yield from (f"            {pair}," for pair in pairs)
            yield "        ),"
        else:
            yield f"        {name}=(),"
    yield f"        gives={dict(zip(stage.sinks, stage.shapes, strict=True))!r},"
    yield "    ),"


def _argument(name: str, value: tuple[Any, ...] | dict[Any, Any], indent: str = "    ") -> Iterator[str]:
    """A keyword argument of any length, in lines."""
    whole = f"{indent}{name}={value!r},"
    if len(whole) <= WIDTH:
        yield whole
        return
    first, last = repr(value)[0], repr(value)[-1]
    items = [f"{k!r}: {v!r}," for k, v in value.items()] if isinstance(value, dict) else [f"{v!r}," for v in value]
    yield f"{indent}{name}={first}"
    line = f"{indent}   "
    for item in items:
        if len(line) + len(item) >= WIDTH and line.strip():
            yield line
            line = f"{indent}   "
        line += f" {item}"
    yield line
    yield f"{indent}{last},"


def _value(value: Value) -> str:
    return f"Value({value.name!r}, {value.shape}, {value.dtype}, {value.grad})"


def _output(result: Result) -> str:
    over: Any = result.placement
    over = over.kind if over.kind != "S" else f"S{over.part}"
    buffer = ", buffer=True" if result.buffer else ""
    return f"output({result.stage}, {over!r}, {result.flat}, {result.shape}, {result.dtype}, {result.grad}{buffer})"
