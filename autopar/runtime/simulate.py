"""n ranks in one process: the local programs of all ranks run in step, and every transition is one autograd function
over the list of ranks with the table's backward. What proves rules and passes in milliseconds.

What enters: one local graph for each rank (same nodes in the same order, other sizes and offsets) and each rank's
    inputs.
What leaves: each rank's outputs, differentiable. Seed the backward of an invariant output with the same gradient on
    every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar.layout import TRANSITIONS, chunk
from autopar.mesh import LogicalMesh
from autopar.runtime.moves import max_over, move
from autopar.runtime.transfer import Uncut, gradient_of, parse_placement


def run_ranks(graphs: Sequence[Graph], inputs: Sequence[Sequence[Any]], mesh: LogicalMesh) -> list[Any]:
    """Execute all ranks. inputs[r]: values of rank r's placeholders in order. Returns each rank's output structure."""
    ranks = range(len(graphs))
    values: list[dict[Node, Any]] = [{} for _ in ranks]
    feeds = [iter(i) for i in inputs]
    for nodes in zip(*(g.nodes for g in graphs), strict=True):
        if len({(n.op, str(n.target)) for n in nodes}) != 1:
            raise RuntimeError(f"ranks differ at node {nodes[0].name}: {[(n.op, str(n.target)) for n in nodes]}")
        args = [_arguments(nodes[r], values[r]) for r in ranks]
        op = nodes[0].op
        if op == "placeholder":
            results: list[Any] = [next(feeds[r]) for r in ranks]
        elif op == "output":
            return [args[r][0][0] for r in ranks]
        elif nodes[0].target is move:
            results = _move_all([a[0] for a in args], mesh)
        elif nodes[0].target is max_over:
            results = _max_all([a[0] for a in args], mesh)
        else:
            results = [_call(nodes[r].target, args[r]) for r in ranks]
        for r in ranks:
            values[r][nodes[r]] = results[r]
    raise RuntimeError("the graphs have no output")


def _arguments(node: Node, values: dict[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)


def _call(target: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return target(*arguments[0], **arguments[1])


def _groups(mesh: LogicalMesh, axis: str) -> list[tuple[int, ...]]:
    index = next(i for i, a in enumerate(mesh.axes) if a.name == axis)
    return sorted({tuple(mesh.group(index, mesh.coordinate(r))) for r in range(mesh.size)})


def _move_all(args: Sequence[tuple[Any, ...]], mesh: LogicalMesh) -> list[torch.Tensor]:
    out: dict[int, torch.Tensor] = {}
    for group in _groups(mesh, args[0][1]):
        _, _, source, target, *rest = args[group[0]]
        moved = _SimulatedMove.apply(source, target, rest[0] if rest else (), *(args[r][0] for r in group))
        out.update(zip(group, moved, strict=True))
    return [out[r] for r in range(len(args))]


def _max_all(args: Sequence[tuple[Any, ...]], mesh: LogicalMesh) -> list[torch.Tensor]:
    out: dict[int, torch.Tensor] = {}
    for group in _groups(mesh, args[0][1]):
        top = torch.stack([args[r][0].detach() for r in group]).amax(0)
        out.update({r: top.clone() for r in group})
    return [out[r] for r in range(len(args))]


class _SimulatedMove(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: str, target: str, uncut: Uncut, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.move = (source, target, uncut)
        ctx.set_materialize_grads(False)
        return tuple(transfer_all(xs, source, target, uncut))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        source, target, uncut = ctx.move
        if any(g is None for g in grads):
            missing = [r for r, g in enumerate(grads) if g is None]
            raise RuntimeError(
                f"no gradient comes back to the move {source} -> {target} on ranks {missing} of its group; the other "
                "ranks would wait for them for ever"
            )
        return None, None, None, *transfer_all(grads, gradient_of(target), gradient_of(source), uncut)


def transfer_all(xs: Sequence[torch.Tensor], source: str, target: str, uncut: Uncut) -> list[torch.Tensor]:
    """One move on the ranks of one group: the definition of the table's primitives, in the plainest form."""
    (kind, part), (to_kind, to_part) = parse_placement(source), parse_placement(target)
    primitive = "nothing" if kind == to_kind != "S" else TRANSITIONS[kind, to_kind].forward
    sizes, n = [s for dim in uncut for s in dim], len(xs)
    shape = [int(torch.Size(dim).numel()) for dim in uncut]

    def total() -> torch.Tensor:
        return torch.stack(list(xs)).sum(0).to(xs[0].dtype)  # torch sums bools and int32 as int64

    def gathered() -> torch.Tensor:
        shards = [
            x.reshape([chunk(s, n, r)[1] if j == part else s for j, s in enumerate(sizes)]) for r, x in enumerate(xs)
        ]
        return torch.cat(shards, part)

    def cut(full: torch.Tensor, r: int) -> torch.Tensor:
        mine = full.reshape(sizes).narrow(to_part, *chunk(sizes[to_part], n, r))
        flat, at, dims = mine.shape, 0, []
        for dim in uncut:
            dims.append(int(torch.Size(flat[at : at + len(dim)]).numel()))
            at += len(dim)
        return mine.reshape(dims).clone()

    def padded(r: int) -> torch.Tensor:
        out = xs[r].new_zeros(sizes)
        mine = out.narrow(part, *chunk(sizes[part], n, r))
        mine.copy_(xs[r].reshape(mine.shape))
        return out.reshape(shape)

    if primitive == "nothing":
        return [x.clone() for x in xs]
    if primitive == "keep":
        return [x.clone() if r == 0 else torch.zeros_like(x) for r, x in enumerate(xs)]
    if primitive == "all_reduce":
        return [total().clone() for _ in xs]
    if primitive == "slice":
        return [cut(x, r) for r, x in enumerate(xs)]
    if primitive == "pad":
        return [padded(r) for r in range(n)]
    if primitive == "all_gather":
        return [gathered().reshape(shape).clone() for _ in xs]
    full = total() if primitive == "reduce_scatter" else gathered()
    return [cut(full, r) for r in range(n)]
