"""Which parameters a program reads already gathered, so that it gathers none of them itself (ZeRO 1 and 2).

Enters: decisions whose parameters lie as they are stored, and the level of each. Leaves: decisions whose placeholders
lie as they are read, and for each such parameter a `Lifetime` for the runtime. Level 3 stays as it is. An axis is
gathered beforehand when every reader reads it whole, and when no other axis cuts the same part further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.layout import I, Layout, R
from autopar.rules.analyse import Analysis
from autopar.rules.decisions import Decisions
from autopar.runtime.zero import Lifetime


def gather_once(
    analysis: Analysis, decisions: Decisions, levels: Mapping[str, int]
) -> tuple[Decisions, dict[str, Lifetime]]:
    """levels: ZeRO level by parameter path. Returns: decisions for the program, lifetimes by path."""
    sources, found = dict(decisions.sources), {}
    for source in analysis.program.sources:
        level = levels.get(source.path, 0)
        if source.kind != "parameter" or level not in (1, 2):
            continue
        stored = sources[source.node]
        read = _read(analysis, decisions, source.node, stored)
        if read != stored:
            sources[source.node] = read
            found[source.path] = Lifetime(analysis.parts[source.node], stored, read, level)
    return replace(decisions, sources=sources), found


def _read(analysis: Analysis, decisions: Decisions, node: str, stored: Layout) -> Layout:
    users = [decisions.strategies[op].ins[position] for op, position in analysis.users.get(node, [])]
    users += [decisions.reads[node]] if node in decisions.reads else []
    whole = R if analysis.grads[node] else I
    read = stored
    for a in reversed(range(len(stored))):
        cut_further = any(p == stored[a] for p in read[a + 1 :])
        if users and stored[a].kind == "S" and not cut_further and all(u[a].kind != "S" for u in users):
            read = (*read[:a], whole, *read[a + 1 :])
    return read
