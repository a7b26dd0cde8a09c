"""Join small collectives of one group into buckets, and let each be waited for as late as possible."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class MergeCollectives:
    """Join all-reduces of one group and dtype whose results nothing but the outputs reads (gradients), in the order
    they are made.

    Input:   %a = all_reduce(%g0, sum, dp) ; %b = wait(%a) ; %c = all_reduce(%g1, sum, dp) ; %d = wait(%c)
    Output:  %t = cat(flat(%g0), flat(%g1)) ; %r = all_reduce(%t, sum, dp) ; %w = wait(%r) ; %b, %d = views of %w
    Refuses: buckets across groups, dtypes or reductions, and of results that something in the graph reads.
    """

    bucket_bytes: int = 25 * 2**20

    def run(self, module: GraphModule) -> GraphModule:
        graph = module.graph
        buckets: dict[Any, list[tuple[Node, Node]]] = defaultdict(list)
        filled: dict[Any, int] = defaultdict(int)
        full: list[list[tuple[Node, Node]]] = []
        for node in graph.nodes:
            wait = _only_wait(node)
            if node.target is not ALL_REDUCE or wait is None or any(u.op != "output" for u in _readers(wait)):
                continue
            value = node.args[0].meta["val"]
            key = (*node.args[1:], value.dtype)
            buckets[key].append((node, wait))
            filled[key] += value.numel() * value.element_size()
            if filled[key] >= self.bucket_bytes:
                full.append(buckets.pop(key))
                filled[key] = 0
        full += buckets.values()
        for bucket in full:
            if len(bucket) > 1:
                self._merge(module, bucket)
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
        return module

    def _merge(self, module: GraphModule, bucket: list[tuple[Node, Node]]) -> None:
        graph, last = module.graph, bucket[-1][0]
        with graph.inserting_before(last):
            flat = [_call(graph, aten.reshape.default, (n.args[0], [-1])) for n, _ in bucket]
            joined = _call(graph, aten.cat.default, (flat,))
            reduced = _call(graph, ALL_REDUCE, (joined, *last.args[1:]))
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            done = _call(graph, WAIT, (reduced,))
            at = 0
            for node, wait in bucket:
                shape = list(node.args[0].meta["val"].shape)
                size = math.prod(shape)
                piece = _call(graph, aten.slice.Tensor, (done, 0, at, at + size))
                view = _call(graph, aten.reshape.default, (piece, shape))
                view.meta = dict(wait.meta)
                wait.replace_all_uses_with(view)
                graph.erase_node(wait)  # torch.fx takes waits for side effects: dead ones stay
                graph.erase_node(node)
                at += size


@dataclass(frozen=True, slots=True)
class Overlap:
    """Wait for a collective just before its result is first read.

    Input:   %a = all_reduce(%x) ; %w = wait(%a) ; %m = mm(...) ; %y = add(%w, %m)
    Output:  %a = all_reduce(%x) ; %m = mm(...) ; %w = wait(%a) ; %y = add(%w, %m)
    Refuses: nothing; order on one group never changes.
    """

    def run(self, module: GraphModule) -> GraphModule:
        order = {n: i for i, n in enumerate(module.graph.nodes)}
        for node in [n for n in module.graph.nodes if n.target is WAIT]:
            users = sorted(node.users, key=order.__getitem__)
            if users and users[0] is not node.next:
                users[0].prepend(node)
        module.graph.lint()
        module.recompile()
        return module


def _only_wait(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


def _readers(wait: Node) -> list[Node]:
    """What reads a value in the end, views passed through."""
    found, stack = [], list(wait.users)
    while stack:
        node = stack.pop()
        if node.target in (aten.view.default, aten.reshape.default, aten.alias.default, aten.permute.default):
            stack += node.users
        else:
            found.append(node)
    return found


def _call(graph: Any, target: Any, args: tuple[Any, ...]) -> Node:
    made: Node = graph.call_function(target, args)
    fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = next(v.fake_mode for v in torch.utils._pytree.tree_leaves(fakes) if hasattr(v, "fake_mode"))
    with mode:
        made.meta["val"] = target(*fakes)
    return made
