"""Read parameters in the dtype, and on the device, that the program computes in; they are stored otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.program import Program, record, set_record
from autopar.runtime.moves import load, move


@dataclass(frozen=True, eq=False)
class Cast:
    """Cast each parameter's shard before it is gathered, and its gradient before it is reduced; with a `device`, bring
    the shard there from host memory after it is cast, and send the gradient back.

    Input:   %w: bf16 ; %g = move(%w, dp, S0, R) ; %y = linear(%x, %g)                        (%w is stored in fp32)
    Output:  %w: fp32 ; %g = load(%w, bf16, fp32, ((dp, S0, R),)) ; %y = linear(%x, %g)       (reduced in fp32)
    Refuses: nothing. Moves after the first value that has several readers stay, and reduce in the computing dtype.
    """

    stored: Mapping[str, torch.dtype]
    """By path; the dtype in which the placeholder is handed in."""
    reduce: torch.dtype | None
    """None: each gradient is reduced in the dtype that its parameter is read in."""
    device: torch.device | None = None
    """Where the program runs, when the stored parameters lie in host memory."""
    fetched: frozenset[str] = frozenset()
    """Paths of the parameters that do."""

    def run(self, program: Program) -> Program:
        graph = Graph()
        copies: dict[Node, Node] = {}
        output = graph.graph_copy(program.graph, copies)
        made = graph.output(output)
        made.meta = dict(program.output.meta)
        for source in program.sources:
            dtype = self.stored.get(source.path)
            if source.kind == "parameter" and dtype is not None:
                place = next(copies[n] for n in program.placeholders if n.name == source.node)
                self._cast(graph, place, dtype, self.device if source.path in self.fetched else None)
        graph.eliminate_dead_code()
        graph.lint()
        return replace(program, graph=graph)

    def _cast(self, graph: Graph, place: Node, dtype: torch.dtype, device: torch.device | None) -> None:
        value = place.meta["val"]
        compute = value.dtype
        trunks = [_trunk(user) for user in list(place.users) if user.target is move]
        if compute == dtype and device is None and (self.reduce in (dtype, None) or not trunks):
            return
        last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
        plain = [user for user in place.users if user.target is not move]
        if (compute != dtype or device is not None) and plain:
            with graph.inserting_after(last):
                read = self._load(graph, place, compute, (), place, device)
            for user in plain:
                user.replace_input_with(place, read)
        for trunk in trunks:
            with graph.inserting_before(trunk[0]):
                steps = tuple(_step(n) for n in trunk)
                read = self._load(graph, place, compute, steps, trunk[-1], device)
            trunk[-1].replace_all_uses_with(read)
        place.meta["val"] = value.to(dtype)

    def _load(
        self, graph: Graph, place: Node, compute: torch.dtype, steps: Any, like: Node, device: torch.device | None
    ) -> Node:
        fetched = (device,) if device is not None else ()
        read = graph.call_function(load, (place, compute, self.reduce or compute, steps, *fetched))
        read.meta = dict(like.meta)
        moved = ", ".join(f"{axis}: {source} -> {target}" for axis, source, target, *_ in steps)
        notes = (f"as {compute}".replace("torch.", ""), "from the host" if fetched else "", moved)
        set_record(read, record(like), note="; ".join(filter(None, notes)))
        return read


def _trunk(node: Node) -> list[Node]:
    """Moves one after another, up to the first value with another reader."""
    found = [node]
    while len(node.users) == 1 and (user := next(iter(node.users))).target is move:
        node = user
        found.append(node)
    return found


def _step(node: Node) -> tuple[Any, ...]:
    _, axis, source, target, *uncut = node.args
    return axis, source, target, uncut[0] if uncut else ()
