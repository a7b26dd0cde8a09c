"""What the gathers of stored parameters share with others of their block, hold in memory, and are forbidden.

Enters: an `Analysis`, a logical mesh, settings, roles. Leaves: `Gathers`, asked by `build` for each edge that starts at
a stored parameter. Refused: nothing; a gather that ZeRO 0 forbids costs infinitely much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from autopar.cost.compute import element_bytes
from autopar.cost.fitted import Software
from autopar.cost.memory import parameter_bytes
from autopar.cost.route import Routes, Wire
from autopar.layout import Layout, Parts, largest_local_parts
from autopar.mesh import LogicalMesh
from autopar.program import record
from autopar.rules.analyse import Analysis
from autopar.solver.problem import Floats
from autopar.solver.roles import Roles
from autopar.solver.settings import Settings, compute_dtype


@dataclass(frozen=True, eq=False)
class StoredEdge:
    """From the stored parameter `node` to a reader. forwards: times the forward's part is made."""

    node: str
    edge: int
    routing: Routes
    rows: list[Layout]
    columns: list[Layout]
    count: int
    forwards: int


@dataclass(frozen=True, eq=False)
class Sizes:
    """Of values as the step computes with them."""

    analysis: Analysis
    mesh: LogicalMesh
    settings: Settings

    def operand(self, value: str) -> tuple[Parts, torch.dtype]:
        return self.analysis.parts[value], compute_dtype(self.analysis.dtypes[value], self.settings.precision)

    def local_bytes(self, value: str, layouts: Sequence[Layout]) -> Floats:
        """Of the largest local tensor in each layout."""
        parts, dtype = self.operand(value)
        sizes = {x: largest_local_parts(parts, x, self.mesh.sizes).numel * element_bytes(dtype) for x in set(layouts)}
        return np.array([sizes[x] for x in layouts], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Gathers:
    """Answers for one problem. counts: how many equal blocks a representative stands for."""

    sizes: Sizes
    roles: Roles
    software: Software
    counts: Mapping[str, int]

    @property
    def analysis(self) -> Analysis:
        return self.sizes.analysis

    @property
    def settings(self) -> Settings:
        return self.sizes.settings

    @cached_property
    def sources(self) -> frozenset[str]:
        return frozenset(self.analysis.program.by_node)

    def wire(self, value: str) -> Wire:
        """Parameters of a block are sent together, beside compute but for the wait for the last rank; what ops make is
        waited for.
        """
        fitted = self.software.fitted
        if value not in self.sources or value not in self.roles.weights:
            return Wire(fitted.collective_sync_s, pieces=self.pieces(value))
        block = self.block_bytes.get(self.home(value), 0.0)
        own = max(1.0, self.analysis.parts[value].numel * float(element_bytes(self.analysis.dtypes[value])))
        held = parameter_bytes("none", element_bytes(self.analysis.dtypes[value]), self.settings.precision)
        blocks = max((len(c.blocks) for c in self.analysis.program.classes), default=1)
        overlaps = self.software.overlap and fitted.overlap_slowdown < 1
        together = max(1.0, block / own)
        again = 1 if self.once else self.settings.pieces
        return Wire(
            sync_s=fitted.collective_sync_s / together,
            share=fitted.overlap_slowdown if self.software.overlap and not self.once else 1.0,
            shown=1 / blocks / again if overlaps and not self.once else 0.0,
            together=together,
            copied=not self.software.overlap,
            reduced=held.gradients / element_bytes(self.sizes.operand(value)[1]),
            again=again,
            after=self.settings.pins.staged,
            alone=self.once,
        )

    @property
    def once(self) -> bool:
        """Are parameters gathered before a step's programs, and gradients reduced after them (ZeRO 1 and 2)?"""
        return self.settings.pins.zero in (1, 2)

    def pieces(self, value: str) -> int:
        """A value of the batch is made, and sent, once for each micro-batch."""
        rows = (
            size
            for part, size in enumerate(self.analysis.parts[value].flat)
            if self.analysis.classes.get((value, part)) in self.roles.batch
        )
        return min(self.settings.pieces, next(rows, 1))

    def home(self, source: str) -> str:
        """The block that first reads a parameter."""
        readers = self.analysis.users.get(source, ())
        return record(self.analysis.ops[readers[0][0]].node).block if readers else ""

    @cached_property
    def block_bytes(self) -> Mapping[str, float]:
        """Bytes of the parameters of each block, as stored."""
        found: dict[str, float] = defaultdict(float)
        for source in self.analysis.program.sources:
            if source.kind == "parameter":
                width = element_bytes(self.analysis.dtypes[source.node])
                found[self.home(source.node)] += self.analysis.parts[source.node].numel * width
        return found

    def held_bytes(self, node: str, rows: Sequence[Layout], columns: Sequence[Layout], count: int) -> Floats:
        """What is held of gathered parameters. ZeRO 1 and 2 keep them for a whole step, and the whole gradient until it
        ends; else a block's and the next one's are there, and the gradients of one, where blocks repeat. Of other
        parameters one is there at a time: each counts by its share of them.
        """
        reduced = self.wire(node).reduced if self.analysis.grads[node] else 0.0
        gradient = (reduced if self.settings.pins.staged else 1.0) if reduced else 0.0  # micro-batches add it up
        kept = (1 + gradient) * count if self.once else 0.0
        passing = 2 + reduced if count > 1 else self.single_bytes.get(node, 0.0)
        out = np.zeros((len(rows), len(columns)))
        for j, size_bytes in enumerate(self.sizes.local_bytes(node, columns)):
            for i, row in enumerate(rows):
                if any(p.kind == "S" and q.kind != "S" for p, q in zip(row, columns[j], strict=True)):
                    out[i, j] = (kept or passing) * size_bytes
        return out

    @cached_property
    def single_bytes(self) -> Mapping[str, float]:
        """Parameters of no repeated block: the share that each has of all of them."""
        nodes = [s.node for s in self.analysis.program.sources if s.kind == "parameter" and self.counts[s.node] == 1]
        sizes = {node: float(self.analysis.parts[node].numel) for node in nodes}
        total = sum(sizes.values()) or 1.0
        return {node: size / total for node, size in sizes.items()}

    def forbidden(self, rows: Sequence[Layout], columns: Sequence[Layout]) -> Floats:
        """ZeRO 0 stores parameters as they are used: no gathers on the data axes."""
        out = np.zeros((len(rows), len(columns)))
        if self.settings.pins.zero == 0:
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    if any(p.kind == "S" and q.kind != "S" for p, q in zip(row, column, strict=True)):
                        out[i, j] = np.inf
        return out
