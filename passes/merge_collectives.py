"""Join small collectives of one group into buckets: gradients in the order they are made, parameters block by block."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.program import record
from autopar.runtime.transfer import PART

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
aten = torch.ops.aten

SHAPES = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.clone.default),
        *(aten.permute.default, aten.slice.Tensor, aten.transpose.int, aten.t.default, aten.unsqueeze.default),
        *(aten.squeeze.dim, aten.expand.default, aten._to_copy.default),
    }
)
"""Ops that hand on the values they are given: views, copies, casts."""
PADS = frozenset({aten.cat.default, aten.new_zeros.default, aten.constant_pad_nd.default})


@dataclass(frozen=True, slots=True)
class MergeCollectives:
    """Join all-reduces, and reduce-scatters, of one group and dtype whose results nothing but the outputs reads
    (gradients), in the order they are made.

    Input:   %a = all_reduce(%g0, sum, dp) ; %b = wait(%a) ; %c = all_reduce(%g1, sum, dp) ; %d = wait(%c)
    Output:  %t = cat(flat(%g0), flat(%g1)) ; %r = all_reduce(%t, sum, dp) ; %w = wait(%r) ; %b, %d = views of %w
             (of a cast of %w, where all of its parts would be cast alike)
    Refuses: buckets across groups, dtypes or reductions, and of results that something in the graph reads.
    """

    bucket_bytes: int = 25 * 2**20

    def run(self, module: GraphModule) -> GraphModule:
        found = []
        for node in module.graph.nodes:
            wait = only_wait(node)
            last = node.target in (ALL_REDUCE, REDUCE_SCATTER) and wait is not None
            if last and wait is not None and all(u.op == "output" for u in _readers(wait)):
                found.append((node, wait))
        for bucket in _buckets(found, self.bucket_bytes, _group):
            if bucket[0][0].target is ALL_REDUCE:
                _merge_reductions(module.graph, bucket, 1)
            else:
                _merge_reductions(module.graph, bucket, bucket[0][0].args[2])
        return _done(module)


@dataclass(frozen=True, slots=True)
class MergeGathers:
    """Join the all-gathers of a block's parameters.

    Input:   %a = all_gather(%w0, n, dp) ; %b = wait(%a) ; ... ; %c = all_gather(%w1, n, dp) ; %d = wait(%c)
    Output:  %t = cat(flat(%w0), flat(%w1)) ; %r = all_gather(%t, n, dp) ; %w = wait(%r) ; %b = part 0 of %w ; ... ;
             %d = part 1 of %w
    Refuses: buckets across groups, dtypes or blocks, and of shards that the graph has to compute first.
    """

    bucket_bytes: int = 25 * 2**20

    def run(self, module: GraphModule) -> GraphModule:
        found = [(node, wait) for node in early_gathers(module.graph) if (wait := only_wait(node)) is not None]
        for bucket in _buckets(found, self.bucket_bytes, lambda node: (record(node).block, *_group(node))):
            _merge_gathers(module.graph, bucket)
        return _done(module)


def early_gathers(graph: Graph) -> list[Node]:
    """All-gathers of what the graph is handed in (shards of parameters), in order."""
    early: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (
            node.target in (*SHAPES, *PADS, ALL_GATHER) and all(i in early for i in node.all_input_nodes)
        ):
            early.add(node)
    return [n for n in graph.nodes if n.target is ALL_GATHER and n in early]


def only_wait(node: Node) -> Node | None:
    """The wait for this collective, if nothing else reads it."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


Bucket = Sequence[tuple[Node, Node]]


def _group(node: Node) -> tuple[Any, ...]:
    return node.target, *node.args[1:], node.args[0].meta["val"].dtype  # type: ignore[union-attr]


def _buckets(found: Bucket, bucket_bytes: int, key_of: Callable[[Node], Any]) -> Iterator[Bucket]:
    """Runs of more than one; a bucket closes once it holds that many bytes."""
    open_: dict[Any, list[tuple[Node, Node]]] = defaultdict(list)
    full, filled = [], defaultdict(int)
    for node, wait in found:
        key, value = key_of(node), node.args[0].meta["val"]  # type: ignore[union-attr]
        open_[key].append((node, wait))
        filled[key] += value.numel() * value.element_size()
        if filled[key] >= bucket_bytes:
            full.append(open_.pop(key))
            filled[key] = 0
    return (bucket for bucket in (*full, *open_.values()) if len(bucket) > 1)


def _merge_reductions(graph: Graph, bucket: Bucket, ranks: int) -> None:
    """One reduction, started when the last of its parts is there, waited for at the end."""
    last = bucket[-1][0]
    with graph.inserting_before(last):
        shape = [-1] if ranks == 1 else [ranks, -1]
        rows = [call(graph, aten.reshape.default, (n.args[0], shape)) for n, _ in bucket]
        flat = call(graph, aten.cat.default, (rows, len(shape) - 1))
        if ranks > 1:
            flat = call(graph, aten.reshape.default, (flat, [-1]))
        reduced = call(graph, last.target, (flat, *last.args[1:]))
    end = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(end):
        done = call(graph, WAIT, (reduced,))
        dtype = _cast_alike([wait for _, wait in bucket])
        if dtype is not None:
            done = call(graph, aten._to_copy.default, (done,), dtype=dtype)
    at = 0
    for node, wait in bucket:
        shape = list(wait.meta["val"].shape)
        size = math.prod(shape)
        with graph.inserting_before(end):
            piece = call(graph, aten.slice.Tensor, (done, 0, at, at + size))
            view = call(graph, aten.reshape.default, (piece, shape))
        _replace(graph, node, wait, view)
        if dtype is not None:
            _read_cast(graph, view, dtype)
        _move_before(end, view)
        at += size


def _cast_alike(waits: Sequence[Node]) -> torch.dtype | None:
    """The dtype to which each of these values is cast whole, read by nothing else, if it is one."""
    casts = [_casts(wait)[-1:] for wait in waits]
    found = {cast.kwargs["dtype"] for last in casts for cast in last}
    return found.pop() if all(casts) and len(found) == 1 else None


def _casts(value: Node) -> list[Node]:
    """What reads a value, one after the other, up to its cast; nothing if there is none, or not of all of it."""
    chain: list[Node] = []
    while len(value.users) == 1:
        size, (value,) = value.meta["val"].numel(), value.users
        if value.target not in SHAPES or value.meta["val"].numel() != size:
            break
        chain.append(value)
        if value.target is aten._to_copy.default:
            return chain if set(value.kwargs) == {"dtype"} else []
    return []


def _read_cast(graph: Graph, view: Node, dtype: torch.dtype) -> None:
    """Take out the cast behind a view of what has been cast."""
    *between, cast = _casts(view)
    for node in (view, *between):
        node.meta["val"] = node.meta["val"].to(dtype)
    cast.replace_all_uses_with(cast.args[0])  # type: ignore[arg-type]
    graph.erase_node(cast)


def _merge_gathers(graph: Graph, bucket: Bucket) -> None:
    """One gather, where the first of them stood; its parts are taken out where each is waited for."""
    first, ranks = bucket[0][0], bucket[0][0].args[1]
    first_wait = min(wait for _, wait in bucket)
    chain = [a for n, _ in bucket for a in start_of(n) if a is not n]
    for node in dict.fromkeys(chain):
        if first < node:
            first.prepend(node)
    with graph.inserting_before(first):
        flat = [call(graph, aten.reshape.default, (n.args[0], [-1])) for n, _ in bucket]
        joined = call(graph, aten.cat.default, (flat,))
        gathered = call(graph, ALL_GATHER, (joined, *first.args[1:]), like=first)
    with graph.inserting_before(first_wait):
        done = call(graph, WAIT, (gathered,), like=first_wait)
        rows = call(graph, aten.reshape.default, (done, [ranks, -1]), like=first_wait)
    at = 0
    for node, wait in bucket:
        shape = list(wait.meta["val"].shape)
        size = math.prod(shape) // ranks  # type: ignore[operator]
        with graph.inserting_before(wait):
            piece = call(graph, aten.slice.Tensor, (rows, 1, at, at + size))
            view = call(graph, aten.reshape.default, (piece, shape))
        _replace(graph, node, wait, view)
        at += size


def start_of(node: Node) -> list[Node]:
    """A collective and the calls that make what it sends, in order."""
    found: dict[Node, None] = {}

    def visit(at: Node) -> None:
        if at.op != "placeholder" and at not in found:
            for i in at.all_input_nodes:
                visit(i)
            found[at] = None

    visit(node)
    return list(found)


def _replace(graph: Graph, node: Node, wait: Node, view: Node) -> None:
    view.meta = dict(wait.meta)
    wait.replace_all_uses_with(view)
    graph.erase_node(wait)  # torch.fx takes waits for side effects: dead ones stay
    graph.erase_node(node)


def _move_before(end: Node, node: Node) -> None:
    """Move what reads a value behind it; all of it only hands the value on to the outputs."""
    for user in list(node.users):
        if user is not end:
            end.prepend(user)
            _move_before(end, user)


def _readers(wait: Node) -> list[Node]:
    """What reads a value in the end; views, copies, casts and what makes it a part of a sum are passed through."""
    found, stack = [], list(wait.users)
    while stack:
        node = stack.pop()
        if node.target in SHAPES or node.target is PART:
            stack += node.users
        else:
            found.append(node)
    return found


def call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node | None = None, **kwargs: Any) -> Node:
    """A new call, with its fake value; the record is that of `like`."""
    made: Node = graph.call_function(target, args, kwargs)
    made.meta = dict(like.meta) if like is not None else {}
    fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = next(v.fake_mode for v in torch.utils._pytree.tree_leaves(fakes) if hasattr(v, "fake_mode"))
    with mode:
        made.meta["val"] = target(*fakes, **kwargs)
    return made


def _done(module: GraphModule) -> GraphModule:
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module
