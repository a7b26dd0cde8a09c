"""What stages of a pipeline send to each other, and how long it takes.

Enters: how every op lies on the micro-batches and the axes of a stage, and the stage of each op. Leaves: a `Send` for
every two stages of which one reads what the other makes, for one micro-batch and one rank of each.

As in the stage pass a value goes straight to each stage that reads it, once; what is made of inputs alone is made again
where it is read. A move between the two ends is made on the side where the value is smaller; read in two layouts of
which one is smaller, both are sent. Stages whose ranks lie in one node are not charged for the network between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from autopar.cost.collective import collective_s
from autopar.cost.hardware import Profile
from autopar.layout import Layout, largest_local_parts
from autopar.mesh import Axis
from autopar.passes.stage import is_product
from autopar.rules.analyse import Analysis
from autopar.rules.decisions import Decisions
from autopar.schedule.table import Schedule


@dataclass(frozen=True, slots=True)
class Send:
    """Everything that stage `source` gives to stage `reader` in one forward; back: the gradients of it."""

    source: int
    reader: int
    size_bytes: int
    back_bytes: int
    time_s: float
    back_time_s: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def stage_sends(
    analysis: Analysis,
    decisions: Decisions,
    sizes: tuple[int, ...],
    stage_of: Mapping[str, int],
    axis: Axis,
    schedule: Schedule,
    profile: Profile,
) -> tuple[Send, ...]:
    """All sends, by source and reader.

    Args:    decisions, sizes: on the micro-batches and then the axes of a stage. stage_of: by the name of an op's node.
             axis: the pipeline. schedule: says which of its ranks has which stage.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for value, source, producer in _made(analysis, decisions, stage_of):
        read: dict[tuple[int, Layout], int] = {}
        common = decisions.reads.get(value, producer)
        for name, position in analysis.users[value]:
            reader = stage_of.get(name, source)
            if reader > source:
                way = (producer, common, decisions.strategies[name].ins[position])
                elements, at = min((_elements(analysis, value, x, sizes), i) for i, x in enumerate(way))
                read[reader, way[at]] = elements
        for (reader, _), elements in read.items():
            size_bytes = elements * analysis.dtypes[value].itemsize
            total = found.setdefault((source, reader), [0, 0])
            total[0] += size_bytes
            total[1] += size_bytes * analysis.grads[value]

    def time_s(source: int, reader: int, size_bytes: int) -> float:
        ways = zip(schedule.ranks_of(source), schedule.ranks_of(reader), strict=True)
        return max(float(collective_s("send", size_bytes, axis.between(*way), profile)) for way in ways)

    return tuple(Send(*pair, *total, *(time_s(*pair, n) for n in total)) for pair, total in sorted(found.items()))


def _made(analysis: Analysis, decisions: Decisions, stage_of: Mapping[str, int]) -> list[tuple[str, int, Layout]]:
    """(value, stage, layout) of all that is not made of inputs alone."""
    sources = analysis.program.sources
    free = {s.node for s in sources if s.kind != "parameter"}
    made = []
    for op in analysis.ops.values():
        if not is_product(op.node) and free.issuperset(op.ins):
            free.update(op.outs)
        elif op.name in stage_of:
            made += [
                (v, stage_of[op.name], x) for v, x in zip(op.outs, decisions.strategies[op.name].outs, strict=True)
            ]
    return made


def _elements(analysis: Analysis, value: str, layout: Layout, sizes: tuple[int, ...]) -> int:
    return largest_local_parts(analysis.parts[value], layout, sizes).numel
