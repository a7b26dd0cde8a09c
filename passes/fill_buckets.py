"""Make gradients in the bucket that is reduced, instead of copying them into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.passes.aliases import is_view
from autopar.passes.merge_collectives import ALL_REDUCE, call

aten = torch.ops.aten

OUT = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.add.Tensor: aten.add.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
}
"""Op -> the one that writes its result where it is told."""


@dataclass(frozen=True, slots=True)
class FillBuckets:
    """Write the parts of a bucket into it where they are made; what no op can write there is copied.

    Input:   %g = mm(%x, %y) ; %f = reshape(%g, [-1]) ; %h = tanh(%z) ; %t = cat([%f, %h]) ; %r = all_reduce(%t)
    Output:  %t = empty(n) ; %p = view(slice(%t)) ; mm.out(%x, %y, out=%p) ; %h = tanh(%z) ; %q = slice(%t) ;
             copy_(%q, %h) ; %r = all_reduce(%t)
    Refuses: buckets that nothing can be written into, parts that something else reads, and parts that are not their
    producer's whole memory in order.
    """

    def run(self, module: GraphModule) -> GraphModule:
        graph = module.graph
        for node in graph.find_nodes(op="call_function", target=aten.cat.default):
            if [u.target for u in node.users] == [ALL_REDUCE] and node.meta["val"].dim() == 1:
                _fill(graph, node)
        graph.lint()
        module.recompile()
        return module


def _fill(graph: Graph, cat: Node) -> None:
    parts: Sequence[Node] = cat.args[0]  # type: ignore[assignment]
    makers = [_maker(part) if parts.count(part) == 1 else None for part in parts]
    made = [m for m in makers if m is not None]
    if not made:
        return
    value = cat.meta["val"]
    with graph.inserting_before(min(made)):  # nodes compare by their places in the graph
        bucket = graph.call_function(
            aten.empty.memory_format, ([value.numel()],), {"dtype": value.dtype, "device": value.device}
        )
        bucket.meta["val"] = value
    at = 0
    for made_there, run in groupby(zip(parts, makers, strict=True), key=lambda pair: pair[1] is not None):
        pairs = list(run)
        if not made_there:
            at = _copy(graph, cat, bucket, [part for part, _ in pairs], at)
            continue
        for part, maker in pairs:
            assert maker is not None
            at = _write(graph, maker, bucket, at)
            _erase(graph, cat, part, maker)
    cat.replace_all_uses_with(bucket)
    graph.erase_node(cat)


def _write(graph: Graph, maker: Node, bucket: Node, at: int) -> int:
    """Make a value in the bucket from `at` on; where the next one begins."""
    shape = list(maker.meta["val"].shape)
    end = at + math.prod(shape)
    with graph.inserting_before(maker):
        piece = call(graph, aten.slice.Tensor, (bucket, 0, at, end))
        place = call(graph, aten.view.default, (piece, shape))
    maker.target = OUT[maker.target]  # type: ignore[index]
    maker.kwargs = {**maker.kwargs, "out": place}
    return end


def _copy(graph: Graph, cat: Node, bucket: Node, parts: Sequence[Node], at: int) -> int:
    """Copy values into the bucket one after another, just before it is reduced."""
    end = at + sum(part.meta["val"].numel() for part in parts)
    with graph.inserting_before(cat):
        piece = call(graph, aten.slice.Tensor, (bucket, 0, at, end))
        if len(parts) == 1:
            call(graph, aten.copy_.default, (piece, parts[0]))
        else:
            joined = graph.call_function(aten.cat.out, (list(parts),), {"out": piece})
            joined.meta["val"] = piece.meta["val"]
    return end


def _maker(part: Node) -> Node | None:
    """The op that made this flat value, if it can make it elsewhere: all between are views that keep the order."""
    at, flat = part, part.meta["val"]
    while len(at.users) == 1 and (is_view(at) or at.target is aten.reshape.default):
        source = at.args[0]
        assert isinstance(source, Node)
        # a contiguous view of as many elements as its producer has lists them in the order of the memory; a reshape of
        # anything else would be a copy
        if at.target is aten.reshape.default and not source.meta["val"].is_contiguous():
            return None
        at = source
    value = at.meta.get("val")
    whole = isinstance(value, torch.Tensor) and value.is_contiguous() and value.numel() == flat.numel()
    same = whole and value.dtype == flat.dtype
    return at if same and len(at.users) == 1 and at.target in OUT else None


def _erase(graph: Graph, cat: Node, part: Node, maker: Node) -> None:
    """The views between a value and its bucket."""
    cat.args = ([p for p in cat.args[0] if p is not part], *cat.args[1:])  # type: ignore[union-attr]
    at = part
    while at is not maker:
        source = at.args[0]
        graph.erase_node(at)
        at = source  # type: ignore[assignment]
