"""Seconds and bytes of one op under each of its strategies, and of a parameter under each way to store it.

    products      `compute.matmul_s` of the local sizes, and of the transposed products of the gradients
    attention     `op_time.attention_s`, and the copies around it
    loss, lookup  bytes of `op_time`
    other ops     the bytes that `traffic` counts, those of ops that share a kernel moved once
    update        `op_time.update_s` of the local parameter

The same functions price published runs from sizes (`layer_time`, `training`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.collective import collective_s
from autopar.cost.compute import element_bytes, memory_bound_s
from autopar.cost.fitted import NATIVE, Software
from autopar.cost.hardware import Profile
from autopar.cost.memory import parameter_bytes
from autopar.cost.offload import offload_price
from autopar.cost.op_time import COPIED_HEADS, attention_s, embedding_bytes, loss_bytes, norm_s, product_s, update_s
from autopar.cost.traffic import Traffic, op_name
from autopar.layout import Layout, Parts, chunk, largest_local_parts
from autopar.mesh import LogicalMesh
from autopar.rules.analyse import Op
from autopar.rules.refine import Factor
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy

Floats = NDArray[np.float64]
Operand = tuple[Parts, torch.dtype]


@dataclass(frozen=True, slots=True)
class Pieces:
    """An op that runs once for each micro-batch. rows: its factor that is the batch."""

    count: int
    rows: Factor

    def of(self, at: Sequence[int]) -> list[float]:
        """What a piece is of each operand, by the parts that the batch has in them."""
        return [1 / self.count if part >= 0 else 1.0 for part in at]


@dataclass(frozen=True, slots=True, eq=False)
class OpPrice:
    """Arrays over strategies."""

    compute_s: Floats
    communication_s: Floats
    flop: Floats
    """Of the forward, on the rank with the largest shard."""
    moved_bytes: Floats
    forward_s: Floats
    """The forward's share of compute and communication: what recomputation pays again."""
    backward_s: Floats
    """The backward's share of compute."""
    weight_s: Floats
    """The part of that which makes gradients of weights alone."""


def price_op(
    op: Op,
    strategies: Sequence[Strategy],
    ins: Sequence[Operand],
    outs: Sequence[Operand],
    moves: Traffic,
    mesh: LogicalMesh,
    profile: Profile,
    software: Software = NATIVE,
    attention: bool = False,
    pieces: Pieces | None = None,
) -> OpPrice:
    """Price all strategies of an op at once; ins and outs give the parts and dtype of each operand. pieces: the price
    is that of all of them, each with its own launches and waits, and its small products.
    """
    local = _LocalSizes.of(op, strategies, mesh)
    flop = local.flop
    dtype = outs[0][1] if outs else torch.float32
    sizes = [_local_bytes(operand, [s.ins[i] for s in strategies], mesh) for i, operand in enumerate(ins)]
    out_sizes = [_local_bytes(operand, [s.outs[i] for s in strategies], mesh) for i, operand in enumerate(outs)]
    moved: Floats = sum((*sizes, *out_sizes), np.zeros(len(strategies)))
    count = pieces.count if pieces is not None else 1
    if pieces is not None:
        local = local.piece(pieces)
        sizes = [size * share for size, share in zip(sizes, pieces.of(pieces.rows.ins), strict=True)]
        out_sizes = [size * share for size, share in zip(out_sizes, pieces.of(pieces.rows.outs), strict=True)]
    differentiable = any(op.in_grads)
    parts = _Parts(op, local, ins, outs, sizes, out_sizes, moves, profile, software, dtype)
    if op.rule.view:
        forward = backward = weight = np.zeros(len(strategies))
    elif attention and op.rule.flop:
        forward, backward, weight = parts.attention()
    elif op.rule.flop:
        forward, backward, weight = parts.product()
    else:
        forward, backward, weight = _SPECIAL.get(op_name(op), _Parts.pointwise)(parts)
    letter = pieces.rows.letter if pieces is not None else ""
    whole = {key: size / count if key == letter else size for key, size in op.rule.sizes.items()}
    comm_forward, comm_backward = _distributed_s(op.rule, whole, strategies, op.by_name, dtype, mesh, profile)
    forward, backward, weight = count * forward, count * backward, count * weight
    comm_forward, comm_backward = count * comm_forward, count * comm_backward
    if not differentiable:
        backward, weight, comm_backward = 0 * backward, 0 * weight, 0 * comm_backward
    backward = backward + weight
    return OpPrice(
        compute_s=forward + backward,
        communication_s=comm_forward + comm_backward,
        flop=flop,
        moved_bytes=moved,
        forward_s=forward + comm_forward,
        backward_s=backward,
        weight_s=weight,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _LocalSizes:
    """Sizes of an op's loops on the rank with the largest shard, by letter, and its flop; arrays over strategies."""

    sizes: Mapping[str, Floats]
    flop: Floats

    @staticmethod
    def of(op: Op, strategies: Sequence[Strategy], mesh: LogicalMesh) -> _LocalSizes:
        sizes = {letter: np.full(len(strategies), float(size)) for letter, size in op.rule.sizes.items()}
        flop = np.full(len(strategies), op.rule.flop)
        for i, strategy in enumerate(strategies):
            left: dict[str, int] = {}
            for axis, option in enumerate(strategy.options):
                factor = op.by_name.get(option)
                if factor is not None and factor.size:
                    whole = left.get(option, factor.size)
                    left[option] = chunk(whole, mesh.axes[axis].size, 0)[1]
                    sizes[factor.letter][i] *= left[option] / whole
                    flop[i] *= left[option] / whole
        return _LocalSizes(sizes, flop)

    def piece(self, pieces: Pieces) -> _LocalSizes:
        """Of one piece."""
        letter, count = pieces.rows.letter, pieces.count
        return _LocalSizes({**self.sizes, letter: self.sizes[letter] / count}, self.flop / count)

    def times(self, letters: Sequence[str]) -> Floats:
        """Product of the sizes of some letters."""
        out = np.ones(len(self.flop))
        for letter in letters:
            out = out * self.sizes[letter]
        return out


Seconds = tuple[Floats, Floats, Floats]
"""Of the forward, of the gradients by activations, of the gradients by weights."""


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Seconds of one op; what its operands and loops are on a rank, arrays over strategies."""

    op: Op
    local: _LocalSizes
    ins: Sequence[Operand]
    outs: Sequence[Operand]
    in_bytes: Sequence[Floats]
    out_bytes: Sequence[Floats]
    moves: Traffic
    profile: Profile
    software: Software
    dtype: torch.dtype

    def moved_s(self, size_bytes: Any, launches: int = 1) -> Floats:
        seconds = np.asarray(memory_bound_s(size_bytes, self.profile), dtype=np.float64)
        return seconds - (0 if launches else self.profile.kernel_launch_s) * (np.asarray(size_bytes) > 0)

    def none(self) -> Floats:
        return np.zeros(len(self.local.flop))

    def product(self) -> Seconds:
        """A contraction: rows are what the left operand brings to the result, columns what only the right one does."""
        rule, local = self.op.rule, self.local
        out = {f for dim in rule.outs[0] for f in dim}
        tensors = [{f for dim in dims for f in dim} for dims in rule.ins]
        left, right = (*tensors, set(), set())[:2]
        columns = local.times([f for f in rule.letters if f in out and f in right and f not in left])
        batch = local.times([f for f in rule.letters if f in out and f in right and f in left])
        rows = local.times([f for f in rule.letters if f in out and f not in right])
        depth = local.flop / np.maximum(2 * batch * rows * columns, 1.0)
        forward, by_left, by_right = product_s(local.flop, rows, columns, depth, self.dtype, self.profile)
        grads = (*self.op.in_grads, False, False)
        return forward, by_left * grads[0], by_right * grads[1]

    def attention(self) -> Seconds:
        head = float(self.ins[0][0].shape[-1])
        software = self.software
        forward, backward = attention_s(
            self.local.flop, head, self.dtype, self.profile, software.fitted, software.native_attention
        )
        copies = self.moved_s(COPIED_HEADS * self.out_bytes[0] * software.traffic)
        return forward + copies, backward + copies, self.none()

    def loss(self) -> Seconds:
        width = element_bytes(self.ins[0][1])
        forward, backward = loss_bytes(self.in_bytes[0] / width, width, self.software.fitted)
        return self.moved_s(forward), self.moved_s(backward), self.none()

    def lookup(self) -> Seconds:
        forward, backward = embedding_bytes(self.out_bytes[0], self.in_bytes[0])
        return self.moved_s(forward), self.none(), self.moved_s(backward)

    def pointwise(self) -> Seconds:
        launches = int(self.moves.launches)
        found = []
        for ins, outs in (self.moves.forward, self.moves.backward):
            weights = (*zip(ins, self.in_bytes, strict=True), *zip(outs, self.out_bytes, strict=True))
            size = sum((times * size for times, size in weights), self.none())
            found.append(self.moved_s(size * self.software.traffic, launches))
        return found[0], found[1], self.none()


_SPECIAL = {
    "cross_entropy_loss": _Parts.loss,
    "embedding": _Parts.lookup,
    "index_select": _Parts.lookup,
}


def _local_bytes(operand: Operand, layouts: Sequence[Layout], mesh: LogicalMesh) -> Floats:
    """Bytes of the largest shard under each layout."""
    parts, dtype = operand
    width = float(dtype.itemsize)
    sizes = {x: largest_local_parts(parts, x, mesh.sizes).numel * width for x in set(layouts)}
    return np.array([sizes[x] for x in layouts], dtype=np.float64)


def _distributed_s(
    rule: Rule,
    sizes: Mapping[str, float],
    strategies: Sequence[Strategy],
    factors: Mapping[str, Factor],
    dtype: torch.dtype,
    mesh: LogicalMesh,
    profile: Profile,
) -> tuple[Floats, Floats]:
    """Seconds of the collectives inside distributed strategies, forward and backward. sizes: by letter."""
    forward, backward = np.zeros(len(strategies)), np.zeros(len(strategies))
    if not rule.distributed:
        return forward, backward
    for i, strategy in enumerate(strategies):
        for axis, option in enumerate(strategy.options):
            special = rule.distributed.get(factors[option].letter) if option in factors else None
            for collective in special.collectives if special is not None else ():
                size = float(element_bytes(dtype))
                for letter in collective.factors:
                    size *= sizes[letter]
                    for other, cut in enumerate(strategy.options):
                        if cut in factors and factors[cut].letter == letter:
                            size /= mesh.axes[other].size
                for kind, total_s in ((collective.forward, forward), (collective.backward, backward)):
                    if kind != "nothing":
                        total_s[i] += float(collective_s(kind, size, mesh.axes[axis], profile))
    return forward, backward


@dataclass(frozen=True, slots=True, eq=False)
class StoragePrice:
    """Arrays over the layouts of one parameter."""

    update_s: Floats
    memory_bytes: Floats
    host_bytes: Floats
    norm_s: Floats
    """What the training loop does with the gradients, whatever the plan."""


def price_storage(
    parts: Parts,
    dtype: torch.dtype,
    trainable: bool,
    layouts: Sequence[Layout],
    mesh: LogicalMesh,
    profile: Profile,
    optimizer: str | int,
    precision: str | None,
    offload: str = "none",
    gathered_once: bool = False,
    whole_call: bool = False,
    software: Software = NATIVE,
) -> StoragePrice:
    """Bytes of weights, gradient and optimizer states, and the seconds of the optimizer step, for each layout.

    offload, gathered_once, whole_call: as in `offload_price`.
    """
    elements = np.array([largest_local_parts(parts, layout, mesh.sizes).numel for layout in layouts], dtype=np.float64)
    width, none = element_bytes(dtype), np.zeros(len(layouts))
    if not trainable:
        held = parameter_bytes(0, width, precision)
        if offload != "parameters":
            return StoragePrice(none, elements * width, none, none)
        sent = 1 if gathered_once or whole_call else 2
        stays = elements * width if whole_call and not gathered_once else none
        fetched_s = elements * sent * (held.compute_copy or width) / profile.host_link_bytes_per_s
        return StoragePrice(fetched_s, stays, elements * width, none)
    held = parameter_bytes(optimizer, width, precision)
    clear_s = np.asarray(norm_s(elements, held, profile, software.fitted))
    if offload != "none":
        price = offload_price(held, offload, gathered_once, whole_call, profile)
        update = elements * price.update_s + 2 * profile.kernel_launch_s  # a copy there and one back
        return StoragePrice(update, elements * price.device_bytes, elements * price.host_bytes, clear_s)
    updated_s = np.asarray(update_s(elements, held, profile, software.fitted))
    return StoragePrice(updated_s, elements * held.total, none, clear_s)
