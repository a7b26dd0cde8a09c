"""Cut the program of one micro-batch into stages, at any cuts.

What enters: a local program (of one rank's shards and one micro-batch) and the stage of each op. What leaves: one
`StageProgram` a stage. Refused, with a `PlanError`: a stage that reads what a later one makes.

A value is sent straight from the stage that makes it to every stage that reads it, however many lie between. Not sent:
inputs, buffers and constants, which every rank has; what is made of them alone without products (masks, positions,
rotary tables), made again where it is read; and a move that makes a value larger or nothing of it (a gather, I -> R),
which is done where the value is read. What is a micro-batch's own among these (slices of inputs, keys of random
numbers) is parted from the stage: the stages of all micro-batches of one size are then one program, lowered once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.layout import TRANSITIONS
from autopar.program import Program, Sink, Source, record
from autopar.rules.analyse import STOPS_GRADIENT
from autopar.rules.call import is_getitem
from autopar.runtime.moves import max_over, move
from autopar.runtime.pipeline_program import Cuts, StageProgram, Value
from autopar.runtime.transfer import parse_placement

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "convolution",
    "einsum",
    "scaled_dot_product_attention",
)
"""Ops that are not run again, even on inputs alone: parts of their names."""
CUTS = frozenset({torch.ops.aten.narrow.default, torch.ops.autopar.key.default})
"""Ops that may give each micro-batch its own."""
LATE = frozenset({"nothing", "all_gather", "pad"})
"""Moves that are made by the reader: they send less before than after."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Cut a program into the stages of a pipeline.

    Input:   %a = linear(%x, %w0) ; %b = relu(%a) ; %c = add(%b, %x) ; %d = linear(%c, %w1)      (d: stage 1)
    Output:  stage 0: %c, sent to stage 1 ; stage 1: %d = linear(%c, %w1)
    Refuses: an order of stages in which one reads what a later one makes.
    """

    stage_of: Mapping[str, int]
    """By the stable name of the op (`Record.op`)."""
    count: int

    def run(self, program: Program) -> tuple[StageProgram, ...]:
        return _Cutter(self, program).cut()


class _Cutter:
    def __init__(self, stage: Stage, program: Program) -> None:
        self.stage, self.program = stage, program
        self.nodes = list(program.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.sources = program.by_node
        self.parameters: set[Node] = set()
        self.home: dict[Node, int | None] = {}
        """None: made wherever it is read."""
        self.late: set[Node] = set()
        self.grads: set[Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                self.home[node] = None
                source = self.sources[node.name]
                if source.kind == "parameter":
                    self.parameters.add(node)
                if source.trainable:
                    self.grads.add(node)
            elif node.op == "call_function":
                self.place(node)

    def place(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if any(n in self.parameters for n in inputs):
            self.parameters.add(node)
        if any(n in self.grads for n in inputs) and _passes_gradient(node):
            self.grads.add(node)
        if node.target is move:
            self.home[node] = self.home[inputs[0]]
            if inputs[0] in self.late or _primitive(node) in LATE:
                self.late.add(node)
            return
        free = node not in self.parameters and not is_product(node)
        if free and all(self.home[n] is None for n in inputs):
            self.home[node] = None
            return
        if is_getitem(node):
            self.home[node] = self.home[inputs[0]]
            return
        made = [h for n in inputs if (h := self.home[n]) is not None]
        home = self.stage.stage_of.get(record(node).op)
        if home is None:
            home = max(made, default=0)
        if made and max(made) > home:
            first = next(n for n in inputs if self.home[n] == max(made))
            raise PlanError(
                f"stages: {record(node).op} of stage {home} reads {record(first).op}, which stage {max(made)} makes; "
                "a stage can only read what it or an earlier one makes"
            )
        self.home[node] = home

    def cut(self) -> tuple[StageProgram, ...]:
        results = list(pytree.tree_leaves(self.program.output.args[0]))
        sinks: dict[int, list[int]] = {}
        for i, result in enumerate(results):
            home = self.home[result] if isinstance(result, Node) else None
            sinks.setdefault(self.stage.count - 1 if home is None else home, []).append(i)
        readers: dict[Node, set[int]] = {}
        made = []
        for index in reversed(range(self.stage.count)):
            sent = [n for n in readers if self.home[n] == index]
            sent.sort(key=self.order.__getitem__)
            given = [results[i] for i in sinks.get(index, [])]
            made.append(self.build(index, sent, given, tuple(sinks.get(index, [])), readers))
        return tuple(reversed(made))

    def build(
        self, index: int, sent: list[Node], given: list[object], sinks: tuple[int, ...], readers: dict[Node, set[int]]
    ) -> StageProgram:
        needed, received, cut = self.needed(index, [*sent, *(g for g in given if isinstance(g, Node))])
        graph = Graph()
        copies: dict[Node, Node] = {}
        sources = []
        for node in self.program.placeholders:
            if node in needed:
                copies[node] = graph.node_copy(node)
                sources.append(self.sources[node.name])
        for node in cut:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        receives = []
        for node in sorted(received, key=lambda n: (self.home[n], self.order[n])):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            readers.setdefault(node, set()).add(index)
            home = self.home[node]
            assert home is not None
            receives.append((home, self.value(node)))
        for node in self.nodes:
            if node.op == "call_function" and node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        results: list[Any] = [*sent, *given]
        graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in results))
        graph.lint()
        outside = tuple(Source(copies[n].name, "cut", n.name) for n in cut)
        outside += tuple(Source(copies[n].name, "received", n.name, trainable=n in self.grads) for n in received)
        program = replace(
            self.program,
            graph=graph,
            sources=(*sources, *outside),
            sinks=(*(Sink("sent", n.name) for n in sent), *(self.program.sinks[i] for i in sinks)),
            out_values=(),
            name=f"stage {index}",
        )
        sends = tuple((self.value(n), tuple(sorted(readers[n]))) for n in sent)
        shapes = tuple(tuple(g.meta["val"].shape) if isinstance(g, Node) else () for g in given)
        return StageProgram(index, tuple(sources), tuple(receives), sends, sinks, shapes, self.cuts(cut), program)

    def cuts(self, cut: list[Node]) -> Cuts | None:
        """The program that makes what is cut."""
        if not cut:
            return None
        needed, stack = set(cut), list(cut)
        while stack:
            fresh = [n for n in stack.pop().all_input_nodes if n not in needed]
            needed.update(fresh)
            stack += fresh
        graph, paths = Graph(), []
        copies: dict[Node, Node] = {}
        for node in self.nodes:
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.op == "placeholder":
                    paths.append(self.sources[node.name].path)
        graph.output(tuple(copies[n] for n in cut))
        graph.lint()
        return Cuts(tuple(paths), graph)

    def needed(self, index: int, roots: list[Node]) -> tuple[set[Node], list[Node], list[Node]]:
        """Nodes that the stage runs, values that it receives, and those that are cut for it."""
        needed: set[Node] = set()
        received: set[Node] = set()
        cut: set[Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in needed or node in received or node in cut:
                continue
            home = self.home[node]
            if home is None and node.target in CUTS and node not in self.grads:
                cut.add(node)
            elif home is None or home == index or node in self.late:
                needed.add(node)
                stack += node.all_input_nodes
            else:
                received.add(node)
        by_order = self.order.__getitem__
        return needed, sorted(received, key=lambda n: (self.home[n], by_order(n))), sorted(cut, key=by_order)

    def value(self, node: Node) -> Value:
        fake = node.meta["val"]
        return Value(node.name, tuple(fake.shape), fake.dtype, node in self.grads)


def between(first: StageProgram, last: StageProgram, share: Fraction) -> StageProgram | None:
    """The stage of a micro-batch that lies `share` of the way from one micro-batch to another of its size: where the
    two cut their inputs differs by numbers alone, and those grow evenly with the place in the batch.

    Returns: None where the two are not alike in this way.
    """
    if str(first.program.graph) != str(last.program.graph) or (first.cuts is None) != (last.cuts is None):
        return None
    if first.cuts is None or last.cuts is None:
        return first
    graph = Graph()
    copies: dict[Node, Node] = {}
    for one, other in zip(first.cuts.graph.nodes, last.cuts.graph.nodes, strict=False):
        mine, spec = pytree.tree_flatten((one.args, one.kwargs))
        theirs, its_spec = pytree.tree_flatten((other.args, other.kwargs))
        if (one.target, spec) != (other.target, its_spec):
            return None
        found = [_between(a, b, share) for a, b in zip(mine, theirs, strict=True)]
        if None in (f for f, a in zip(found, mine, strict=True) if a is not None):
            return None
        copies[one] = made = graph.node_copy(one, copies.__getitem__)
        made.args, made.kwargs = pytree.tree_unflatten(
            [copies.get(x, x) if isinstance(x, Node) else x for x in found], spec
        )
    return replace(first, cuts=Cuts(first.cuts.paths, graph))


def _between(a: Any, b: Any, share: Fraction) -> Any:
    """The argument in between; None where there is none."""
    if isinstance(a, Node):
        return a if isinstance(b, Node) and a.name == b.name else None
    if a == b:
        return a
    if type(a) is not int or type(b) is not int:
        return None
    value = a + (b - a) * share
    return int(value) if value.denominator == 1 else None


def once_for_all(program: Program) -> tuple[Program, dict[str, tuple[tuple[str, str, str], ...]]]:
    """Take from the program the moves of parameters that cost nothing forward: their backward (a reduction of the
    gradient) is then made once for all micro-batches.

    Returns: the program without them; (axis, from, to) of each by parameter.
    """
    graph = Graph()
    values: dict[Node, Node] = {}
    moves: dict[str, list[tuple[str, str, str]]] = {}
    skipped: dict[Node, Node] = {}
    by_node = program.by_node
    for node in program.graph.nodes:
        if node.op == "placeholder" and by_node[node.name].kind == "parameter":
            at = node
            while (
                len(at.users) == 1 and (user := next(iter(at.users))).target is move and _primitive(user) == "nothing"
            ):
                moves.setdefault(by_node[node.name].path, []).append(tuple(map(str, user.args[1:4])))  # type: ignore[arg-type]
                skipped[user], at = node, user
        if node in skipped:
            values[node] = values[skipped[node]]
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.lint()
    return replace(program, graph=graph), {path: tuple(found) for path, found in moves.items()}


def _primitive(node: Node) -> str:
    (before, _), (after, _) = parse_placement(str(node.args[2])), parse_placement(str(node.args[3]))
    return "nothing" if before == after != "S" else TRANSITIONS[before, after].forward


def _passes_gradient(node: Node) -> bool:
    if node.target is max_over or _name(node) in STOPS_GRADIENT:
        return False
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def is_product(node: Node) -> bool:
    return any(word in _name(node).split(".")[0] for word in PRODUCTS)


def _name(node: Node) -> str:
    return str(getattr(node.target, "_schema", node).name).split("::")[-1]
