"""What a pipeline is cut between, priced: the blocks of a solved problem, in the program's order.

Enters: a `Found` and the number of stages. Leaves: `Cell`s. Refused, with a `PlanError`: more stages than ops.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.program import record
from autopar.rules.analyse import Analysis
from autopar.rules.call import is_getitem
from autopar.solver.cut import NONE, Cell, Shared, States
from autopar.solver.search import Found


def cells_of(analysis: Analysis, found: Found, stages: int, weights: Mapping[str, float] | None = None) -> list[Cell]:
    """Blocks in order; ops, when there are fewer blocks than stages. weights: bytes of a parameter's copy, by node."""
    built, options = found.built, found.solution.options
    order = [n for n in analysis.program.calls if not is_getitem(n) and n.name in analysis.ops]
    blocks = [record(n).block for n in order]
    if len(set(blocks)) >= stages:
        groups = [(name, list(group)) for name, group in itertools.groupby(order, key=lambda n: record(n).block)]
        names: list[Any] = [name for name, _ in groups]
    else:
        groups = [(record(n).op, [n]) for n in order]
        names = [{"first_op": name, "last_op": name} for name, _ in groups]
    if len(groups) < stages:
        raise PlanError(
            f"pp x virtual_stages = {stages} stages, but the model has {len(groups)} ops to cut between "
            f"(in {len(set(blocks))} blocks); pin fewer stages"
        )
    readers: dict[str, int] = {}  # the last cell that read a parameter
    cells: list[Cell] = []
    gathered = _gathered_bytes(found)
    saved = _activation_bytes(found)
    for name, (_, nodes) in zip(names, groups, strict=True):
        forward_s = input_grad_s = weight_grad_s = update_s = activation = 0.0
        states, shared, passing = NONE, [], 0.0
        for node in nodes:
            first = built.representative[node.name]
            price, index = built.op_prices[first], options[built.op_choice[first]]
            ahead, total = float(price.forward_s[index]), float(price.compute_s[index] + price.communication_s[index])
            forward_s += ahead
            weight_grad_s += float(price.weight_s[index])
            again = ahead if first in built.recomputed else 0.0
            input_grad_s += max(0.0, total - ahead - float(price.weight_s[index])) + again
            activation += saved.get(node.name, 0.0)
            for value in analysis.ops[node.name].ins:
                stored = built.representative.get(value, "") if value not in analysis.ops else ""
                before, readers[value] = readers.get(value), len(cells)
                if stored not in built.storage_choice or before == len(cells):
                    continue
                at, storage = options[built.storage_choice[stored]], built.storage_prices[stored]
                copy = (weights or {}).get(value, 0.0)
                stays, passes = gathered.get(stored, (0.0, 0.0))
                held = States(float(storage.memory_bytes[at]) + stays, copy, float(storage.host_bytes[at]))
                passing += passes
                if before is None:
                    states = states.plus(held)
                    update_s += float(storage.update_s[at])
                else:
                    shared.append(Shared(before, held))
        cells.append(
            Cell(
                name, tuple(record(n).op for n in nodes), forward_s + input_grad_s + weight_grad_s + update_s,
                activation, states, tuple(shared), forward_s, input_grad_s, weight_grad_s, update_s, passing,
            )
        )  # fmt: skip
    return cells


def _gathered_bytes(found: Found) -> dict[str, tuple[float, float]]:
    """Of each stored parameter's gathered copy and its gradient: what stays for a step, and what one block holds."""
    out: dict[str, tuple[float, float]] = {}
    for stored in found.built.stored_edges:
        edge, options = found.built.problem.edges[stored.edge], found.solution.options
        if edge.memory_bytes is not None:
            at = edge.source_layout[options[edge.source]], edge.target_layout[options[edge.target]]
            stays, passes = out.get(stored.node, (0.0, 0.0))
            held = float(edge.memory_bytes[at])
            out[stored.node] = (
                (stays + held / stored.count, passes) if stored.routing.wire.alone else (stays, passes + held)
            )
    return out


def _activation_bytes(found: Found) -> dict[str, float]:
    """What is kept for the backward of what an op reads and makes, by op, of a whole batch: its rows of the memory
    constraint, which has only what is held at once.
    """
    built, options = found.built, found.solution.options
    choices = built.problem.choices
    counts = Counter(built.representative.values())
    out = {}
    for name, first in built.representative.items():
        if first in built.op_choice:
            c = built.op_choice[first]
            losing = built.loss_bytes[first][options[c]] if first in built.loss_bytes else 0.0
            kept = (choices[c].memory_bytes[options[c]] - losing) / found.held
            out[name] = float(kept + losing / found.largest) / counts[first]
    values = Counter(built.read_choice.values())
    for value, c in built.read_choice.items():  # read by several ops in one layout: kept once
        name = value.partition(".")[0]
        if name in out:
            out[name] += float(choices[c].memory_bytes[options[c]]) / found.held / values[c]
    return out
