"""Which ops and parameters decide for others: the same position in another block of equal structure."""

from __future__ import annotations

from autopar.rules.analyse import Analysis


def representatives(analysis: Analysis) -> dict[str, str]:
    """Op or source -> the first of its equals: the same position in another block of the class, with equal factors."""
    out: dict[str, str] = {}
    block_of: dict[str, tuple[int, int]] = {}
    for c, cls in enumerate(analysis.program.classes):
        for b, names in enumerate(cls.nodes):
            for position, name in enumerate(names):
                first = cls.nodes[0][position]
                if name in analysis.ops and first in analysis.ops and _alike(analysis, name, first):
                    out[name] = first
                block_of[name] = (c, b)
    for name in analysis.ops:
        out.setdefault(name, name)
    by_use: dict[object, str] = {}
    for source in analysis.program.sources:
        users = analysis.users.get(source.node, [])
        key: object = source.node
        if source.kind == "parameter" and users and len({block_of.get(op) for op, _ in users}) == 1:
            key = (
                source.trainable,
                analysis.parts[source.node],
                analysis.dtypes[source.node],
                tuple(sorted((out[op], p) for op, p in users)),
            )
        out[source.node] = by_use.setdefault(key, source.node)
    return out


def _alike(analysis: Analysis, a: str, b: str) -> bool:
    x, y = analysis.ops[a], analysis.ops[b]
    return (
        x.factors == y.factors
        and x.in_grads == y.in_grads
        and [analysis.parts[v] for v in (*x.ins, *x.outs)] == [analysis.parts[v] for v in (*y.ins, *y.outs)]
    )
