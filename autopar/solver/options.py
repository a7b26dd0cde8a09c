"""Which of its strategies an op may take: those that keep the pins, the given plan, and the digits of the model's own
dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import PlanError
from autopar.mesh import LogicalMesh
from autopar.program import record
from autopar.rules.analyse import Analysis, Op
from autopar.rules.strategy import Strategy, strategies
from autopar.solver.roles import Roles
from autopar.solver.settings import Settings


@dataclass(frozen=True, eq=False)
class Options:
    """Finds the strategies of each op."""

    analysis: Analysis
    mesh: LogicalMesh
    settings: Settings
    roles: Roles

    @cached_property
    def widest(self) -> int:
        """Bytes of an element of the widest trainable parameter."""
        sources = self.analysis.program.sources
        return max((self.analysis.dtypes[s.node].itemsize for s in sources if s.trainable), default=0)

    def of(self, op: Op) -> list[Strategy]:
        """All strategies that `op` may take; never empty."""
        found = strategies(
            op.rule,
            op.factors,
            self.mesh.sizes,
            in_grads=op.in_grads,
            out_grads=op.out_grads,
            allowed=lambda axis, option, factor: self.roles.allowed(op, axis, option, factor),
        )
        found = self.keep_required(op, found)
        found = [s for s in found if self.exact(op, s)] or found
        found = [s for s in found if self.leaves_rows(op, s)] or found
        return self.keep_fixed(op, found)

    def leaves_rows(self, op: Op, strategy: Strategy) -> bool:
        """Has each micro-batch a row for every rank that the batch is divided over?"""
        if self.settings.pieces == 1:
            return True
        ranks: dict[str, int] = {}
        for axis, option in zip(self.mesh.axes, strategy.options, strict=True):
            factor = op.by_name.get(option)
            if factor is not None and factor.size and self.roles.kind(op, factor) == "dp":
                ranks[option] = ranks.get(option, 1) * axis.size
        return all(op.by_name[f].size >= n * min(self.settings.pieces, op.by_name[f].size) for f, n in ranks.items())

    def exact(self, op: Op, strategy: Strategy) -> bool:
        """No sums of parts in a narrower dtype than the parameters' own: float32 norms keep a float64 model's digits.

        A sum to a scalar (a loss) is the exception: without it no batch could be cut.
        """
        narrow_in = [self.narrow(v) and g for v, g in zip(op.ins, op.in_grads, strict=True)]
        narrow_out = [self.narrow(v) and g for v, g in zip(op.outs, op.out_grads, strict=True)]
        if any(n and any(p.kind in "RP" for p in layout) for n, layout in zip(narrow_in, strategy.ins, strict=True)):
            return False
        for value, narrow, layout in zip(op.outs, narrow_out, strategy.outs, strict=True):
            if narrow and any(p.kind == "R" or (p.kind == "P" and self.analysis.parts[value].dims) for p in layout):
                return False
        return True

    def narrow(self, value: str) -> bool:
        return self.analysis.dtypes[value].itemsize < self.widest

    def keep_required(self, op: Op, found: list[Strategy]) -> list[Strategy]:
        for role in ("dp", "tp", "cp"):
            wanted = self.roles.required(op, role)
            on = [a for a, axis in enumerate(self.mesh.axes) if axis.role == role]
            best = max((sum(s.options[a] in wanted for a in on) for s in found), default=0) if wanted else 0
            if best:
                found = [s for s in found if sum(s.options[a] in wanted for a in on) == best]
        return found

    def keep_fixed(self, op: Op, found: list[Strategy]) -> list[Strategy]:
        """The plan's strategy for this op, where it names one that still exists."""
        fixed = self.settings.fixed
        name = record(op.node).op
        options = fixed.ops.get(name) if fixed is not None else None
        for option in options or ():
            letter = option.partition(".")[0]
            if letter not in op.rule.letters and not re.fullmatch(r"I|R|P\d+", option):
                known = ", ".join(("I", "R", *op.rule.letters))
                raise PlanError(f'ops["{name}"].strategy: {option!r} is no option of {op.node.target}; it has {known}')
        return [s for s in found if s.options == options] or found

    def covers(
        self, chosen: Mapping[str, int], found: Mapping[str, list[Strategy]]
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Each pinned axis must cut at least one op that makes it one of its role; sp asks for an op cut along the
        sequence on a tp axis. A plan that is carried out for another batch (the last one, of one sample) keeps what it
        can: its axis was cut when it was made.
        """

        def cuts(name: str, option: str) -> bool:
            op = self.analysis.ops[name]
            return option in op.by_name and self.roles.weighs(op, op.by_name[option])

        out = []
        for a, axis in enumerate(self.mesh.axes):
            if axis.role is None:
                continue
            row = [
                (chosen[name], i)
                for name, options in found.items()
                for i, s in enumerate(options)
                if cuts(name, s.options[a])
            ]
            if not row and self.settings.fixed is not None:
                continue
            if not row:
                raise PlanError(
                    f"pin {axis.role}={self.settings.pins.degrees[axis.role]} cannot be kept: no op of the model "
                    f"can be cut in {axis.size} on axis '{axis.name}'"
                )
            if not any(options and all(cuts(n, s.options[a]) for s in options) for n, options in found.items()):
                out.append(tuple(row))
        if self.settings.pins.sp:
            on = [a for a, axis in enumerate(self.mesh.axes) if axis.role == "tp"]
            row = [
                (chosen[name], i)
                for name, options in found.items()
                for i, s in enumerate(options)
                if any(self.cuts_sequence(name, s.options[a]) for a in on)
            ]
            if not row:
                raise PlanError("pin sp=True cannot be kept: no op can be cut along the sequence on the tp axis")
            out.append(tuple(row))
        return tuple(out)

    def cuts_sequence(self, name: str, option: str) -> bool:
        op = self.analysis.ops[name]
        return option in op.by_name and any(op.out_grads) and self.roles.kind(op, op.by_name[option]) == "cp"
