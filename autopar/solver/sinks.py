"""Values at the edge of the program: stable names, the graph's outputs and how they are left."""

from __future__ import annotations

from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.layout import I, Layout, Parts
from autopar.program import record
from autopar.rules.analyse import Analysis, value_of


def stable_name(analysis: Analysis, value: str) -> str:
    """Name of a value that does not depend on fx's numbering: `<op>` or `<op>:<output>`; a parameter's own name."""
    name, _, index = value.partition(".")
    if name in analysis.ops:
        return record(analysis.ops[name].node).op + (f":{index}" if index else "")
    return analysis.program.by_node[name].path


def left_layout(layout: Layout, parts: Parts) -> Layout:
    """How an output lies as a DTensor, left where it is: shards of undivided dims stay, all else becomes invariant.

    Shards inside a divided dim are gathered, since users expect the rows of a shard to be neighbours.
    """
    whole = {p for p in layout if p.kind == "S" and len(parts.dims[parts.dim_of(p.part)]) == 1}
    return tuple(p if p in whole else I for p in layout)


def sink_values(analysis: Analysis) -> list[tuple[int, str]]:
    """(sink index, value name) of the graph's tensor outputs."""
    leaves = pytree.tree_leaves(analysis.program.output.args[0])
    return [(i, value_of(leaf)) for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]
