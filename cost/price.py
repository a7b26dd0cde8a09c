"""Seconds and bytes of one op under each of its strategies, and of a parameter under each way to store it.

forward   launch + max(flop / rate, bytes moved / bandwidth), of the largest shard
backward  the same with 2 x flop for contractions (a product for each input that takes a gradient), 2.5 x for
          attention, and as many bytes again as forward plus one gradient for each input
update    optimizer traffic of the local parameter: weights, gradient and states read, weights and states written
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.collective import collective_s
from autopar.cost.compute import element_bytes, memory_bound_s, op_s
from autopar.cost.hardware import Profile
from autopar.cost.memory import parameter_bytes
from autopar.cost.offload import offload_price
from autopar.layout import Layout, Parts, chunk, largest_local_parts
from autopar.mesh import LogicalMesh
from autopar.rules.refine import Factor
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy

Floats = NDArray[np.float64]


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


def price_op(
    rule: Rule,
    factors: Sequence[Factor],
    strategies: Sequence[Strategy],
    ins: Sequence[tuple[Parts, torch.dtype]],
    outs: Sequence[tuple[Parts, torch.dtype]],
    in_grads: Sequence[bool],
    mesh: LogicalMesh,
    profile: Profile,
    attention: bool = False,
) -> OpPrice:
    """Price all strategies of an op at once; ins and outs give the parts and dtype of each operand."""
    by_name = {f.name: f for f in factors}
    n = len(strategies)
    flop, moved, comm, comm_forward, narrow = (np.zeros(n) for _ in range(5))
    differentiable = any(in_grads)
    for i, strategy in enumerate(strategies):
        flop[i] = rule.flop * share(strategy, by_name, mesh)
        sizes = [_local_bytes(p, d, layout, mesh) for (p, d), layout in zip(ins, strategy.ins, strict=True)]
        out_sizes = [_local_bytes(p, d, layout, mesh) for (p, d), layout in zip(outs, strategy.outs, strict=True)]
        moved[i] = 0.0 if rule.view else sum(sizes) + sum(out_sizes)
        for total_s, backward in ((comm_forward, False), (comm, differentiable)):
            total_s[i] = _distributed_s(
                rule, strategy, by_name, outs[0][1] if outs else torch.float32, backward, mesh, profile
            )
        narrow[i] = _narrowest(rule, strategy, by_name, mesh)
    dtype = outs[0][1] if outs else torch.float32
    # a view launches nothing, so it costs nothing
    forward = (
        np.zeros(n)
        if rule.view
        else np.asarray(op_s(flop, moved, dtype, profile, min_dim=narrow if rule.flop else None))
    )
    total = forward
    if differentiable and not rule.view:
        times = (2.5 if attention else float(min(2, sum(in_grads)))) if rule.flop else 0.0
        total = forward + np.asarray(
            op_s(times * flop, 2 * moved, dtype, profile, min_dim=narrow if rule.flop else None)
        )
    return OpPrice(total, comm, flop, moved, forward + comm_forward)


def share(strategy: Strategy, factors: Mapping[str, Factor], mesh: LogicalMesh) -> float:
    """The part of an op's work that falls on the rank with the largest shard."""
    out = 1.0
    left = {name: f.size for name, f in factors.items()}
    for axis, option in enumerate(strategy.options):
        if left.get(option):
            size = chunk(left[option], mesh.axes[axis].size, 0)[1]
            out *= size / left[option]
            left[option] = size
    return out


def _narrowest(rule: Rule, strategy: Strategy, factors: Mapping[str, Factor], mesh: LogicalMesh) -> float:
    """Smallest local size of a factor of a contraction; products with a thin side run slowly."""
    sizes: dict[str, float] = {}
    for letter in rule.letters:
        sizes[letter] = float(rule.sizes[letter])
    for axis, option in enumerate(strategy.options):
        if option in factors:
            sizes[factors[option].letter] = max(1.0, sizes[factors[option].letter] / mesh.axes[axis].size)
    rows = math.prod(v for k, v in sizes.items() if k.startswith("e"))
    rest = [v for k, v in sizes.items() if not k.startswith("e")]
    return min([rows, *rest]) if rest else rows


def _local_bytes(parts: Parts, dtype: torch.dtype, layout: Layout, mesh: LogicalMesh) -> float:
    return largest_local_parts(parts, layout, mesh.sizes).numel * float(element_bytes(dtype))


def _distributed_s(
    rule: Rule,
    strategy: Strategy,
    factors: Mapping[str, Factor],
    dtype: torch.dtype,
    backward: bool,
    mesh: LogicalMesh,
    profile: Profile,
) -> float:
    """Seconds of the collectives inside a distributed strategy."""
    total = 0.0
    for axis, option in enumerate(strategy.options):
        special = rule.distributed.get(factors[option].letter) if option in factors else None
        for collective in special.collectives if special is not None else ():
            size = float(element_bytes(dtype))
            for letter in collective.factors:
                size *= rule.sizes[letter]
                for other, cut in enumerate(strategy.options):
                    if cut in factors and factors[cut].letter == letter:
                        size /= mesh.axes[other].size
            for kind in (collective.forward, collective.backward if backward else "nothing"):
                if kind != "nothing":
                    total += float(collective_s(kind, size, mesh.axes[axis], profile))
    return total


@dataclass(frozen=True, slots=True, eq=False)
class StoragePrice:
    """Arrays over the layouts of one parameter."""

    update_s: Floats
    memory_bytes: Floats
    host_bytes: Floats


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
) -> StoragePrice:
    """Bytes of weights, gradient and optimizer states, and the seconds of the optimizer step, for each layout.

    offload, gathered_once, whole_call: as in `offload_price`.
    """
    elements = np.array([largest_local_parts(parts, layout, mesh.sizes).numel for layout in layouts], dtype=np.float64)
    width, none = element_bytes(dtype), np.zeros(len(layouts))
    if not trainable:
        held = parameter_bytes(0, width, precision)
        if offload != "parameters":
            return StoragePrice(none, elements * width, none)
        sent = 1 if gathered_once or whole_call else 2
        stays = elements * width if whole_call and not gathered_once else none
        fetched_s = elements * sent * (held.compute_copy or width) / profile.host_link_bytes_per_s
        return StoragePrice(fetched_s, stays, elements * width)
    held = parameter_bytes(optimizer, width, precision)
    if offload != "none":
        price = offload_price(held, offload, gathered_once, whole_call, profile)
        update_s = elements * price.update_s + 2 * profile.kernel_launch_s  # a copy there and one back
        return StoragePrice(update_s, elements * price.device_bytes, elements * price.host_bytes)
    traffic = 2 * held.weights + held.gradients + 2 * held.optimizer
    return StoragePrice(np.asarray(memory_bound_s(elements * traffic, profile)), elements * held.total, none)
