"""What each axis may do in each op, and what it must: pinned roles turned into allowed and required options.

A factor is *batch* when its parts are tied by the rules to dim 0 of the first tensor input (or what `batch_dims`
says), and
*sequence* when they are tied to the query or key sequence of attention (without attention: to dim 1 of an integer
input).
A pinned axis splits ops only in its own role; every op with a matrix product that can take the role must take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.errors import PlanError
from autopar.mesh import LogicalMesh
from autopar.pins import Pins
from autopar.program import record
from autopar.rules.analyse import Analysis, Op
from autopar.rules.refine import Factor

NORMS = ("aten.layer_norm", "aten.rms_norm", "aten.native_layer_norm", "aten.mean.dim")
"""Also the mean of squares of a norm that is written out."""


PICKS = (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)
"""Rows of one operand in the order that another one says."""


@dataclass(frozen=True, eq=False)
class Roles:
    analysis: Analysis
    mesh: LogicalMesh
    pins: Pins
    batch_dims: Mapping[str, int]

    @cached_property
    def batch(self) -> frozenset[int]:
        """Classes of parts that are the batch."""
        found: set[int] = set()
        rows: set[str] = set()
        inputs = [s for s in self.analysis.program.sources if s.kind == "input"]
        shaped = [s for s in inputs if self.analysis.parts[s.node].dims]
        for source in shaped:
            dim = self.batch_dims.get(source.path, 0 if source is shaped[0] and not self.batch_dims else None)
            if dim is None:
                continue
            parts = self.analysis.parts[source.node]
            if not -len(parts.dims) <= dim < len(parts.dims):
                raise PlanError(f"batch_dims[{source.path!r}]={dim}: the input has {len(parts.dims)} dims")
            place = (source.node, parts.starts[dim % len(parts.dims)])
            if place in self.analysis.classes:
                found.add(self.analysis.classes[place])
            else:
                rows.add(source.node)
        for op in self.analysis.ops.values():
            self._pass_on_rows(op, found, rows)
        return frozenset(found)

    @cached_property
    def rows(self) -> int:
        """Of the global batch."""
        found = (
            self.analysis.parts[value].flat[part]
            for (value, part), n in self.analysis.classes.items()
            if n in self.batch
        )
        return next(found, 1)

    def _pass_on_rows(self, op: Op, found: set[int], rows: set[str]) -> None:
        """Rows of the batch go in, as many rows come out, and the op cannot be cut along them (it sorts them, or has
        no rule) or picks them in an order of its own (a shuffled batch): what comes out is rows of the batch, too. This
        names a role; it says nothing about the numbers.

        found: classes that are the batch, grows. rows: values whose rows are the batch and that no factor cuts.
        """
        parts, classes = self.analysis.parts, self.analysis.classes

        def first(value: str) -> tuple[str, int] | None:
            return (value, parts[value].starts[0]) if parts[value].dims else None

        sizes = {
            parts[v].shape[0]
            for v in op.ins
            if (place := first(v)) is not None and (v in rows or classes.get(place) in found)
        }
        picks = op.node.target in PICKS
        cut = {(v, p) for f in op.factors for v, p in zip((*op.ins, *op.outs), (*f.ins, *f.outs), strict=True)}
        for value in op.outs:
            place = first(value)
            if place is None or (place in cut and not picks) or parts[value].shape[0] not in sizes:
                continue
            if place in classes:
                found.add(classes[place])
            else:
                rows.add(value)

    @cached_property
    def sequence(self) -> frozenset[int]:
        """Classes of parts that are the sequence (the batch excepted)."""
        found = set()
        for op in self.analysis.ops.values():
            for value, dim in _sequences(op):
                found |= {self.analysis.classes.get((value, part), -1) for part in self._parts_of_dim(value, dim)}
        if not found:
            for source in self.analysis.program.sources:
                if (
                    source.kind == "input"
                    and len(self.analysis.parts[source.node].dims) > 1
                    and not self.analysis.dtypes[source.node].is_floating_point
                ):
                    found |= {
                        self.analysis.classes.get((source.node, part), -1)
                        for part in self._parts_of_dim(source.node, 1)
                    }
        return frozenset(found) - self.batch - {-1}

    def _parts_of_dim(self, value: str, dim: int) -> range:
        parts = self.analysis.parts[value]
        dim %= len(parts.dims)
        return range(parts.starts[dim], parts.starts[dim] + len(parts.dims[dim]))

    @cached_property
    def weights(self) -> frozenset[str]:
        """Values computed from parameters alone."""
        found = {s.node for s in self.analysis.program.sources if s.kind == "parameter"}
        for op in self.analysis.ops.values():
            if op.ins and all(v in found for v in op.ins):
                found.update(op.outs)
        return frozenset(found)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Weights, and those picked from a stack of them by integers (the experts of each token): a product with one of
        them can be tensor parallel. What is picked from a table of rows is an embedding, and no weight.
        """
        found = set(self.weights)
        for op in self.analysis.ops.values():
            picked = [v for v in op.ins if v not in found]
            stacks = [v for v in op.ins if v in found]
            if stacks and all(self._integer(v) for v in picked):
                if not picked or all(len(self.analysis.parts[v].dims) > 2 for v in stacks):
                    found.update(op.outs)
        return frozenset(found)

    def _integer(self, value: str) -> bool:
        dtype = self.analysis.dtypes[value]
        return not (dtype.is_floating_point or dtype.is_complex)

    def kind(self, op: Op, factor: Factor) -> str:
        """What cutting this factor means: "dp", "cp" (sequence) or "tp" (anything else)."""
        number = self.analysis.factor_class(op, factor)
        return "dp" if number in self.batch else "cp" if number in self.sequence else "tp"

    def weighs(self, op: Op, factor: Factor) -> bool:
        """Does cutting this factor make the axis one of the factor's role, and not merely split what lies between?"""
        kind = self.kind(op, factor)
        if kind == "tp":
            return any(v in self.matrices for v in op.ins)
        return kind == "dp" or is_attention(op)

    def allowed(self, op: Op, axis: int, option: str, factor: Factor | None) -> bool:
        """May `op` take `option` on this axis? A free axis may take any role that is not pinned."""
        role = self.mesh.axes[axis].role
        if factor is None:
            return True
        kind = self.kind(op, factor)
        if role is None:
            return kind not in self.pins.degrees
        if role == "tp":
            return kind == "tp" or (kind == "cp" and self.pins.sp is not False and op.rule.flop == 0)
        return kind == role

    def required(self, op: Op, role: str) -> frozenset[str]:
        """Options of which `op` must take one on some axis of a pinned role; empty when it need not."""
        if role == "tp" and self.pins.sp and self.between_products(op):
            return frozenset(f.name for f in op.factors if self.kind(op, f) == "cp")
        if not op.rule.flop or role not in {a.role for a in self.mesh.axes}:
            return frozenset()
        if role == "tp" and not (is_attention(op) or any(v in self.matrices for v in op.ins)):
            return frozenset()
        return frozenset(f.name for f in op.factors if self.kind(op, f) == role)

    def between_products(self, op: Op) -> bool:
        """Is this what Megatron's sequence parallelism keeps cut: a norm, or a sum with the residual?

        Known by its activation of [batch, sequence, width]; sums inside attention have a dim of heads.
        """
        adds = "aten.add." in str(op.node.target) and len(op.in_grads) == 2 and all(op.in_grads)
        norms = any(word in str(op.node.target) for word in NORMS) and any(op.in_grads)
        shaped = op.ins and len(self.analysis.parts[op.ins[0]].dims) == 3
        return bool((adds or norms) and shaped and {self.kind(op, f) for f in op.factors} >= {"dp", "cp"})


def is_attention(op: Op) -> bool:
    """The fused op, or one of the two products that it is taken apart into when it drops weights."""
    if "scaled_dot_product_attention" in str(op.node.target):
        return True
    name = record(op.node).op
    return "scaled_dot_product_attention/" in name and name.endswith((":scores", ":product"))


def _sequences(op: Op) -> tuple[tuple[str, int], ...]:
    """(value, dim) of queries and keys in attention."""
    if not is_attention(op):
        return ()
    if "scaled_dot_product_attention" in str(op.node.target):
        return (op.ins[0], -2), (op.ins[1], -2)
    return (op.ins[0], -2), (op.ins[1], -1 if record(op.node).op.endswith(":scores") else -2)
