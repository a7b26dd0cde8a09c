"""Type-check a local program: every layout on it follows from a rule, every move is a row of the table.

What enters: the program of one rank after `shard`, and the analysis it came from. What leaves: nothing. Refused
    (`AssertionError`, a bug
of ours): an op whose operands lie as no option of its rule says, a move that the table does not have, a local shape
that is
not its layout's, an output left partial.

The walk reads only the graph and its records, so it does not repeat what the shard pass believed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.layout import TRANSITIONS, Layout, local_parts
from autopar.mesh import LogicalMesh
from autopar.program import Program, Record, record
from autopar.rules.analyse import Analysis, Op
from autopar.rules.call import is_getitem, tensor_inputs
from autopar.rules.strategy import axis_options, placements
from autopar.runtime.moves import move
from autopar.runtime.transfer import parse_placement


def check_layouts(
    program: Program, analysis: Analysis, mesh: LogicalMesh, coordinate: tuple[int, ...], partial: int = 0
) -> None:
    """Check the program of the rank at `coordinate`. partial: leading axes (micro-batches) on which outputs
    may be left R or P, and any factor may be cut, however unevenly."""
    by_op = {record(op.node).op: op for op in analysis.ops.values()}
    for node in program.graph.nodes:
        known = record(node)
        if known.layout is None or known.parts is None:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            expected = local_parts(known.parts, known.layout, mesh.sizes, coordinate).shape
            assert tuple(value.shape) == expected, (
                f"{node.name}: local shape {tuple(value.shape)} is not {expected}, that of {known.layout}"
            )
        if node.target is move:
            _check_move(node, known, mesh)
        elif node.op == "call_function" and known.op in by_op:
            _check_op(node, by_op[known.op], analysis, mesh, partial)
    for i, result in enumerate(pytree.tree_leaves(program.output.args[0])):
        if isinstance(result, Node):
            layout = (record(result).layout or ())[partial:]
            assert all(p.kind in "IS" for p in layout), f"output {i} ({result.name}) is left as {layout}"


def _check_move(node: Node, known: Record, mesh: LogicalMesh) -> None:
    source, axis_name, before, after = node.args[:4]
    assert isinstance(source, Node)
    axis = next(i for i, a in enumerate(mesh.axes) if a.name == axis_name)
    was = record(source).layout
    assert was is not None, f"{node.name}: a move of a value without a layout"
    assert known.layout is not None
    assert (was[axis].kind, was[axis].part) == parse_placement(str(before)), (
        f"{node.name}: moves from {before}, but {source.name} lies as {was[axis]}"
    )
    assert (known.layout[axis].kind, known.layout[axis].part) == parse_placement(str(after)), (
        f"{node.name}: moves to {after}, but is recorded as {known.layout[axis]}"
    )
    assert (was[axis].kind, known.layout[axis].kind) in TRANSITIONS, (
        f"{node.name}: no transition {was[axis]} -> {known.layout[axis]}"
    )
    others = [(p, q) for i, (p, q) in enumerate(zip(was, known.layout, strict=True)) if i != axis]
    assert all(p == q for p, q in others), (
        f"{node.name}: moves on {axis_name} alone, but other axes change: {was} -> {known.layout}"
    )
    for later in was[axis + 1 :]:
        assert not (later.kind == "S" and later in (was[axis], known.layout[axis])), (
            f"{node.name}: a later axis cuts the part that {axis_name} moves"
        )


def _check_op(node: Node, op: Op, analysis: Analysis, mesh: LogicalMesh, partial: int) -> None:
    """On each axis some option of the rule explains how the inputs and this output lie."""
    reads = _reads(node, op)
    if reads is None:
        return  # emitted by a distributed local program; its rule is proved by running
    outs = [i for i, v in enumerate(op.outs) if analysis.parts[v] == record(node).parts]
    layout = record(node).layout
    assert layout is not None
    for axis in range(len(mesh.axes)):
        found = False
        offered = axis_options(op.rule, op.factors, mesh.axes[axis].size)
        for option in dict.fromkeys([*offered, *(op.by_name if axis < partial else ())]):
            ins, results = placements(op.rule, op.by_name, option)
            same_ins = all(
                _same(p.kind, p.part, have[axis], g) for p, have, g in zip(ins, reads, op.in_grads, strict=True)
            )
            found = found or (
                same_ins and any(_same(results[i].kind, results[i].part, layout[axis], op.out_grads[i]) for i in outs)
            )
        assert found, (
            f"{node.name} ({op.node.target}) on axis {mesh.axes[axis].name}: inputs {[r[axis] for r in reads]} -> "
            f"{layout[axis]} is no option of its rule"
        )


def _same(kind: str, part: int, have: object, gradient: bool) -> bool:
    if kind == "R" and not gradient:
        kind = "I"
    return (kind, part) == (getattr(have, "kind", ""), getattr(have, "part", -1))


def _reads(node: Node, op: Op) -> Sequence[Layout] | None:
    """Layouts of the tensors that the op reads, when the local program is one call with the op's own inputs."""
    call = node.args[0] if is_getitem(node) and isinstance(node.args[0], Node) else node
    tensors = tensor_inputs(call)
    layouts = [record(t).layout for t in tensors]
    if len(tensors) != len(op.ins) or any(x is None for x in layouts):
        return None
    return [x for x in layouts if x is not None]
