"""How often each op moves its operands through memory when ops between products are fused.

Enters: an `Analysis`. Leaves: for each op a `Traffic`: weights of its operands' bytes, forward and backward, and
whether it launches a kernel. Refused: nothing.

Pointwise ops and reductions of rows join the kernel of the op they read from when both wait for the same products. A
value is written when something outside its kernel reads it, and each kernel reads it once:

    forward   a read of each value from outside, a write of each value that goes outside
    backward  the gradients of what was written are read, values that a derivative needs are read again, the gradients
              of what was read are written; a value that several kernels read adds their gradients up (products add
              theirs to what is there). A sum passes its gradient on and moves nothing.

Source: the same counting as `layer_time.pointwise_bytes` makes by sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.cost.saved import keeps, storage_roots
from autopar.rules.analyse import Analysis, Op, value_of

REDUCTIONS = frozenset(
    "layer_norm rms_norm native_layer_norm softmax _softmax log_softmax mean sum amax var std dropout cat stack".split()
)
"""Ops that fuse though they are not pointwise: they work on whole rows, or put values side by side."""
SUMS = frozenset({"add", "sub", "add_", "sub_"})
ADDED = 2
"""Moves of a gradient that is added to another one: written, and read."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Times each operand's bytes are moved: (inputs, outputs). launches: does a kernel begin with this op?"""

    forward: tuple[tuple[float, ...], tuple[float, ...]]
    backward: tuple[tuple[float, ...], tuple[float, ...]]
    launches: bool


def traffic(analysis: Analysis, fused: bool = True) -> Mapping[str, Traffic]:
    """Of every op by name. fused: False: each op reads and writes all of its operands."""
    return _Kernels(analysis, fused).traffic()


def op_name(op: Op) -> str:
    """`add` of `aten.add.Tensor`."""
    return str(op.node.target).removeprefix("aten.").partition(".")[0]


def is_fusible(op: Op) -> bool:
    """Pointwise, or a reduction of rows."""
    if op.rule.flop or op.rule.view or not op.ins or not op.has_rule:
        return False
    out = {letter for dims in op.rule.outs for dim in dims for letter in dim}
    inside = {letter for dims in op.rule.ins for dim in dims for letter in dim}
    return op_name(op) in REDUCTIONS or (inside <= out and not op.rule.whole and not op.rule.distributed)


class _Kernels:
    def __init__(self, analysis: Analysis, fused: bool) -> None:
        self.analysis, self.fused = analysis, fused
        self.roots = storage_roots(analysis)
        self.maker = {v: op for op in analysis.ops.values() for v in op.outs}
        leaves = pytree.tree_leaves(analysis.program.output.args[0])
        self.results = {value_of(r) for r in leaves if isinstance(r, Node)}
        self.fusible = {name: fused and is_fusible(op) for name, op in analysis.ops.items()}
        self.depth = self._depths()
        self.written = {v: self._is_written(op, v) for op in analysis.ops.values() if not op.rule.view for v in op.outs}
        self.kernel = self._kernels()

    def source(self, value: str) -> Op | None:
        """The op that made a value, views aside."""
        op = self.maker.get(value)
        while op is not None and op.rule.view and op.ins:
            op = self.maker.get(op.ins[0])
        return op

    def made(self, value: str) -> str:
        """The value that this one is a view of."""
        op = self.maker.get(value)
        while op is not None and op.rule.view and op.ins:
            value = op.ins[0]
            op = self.maker.get(value)
        return value

    def readers(self, value: str) -> Iterator[Op]:
        """Ops that read a value, or a view of it."""
        for name, _ in self.analysis.users.get(value, ()):
            op = self.analysis.ops[name]
            if op.rule.view:
                for out in op.outs:
                    yield from self.readers(out)
            else:
                yield op

    def leaves(self, value: str) -> bool:
        """Is it, or a view of it, an output of the program?"""
        if value in self.results:
            return True
        views = (self.analysis.ops[name] for name, _ in self.analysis.users.get(value, ()))
        return any(self.leaves(out) for op in views if op.rule.view for out in op.outs)

    def _depths(self) -> dict[str, int]:
        """Products, and other ops that are not fused, on the longest way to an op."""
        depth: dict[str, int] = {}
        for name, op in self.analysis.ops.items():
            before = max((depth[self.maker[v].name] for v in op.ins if v in self.maker), default=0)
            depth[name] = before + (not self.fusible[name] and not op.rule.view)
        return depth

    def _is_written(self, op: Op, value: str) -> bool:
        if not self.fusible[op.name] or self.leaves(value):
            return True
        return any(not self.fusible[r.name] or self.depth[r.name] != self.depth[op.name] for r in self.readers(value))

    def _kernels(self) -> dict[str, str]:
        """Op -> an op that stands for its kernel."""
        parent: dict[str, str] = {name: name for name in self.analysis.ops}

        def find(name: str) -> str:
            while parent[name] != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        for name, op in self.analysis.ops.items():
            for value in op.ins:
                maker = self.source(value)
                if self.fusible[name] and maker is not None and not self.written[self.made(value)]:
                    parent[find(name)] = find(maker.name)
        return {name: find(name) for name in parent}

    def traffic(self) -> dict[str, Traffic]:
        found: dict[str, Traffic] = {}
        read: set[tuple[str, str]] = set()
        members: dict[str, int] = defaultdict(int)
        for name in self.analysis.ops:
            members[self.kernel[name]] += 1
        begun: set[str] = set()
        for name, op in self.analysis.ops.items():
            kernel = self.kernel[name]
            if op.rule.view:
                zeros = (0.0,) * len(op.ins), (0.0,) * len(op.outs)
                found[name] = Traffic(zeros, zeros, False)
                continue
            ins, back_ins = [], []
            passes = op_name(op) in SUMS and members[kernel] == 1
            for position, value in enumerate(op.ins):
                maker = self.source(value)
                outside = maker is None or self.written[self.made(value)]
                new = outside and (kernel, self.roots[value]) not in read
                read.add((kernel, self.roots[value]))
                ins.append(float(new))
                moved = 0.0
                if new and any(op.out_grads):
                    needed, grad = keeps(op, position), op.in_grads[position]
                    moved = float(needed) + (float(grad) if not passes else self._spread(op, position))
                back_ins.append(moved)
            outs = [float(self.written[v]) for v in op.outs]
            back_outs = []
            for value, grad in zip(op.outs, op.out_grads, strict=True):
                each = float(self.written[value] and grad) * (0.0 if passes else 1.0)
                each += float(self.written[value] and grad and op.rule.saves_output)
                back_outs.append(each + ADDED * self._sums(value) if grad else 0.0)
            found[name] = Traffic((tuple(ins), tuple(outs)), (tuple(back_ins), tuple(back_outs)), kernel not in begun)
            begun.add(kernel)
        return found

    def _spread(self, op: Op, position: int) -> float:
        """A sum's gradient for an operand that it broadcasts is read to be added up; others get it as it is."""
        parts = self.analysis.parts
        out = max(math.prod(parts[v].shape) for v in op.outs)
        size = max(1, math.prod(parts[op.ins[position]].shape))
        return out / size if size < out else 0.0

    def _sums(self, value: str) -> int:
        """Gradients that a value gets beyond one; those of products count once, as they add to what is there."""
        if not self.written[value]:
            return 0
        takers = {
            "" if r.rule.flop else self.kernel[r.name]
            for r in self.readers(value)
            if any(g and self.made(v) == value for v, g in zip(r.ins, r.in_grads, strict=True))
        }
        return max(0, len(takers) - 1)
