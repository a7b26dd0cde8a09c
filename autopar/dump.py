"""What is true after each stage, as text: numbered dump files and one log line a stage.

Enters: a stage's name and the program after it. Leaves: `NN_after_<stage>.txt` in a folder, if one was given, and a
line of the logger `autopar`: seconds, nodes before and after, ops added and removed. Refused: nothing.

A node reads

    %linear_1 : float32[8, 64, 512] [S(2)@tp S(0)@dp] = aten.linear.default(%x, %weight)  # layers.0.mlp, model.py:42

The layout, when the shard pass has set one, lists for each axis what is not invariant; `[I]` is invariant everywhere.
Files are named without their folder, so that a dump reads the same on every machine.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from autopar.program import Program, Record, record

_LOG = logging.getLogger("autopar")


class Dump:
    """Writes each stage's program, numbered in the order of the calls.

    Args:    directory: made when missing; None writes no file and only logs.
             axes: names of the mesh axes, for layouts; may be set when they are known.
    Raises:  OSError: the folder cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, axes: Sequence[str] = ()) -> None:
        self.axes = tuple(axes)
        self._directory = None if directory is None else Path(directory)
        self._written = 0
        self._ops: Counter[str] = Counter()
        self._since_s = time.perf_counter()

    def write(self, name: str, program: Program | None, extra: str | None = None) -> None:
        """Dump and log the state after stage `name`.

        Args:    program: None for a stage that has none; the next one is then compared with the last that had.
                 extra: text to add below the program (the solver's problem, prices).
        """
        now_s = time.perf_counter()
        self._written += 1
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s", self._line(name, program, now_s - self._since_s), extra={"stage": name})
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            parts = ([program_text(program, self.axes)] if program is not None else []) + ([extra] if extra else [])
            path = self._directory / f"{self._written:02d}_after_{name}.txt"
            path.write_text("\n\n".join(part.rstrip("\n") for part in parts) + "\n", encoding="utf-8")
        self._since_s = time.perf_counter()  # after writing: the time of a dump is no stage's

    def _line(self, name: str, program: Program | None, took_s: float) -> str:
        if program is None:
            return f"{name}: {took_s:.3f} s"
        before, after = self._ops, Counter(_op_name(n) for n in program.graph.nodes if n.op not in _ENDS)
        self._ops = after
        changes = [f"+{n} {op}" for op, n in (after - before).items()] if before else []
        changes += [f"-{n} {op}" for op, n in (before - after).items()]
        counts = f"{before.total()} -> {after.total()}" if before else f"{after.total()}"
        return f"{name}: {took_s:.3f} s, {counts} nodes" + (f" ({', '.join(changes)})" if changes else "")


_ENDS = ("placeholder", "output")


def program_text(program: Program, axes: Sequence[str] = ()) -> str:
    """The program, a line a node; ends without a newline. axes: names of the mesh axes, for layouts."""
    return "\n".join(_lines(program, axes))


def _lines(program: Program, axes: Sequence[str]) -> Iterator[str]:
    mode = "training" if program.training else "evaluation"
    calls = sum(1 for _ in program.calls)
    yield f"program {program.name}: {mode}, {len(program.sources)} placeholders, {calls} calls"
    for equal in program.classes:
        yield f"class {equal.name}: {', '.join(equal.blocks)}"
    for alias, name in program.ties.items():
        yield f"tie {alias} = {name}"
    sources, block = program.by_node, ""
    for node in program.graph.nodes:
        known = record(node)
        if node.op == "call_function" and known.block != block:
            block = known.block
            yield f"block {block}:"
        if node.op == "output":
            yield "return " + ", ".join(_sinks(program, node))
            continue
        source = sources.get(node.name)
        made = f"{node.op} {node.target}" if source is None else f"{source.kind} {source.path}"
        if source is not None and source.kind == "parameter" and not source.trainable:
            made += " (frozen)"
        if node.op not in ("placeholder", "get_attr"):
            made = call_text(node)
        yield node_text(node, made, layout_text(known, axes), known.note)


def node_text(node: Node, made: str, layout: str = "", note: str = "") -> str:
    """`  %name : float32[8, 64] [S(0)@dp] = made  # module, model.py:42, note`."""
    head = " : ".join(filter(None, (f"%{node.name}", " ".join(filter(None, (_value(node.meta.get("val")), layout))))))
    return f"  {head} = {made}{_comment(node, record(node), note)}"


def call_text(node: Node) -> str:
    """`aten.linear.default(%x, %weight)`."""
    return f"{_op_name(node)}({_arguments(node)})"


def _sinks(program: Program, output: Node) -> Iterator[str]:
    values = output.args[0] if output.args else ()
    values = values if isinstance(values, (tuple, list)) else (values,)
    for i, value in enumerate(values):
        sink = program.sinks[i] if i < len(program.sinks) else None
        yield (
            _argument(value)
            if sink is None or sink.kind == "user"
            else f"{sink.kind} {sink.path} <- {_argument(value)}"
        )


def _op_name(node: Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", type(target).__name__)


def _arguments(node: Node) -> str:
    return ", ".join([_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()])


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_argument(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"{_argument(value.start)}:{_argument(value.stop)}:{_argument(value.step)}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return str(value).removeprefix("torch.")
    # Objects that show their address would make a dump differ from run to run.
    return type(value).__name__ if " at 0x" in (shown := repr(value)) else shown


def _value(value: Any) -> str:
    """`float32[8, 64]`; a tuple for ops with several values."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(v) or 'None' for v in value)})"
    return "" if value is None else type(value).__name__


def layout_text(known: Record, axes: Sequence[str]) -> str:
    if known.layout is None:
        return ""
    names = [known.parts.name(p) if known.parts is not None else repr(p) for p in known.layout]
    if len(axes) != len(names):
        return f"[{' '.join(names) or 'I'}]"
    cut = (f"{text}@{axis}" for text, axis in zip(names, axes, strict=True) if text != "I")
    return f"[{' '.join(cut) or 'I'}]"


def _comment(node: Node, known: Record, note: str) -> str:
    module = known.op.partition("/")[0] if "/" in known.op and node.op != "placeholder" else ""
    where = known.where.replace("\\", "/").rpartition("/")[2]
    parts = [part for part in (module, where, note) if part]
    return f"  # {', '.join(parts)}" if parts else ""
