"""Which parameters are made ready before a program runs, so that it gathers none of them itself (ZeRO 1 and 2), or need
not know that they lie in host memory (offload).

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


def offloaded(path_is_trainable: bool, offload: str) -> bool:
    """Does a parameter lie in host memory? With "optimizer" those do that an optimizer steps."""
    return offload == "parameters" or (offload == "optimizer" and path_is_trainable)


def bring_from_host(
    analysis: Analysis,
    decisions: Decisions,
    lifetimes: Mapping[str, Lifetime],
    offload: str,
    whole_call: bool,
) -> tuple[dict[str, Lifetime], frozenset[str]]:
    """How parameters get to the device from host memory.

    Args:    decisions: placeholders lie as they are read. lifetimes: of those that are gathered once a step.
             offload: "none"; "optimizer": a copy of the shard stays on the device until the parameters change;
             "parameters": the program fetches each when it needs it. whole_call: it can't, as in a pipeline, whose
             micro-batches share parameters: they are fetched for a call.
    Returns: lifetimes by path; paths that the program fetches itself.
    """
    found, fetched = dict(lifetimes), set()
    for source in analysis.program.sources:
        if source.kind != "parameter" or not offloaded(source.trainable, offload):
            continue
        if source.path in found:
            found[source.path] = replace(found[source.path], host=True)
        elif offload == "optimizer" or whole_call:
            stored = decisions.sources[source.node]
            parts, kept = analysis.parts[source.node], offload == "optimizer"
            found[source.path] = Lifetime(parts, stored, stored, level=3, host=True, kept=kept)
        else:
            fetched.add(source.path)
    return found, frozenset(fetched)


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
