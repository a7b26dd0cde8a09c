"""The solver's solution as decisions for the passes, and what they add up to: degrees, seconds, bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.layout import Layout
from autopar.mesh import LogicalMesh
from autopar.rules.analyse import Analysis
from autopar.rules.decisions import Decisions
from autopar.rules.strategy import Strategy
from autopar.solver.build import Built
from autopar.solver.roles import Roles
from autopar.solver.sinks import left_layout, sink_values


def decide(built: Built, options: Sequence[int], sinks: Mapping[int, str]) -> Decisions:
    """Spread each representative's choice over the ops and parameters it decides for."""
    chosen = {name: built.op_strategies[name][options[c]] for name, c in built.op_choice.items()}
    stored = {name: built.storage_layouts[name][options[c]] for name, c in built.storage_choice.items()}
    strategies = {name: chosen[built.representative[name]] for name in built.analysis.ops}
    sources = {
        s.node: stored[built.representative[s.node]] for s in built.analysis.program.sources if s.kind == "parameter"
    }
    reads = {value: built.read_layouts[c][options[c]] for value, c in built.read_choice.items()}
    return Decisions(strategies, sources, reads, output_layouts(built.analysis, strategies, sinks))


def output_layouts(
    analysis: Analysis, strategies: Mapping[str, Strategy], sinks: Mapping[int, str]
) -> dict[int, Layout]:
    """Layouts of the sinks that are left where they lie."""
    out: dict[int, Layout] = {}
    for i, value in sink_values(analysis):
        name, _, index = value.partition(".")
        if sinks.get(i, "I") == "left" and name in strategies:
            out[i] = left_layout(strategies[name].outs[int(index or 0)], analysis.parts[value])
    return out


@dataclass(frozen=True, slots=True)
class Degrees:
    """Effective degrees: the product of the sizes of the axes that do most of their work in this role."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def to_dict(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp, "cp": self.cp, "ep": self.ep}


def degrees(
    analysis: Analysis, decisions: Decisions, mesh: LogicalMesh, roles: Roles
) -> tuple[Degrees, tuple[str, ...]]:
    """Degrees read off the decisions, and the role that each axis has (or "none")."""
    product = {"dp": 1, "tp": 1, "cp": 1}
    axis_roles = []
    for a, axis in enumerate(mesh.axes):
        work: dict[str, float] = defaultdict(float)
        for name, op in analysis.ops.items():
            option = decisions.strategies[name].options[a]
            factor = op.by_name.get(option)
            if factor is None:
                continue
            # an op without products still counts a little, so that a model without any has degrees too
            work[roles.kind(op, factor)] += (op.rule.flop or 1e-3) if roles.weighs(op, factor) else 0.0
        best = max(work, key=lambda k: work[k], default="none")
        if work and work[best] > 0:
            product[best] *= axis.size
            axis_roles.append(best)
        else:
            axis_roles.append("none")
    if len(axis_roles) == 0:
        return Degrees(), ()
    return Degrees(dp=product["dp"], tp=product["tp"], cp=product["cp"]), tuple(axis_roles)


def zero_level(decisions: Decisions, analysis: Analysis, pinned: int | None) -> int:
    """The pinned level (3 without one) when most parameter elements are stored cut on an axis where their ops do not
    cut them, else 0.
    """
    gathered = total = 0
    users = analysis.users
    for source in analysis.program.sources:
        if source.kind != "parameter":
            continue
        size = analysis.parts[source.node].numel
        total += size
        layout = decisions.sources[source.node]
        used = [decisions.strategies[op].ins[p] for op, p in users.get(source.node, [])]
        gathered += size * any(p.kind == "S" and any(u[a].kind != "S" for u in used) for a, p in enumerate(layout))
    return (pinned or 3) if total and gathered > total / 2 else 0


def parameter_zero(layout: Layout, used: Sequence[Layout], pinned: int | None) -> int:
    """The pinned level (3 without one) for a parameter that is gathered before use, else 0."""
    return (
        (pinned or 3) if any(p.kind == "S" and any(u[a].kind != "S" for u in used) for a, p in enumerate(layout)) else 0
    )


def model_flop(parameters: int, layers: int, hidden: int, sequence: int, tokens: int) -> float:
    """Model floating-point operations of a step: (6 N + 12 l h s) a token; N without input embeddings."""
    return (6.0 * parameters + 12.0 * layers * hidden * sequence) * tokens


def shard_elements(decisions: Decisions, analysis: Analysis, mesh: LogicalMesh) -> int:
    """Parameter elements on the rank with the largest shards."""
    from autopar.layout import largest_local_parts

    return sum(
        math.prod(largest_local_parts(analysis.parts[n], layout, mesh.sizes).flat)
        for n, layout in decisions.sources.items()
    )
