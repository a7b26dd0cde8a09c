"""Turn the whole program into the program of one rank: shard parameters, insert transitions, make sizes local."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.cost.compute import element_bytes
from autopar.cost.hardware import Profile
from autopar.cost.route import Routes, routes
from autopar.errors import UnsupportedOpError
from autopar.layout import I, Layout, Parts, Placement, chunk, local_parts
from autopar.mesh import LogicalMesh
from autopar.program import Program, record, set_record
from autopar.rules.analyse import Analysis, Op, value_of
from autopar.rules.call import Call, is_getitem, tensor_inputs
from autopar.rules.decisions import Decisions
from autopar.rules.local import Local
from autopar.rules.shapes import fake_result
from autopar.runtime.moves import max_over, move
from autopar.user_function import op_text


@dataclass(frozen=True, eq=False)
class Shard:
    """Rewrite for the rank at one coordinate.

    Input:   %h = linear(%x, %w) ; %y = relu(%h)                    (h: S(1) on tp, y: I on tp)
    Output:  %x_1 = move(%x, tp, I, R) ; %h = linear(%x_1, %w) ; %h_1 = move(%h, tp, S(1), I) ; %y = relu(%h_1)
    Refuses: an op that torch cannot run without values. A local shape that disagrees with its layout is a bug and
             asserts.
    """

    analysis: Analysis
    decisions: Decisions
    mesh: LogicalMesh
    profile: Profile
    coordinate: tuple[int, ...]

    def run(self, program: Program) -> Program:
        assert program is self.analysis.program, "the analysis is of another program"
        writer = _Writer(self)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                writer.placeholder(node)
            elif node.op == "output":
                writer.output(node, program)
            elif not is_getitem(node):
                writer.call(self.analysis.ops[node.name])
        writer.graph.eliminate_dead_code()
        writer.graph.lint()
        return replace(program, graph=writer.graph)


class _Writer:
    """The local graph while it grows: where each value lies in which layouts."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.graph = Graph()
        self.sizes = shard.mesh.sizes
        self.have: dict[str, dict[Layout, Node]] = {}
        self.made: dict[str, Layout] = {}
        self.current: Node | None = None
        self.invariant: Layout = (I,) * len(shard.mesh.axes)
        self.mode: Any = None

    # values in layouts

    def put(self, value: str, layout: Layout, node: Node) -> None:
        parts = self.shard.analysis.parts[value]
        expected = local_parts(parts, layout, self.sizes, self.shard.coordinate).shape
        assert tuple(node.meta["val"].shape) == expected, (
            f"{value} as {layout}: local shape {tuple(node.meta['val'].shape)}, not {expected}"
        )
        self.have.setdefault(value, {})[layout] = node
        self.made.setdefault(value, layout)
        set_record(node, parts=parts, layout=layout)

    def get(self, value: str, layout: Layout) -> Node:
        """The node that holds `value` as `layout`, made by transitions from where it lies."""
        held = self.have[value]
        if layout in held:
            return held[layout]
        read = self.shard.decisions.reads.get(value)
        source = self.made[value]
        if read is not None and read != source and layout != read:
            self.get_from(value, source, read)
            source = read
        return self.get_from(value, source, layout)

    def get_from(self, value: str, source: Layout, target: Layout) -> Node:
        held = self.have[value]
        node, at = held[source], source
        for step in self.routes(value, source, target).path(source, target):
            if step not in held:
                axis = next(a for a, (p, q) in enumerate(zip(at, step, strict=True)) if p != q)
                parts = self.shard.analysis.parts[value]
                self.put(value, step, self.move(node, axis, at[axis], step[axis], self.uncut(parts, at, axis)))
            node, at = held[step], step
        return node

    def routes(self, value: str, *layouts: Layout) -> Routes:
        analysis = self.shard.analysis
        cut = tuple(sorted({p.part for layout in layouts for p in layout if p.kind == "S"}))
        return routes(
            analysis.parts[value],
            element_bytes(analysis.dtypes[value]),
            analysis.grads[value],
            cut,
            self.shard.mesh,
            self.shard.profile,
        )

    def uncut(self, parts: Parts, layout: Layout, axis: int) -> tuple[tuple[int, ...], ...]:
        without = (*layout[:axis], I, *layout[axis + 1 :])
        return local_parts(parts, without, self.sizes, self.shard.coordinate).dims

    def move(
        self, node: Node, axis: int, source: Placement, target: Placement, uncut: tuple[tuple[int, ...], ...]
    ) -> Node:
        args = (node, self.shard.mesh.axes[axis].name, _text(source), _text(target))
        if "S" in (source.kind, target.kind):
            args = (*args, uncut)
        made = self.graph.call_function(move, args)
        flat = [n for dim in uncut for n in dim]
        if target.kind == "S":
            flat[target.part] = chunk(flat[target.part], self.sizes[axis], self.shard.coordinate[axis])[1]
        shape = Parts(uncut).with_flat(flat).shape if uncut else tuple(node.meta["val"].shape)
        made.meta["val"] = self.empty(shape, node.meta["val"])
        set_record(made, record(node), note=f"{self.shard.mesh.axes[axis].name}: {_text(source)} -> {_text(target)}")
        return made

    # nodes

    def placeholder(self, node: Node) -> None:
        made = self.graph.placeholder(node.target if isinstance(node.target, str) else node.name)
        made.meta = dict(node.meta)
        value = node.meta["val"]
        self.mode = self.mode or value.fake_mode
        layout = self.shard.decisions.sources.get(node.name, self.invariant)
        shape = local_parts(self.shard.analysis.parts[node.name], layout, self.sizes, self.shard.coordinate).shape
        made.meta["val"] = self.empty(shape, value)
        self.put(node.name, layout, made)

    def call(self, op: Op) -> None:
        strategy = self.shard.decisions.strategies[op.name]
        self.current = op.node
        ins = tuple(self.get(v, layout) for v, layout in zip(op.ins, strategy.ins, strict=True))
        context = Local(
            call=Call(op.node),
            rule=op.rule,
            strategy=strategy,
            factors=op.by_name,
            out_parts=tuple(self.shard.analysis.parts[v] for v in op.outs),
            axes=tuple(a.name for a in self.shard.mesh.axes),
            ranks=self.sizes,
            coordinate=self.shard.coordinate,
            ins=ins,
            emit=self.emit,
            emit_move=lambda n, axis, source, target: self.move(n, axis, source, target, ()),
            emit_max=lambda n, axis: self.emit(max_over, n, self.shard.mesh.axes[axis].name),
            substitute=lambda: substitute(op.node, ins),
        )
        split = any(option in op.by_name for option in strategy.options)
        made = op.rule.local(context) if op.rule.local is not None and split else context.same()
        outs = (
            self.items(made, len(op.outs))
            if len(op.outs) != 1 or isinstance(op.node.meta["val"], (tuple, list))
            else [made]
        )
        for value, layout, node in zip(op.outs, strategy.outs, outs, strict=True):
            self.put(value, layout, node)

    def items(self, made: Any, count: int) -> list[Node]:
        if not isinstance(made, Node):
            return list(made)
        return [self.emit(operator.getitem, made, i) for i in range(count)]

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        assert self.current is not None
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self.current.meta.items() if k != "val"}
        try:
            made.meta["val"] = (
                args[0].meta["val"] if target is max_over else fake_result(target, args, kwargs, self.mode)
            )
        except (RuntimeError, TypeError, ValueError) as error:
            said = next(iter(str(error).strip().splitlines()), "")
            raise UnsupportedOpError(
                f"{record(self.current).where or self.current.name}: {op_text(self.current)} cannot be written for a "
                f"shard [{type(error).__name__}: {said:.200}]; write it with other operators"
            ) from error
        return made

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> Any:
        return fake_result(torch.empty, (shape,), {"dtype": like.dtype, "device": like.device}, self.mode)

    def output(self, node: Node, program: Program) -> None:
        flat = []
        for i, result in enumerate(pytree.tree_leaves(node.args[0])):
            if isinstance(result, Node):
                flat.append(self.get(value_of(result), self.shard.decisions.outputs.get(i, self.invariant)))
            else:
                flat.append(result)
        self.graph.output(tuple(flat)).meta = dict(node.meta)


def substitute(node: Node, tensors: tuple[Node, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of a call with its tensor inputs replaced, in order."""
    taken = iter(tensors)
    tensor_nodes = set(tensor_inputs(node))

    def new(leaf: Any) -> Any:
        return next(taken) if isinstance(leaf, Node) and leaf in tensor_nodes else leaf

    leaves, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    args, kwargs = pytree.tree_unflatten([new(leaf) for leaf in leaves], spec)
    return tuple(args), kwargs


def _text(placement: Placement) -> str:
    return f"S{placement.part}" if placement.kind == "S" else placement.kind
