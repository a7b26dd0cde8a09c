"""Start collectives early and wait for them late, so that they run beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from autopar.passes.aliases import is_view
from autopar.passes.merge_collectives import REDUCE_SCATTER, WAIT, early_gathers, only_wait, start_of


@dataclass(frozen=True, slots=True)
class Overlap:
    """Wait for a collective just before its result, or a view of it, is first read; for a reduce-scatter at the latest
    before the next one of its group starts, since what is reduced stays in memory until then.

    Input:   %a = all_reduce(%x) ; %w = wait(%a) ; %m = mm(...) ; %y = add(%w, %m)
    Output:  %a = all_reduce(%x) ; %m = mm(...) ; %w = wait(%a) ; %y = add(%w, %m)
    Refuses: nothing; order on one group never changes.
    """

    def run(self, module: GraphModule) -> GraphModule:
        waited: set[Node] = set()
        for node in module.graph.nodes:
            if node.target is WAIT or (is_view(node) and node.args[0] in waited):
                waited.add(node)
        for node in [n for n in reversed(module.graph.nodes) if n in waited]:  # readers first: views go along
            first = min(node.users, default=None)  # nodes compare by their places in the graph
            if first is not None and first is not node.next:
                first.prepend(node)
        for scatter, following in _one_after_another(module.graph):
            wait = only_wait(scatter)
            if wait is not None and following < wait:
                following.prepend(wait)
        module.graph.lint()
        module.recompile()
        return module


def _one_after_another(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Reduce-scatters that follow each other on one group."""
    last: dict[tuple[Any, ...], Node] = {}
    for node in graph.find_nodes(op="call_function", target=REDUCE_SCATTER):
        group = tuple(node.args[2:])
        if group in last:
            yield last[group], node
        last[group] = node


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Gather the next block's parameters during this one: start each gather before the one before it is waited for.

    Input:   %a = all_gather(%w0) ; %b = wait(%a) ; ... block 0 ... ; %c = all_gather(%w1) ; %d = wait(%c)
    Output:  %a = all_gather(%w0) ; %c = all_gather(%w1) ; %b = wait(%a) ; ... block 0 ... ; %d = wait(%c)
    Refuses: shards that the graph has to compute first; to delay a gather that is early already, since the one before
    it is waited for later still. `ahead` gathers more are in memory at a time.
    """

    ahead: int = 1

    def run(self, module: GraphModule) -> GraphModule:
        gathers = early_gathers(module.graph)
        for i, gather in enumerate(gathers[1:], 1):
            wait = only_wait(gathers[max(i - self.ahead, 0)])
            if wait is not None and wait < gather:
                for node in start_of(gather):
                    if wait < node:
                        wait.prepend(node)
        module.graph.lint()
        module.recompile()
        return module
