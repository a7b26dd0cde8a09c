"""How one rank's tensor changes its layout on one axis: the collectives behind `moves.py`, alone or many in buckets.

All shards are of chunk form (ceil sizes, the last ones shorter), so collectives run on shards padded to the largest one
and trim the result. What enters and leaves is local; nothing here is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the ops below

from autopar.layout import GRADIENT, TRANSITIONS, chunk

_ops = torch.ops._c10d_functional
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("part(Tensor x, bool mine) -> Tensor")


def _part(x: torch.Tensor, mine: bool) -> torch.Tensor:
    return x.clone() if mine else torch.zeros_like(x)


# one op on every rank: passes that see a copy here and zeros there would put the ranks' collectives in unlike buckets
_LIBRARY.impl("part", _part, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::part", lambda x, mine: torch.empty_like(x), lib=_LIBRARY)
PART = torch.ops.autopar.part.default
"""A whole value as this rank's part of a sum: itself on one rank, zeros on the others."""

Uncut = tuple[tuple[int, ...], ...]
"""Parts of each dim as this rank would see them if the axis of the move did not cut."""

BUCKET_BYTES = 25 * 2**20
"""Of what a rank sends at once; DistributedDataParallel's default."""


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks that differ only in their coordinate on one axis; `index` is this rank's coordinate. `group` may be a
    name alone, for programs that are lowered where nobody runs them."""

    group: dist.ProcessGroup | str
    size: int
    index: int

    @property
    def name(self) -> str:
        return self.group if isinstance(self.group, str) else self.group.group_name


Move = tuple[AxisGroup, str, str, Uncut]
"""Group, source, target, uncut, as `transfer` takes them."""


def parse_placement(text: str) -> tuple[str, int]:
    """`"S3"` -> ("S", 3); `"P"` -> ("P", -1)."""
    return text[0], int(text[1:]) if text[0] == "S" else -1


def gradient_of(placement: str) -> str:
    """The placement of a value's gradient."""
    return placement if placement[0] == "S" else GRADIENT[placement]


def maximum(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Elementwise, over the ranks of a group."""
    return _wait(_ops.all_reduce(x.detach().contiguous(), "max", group.name))


def transfer(x: torch.Tensor, group: AxisGroup, source: str, target: str, uncut: Uncut) -> torch.Tensor:
    """The forward of a move: a fresh tensor."""
    part, to_part = parse_placement(source)[1], parse_placement(target)[1]
    primitive = _primitive(source, target)
    sizes = tuple(n for dim in uncut for n in dim)
    n, index = group.size, group.index
    if primitive == "nothing":
        return x.clone()
    if primitive == "keep":
        kept: torch.Tensor = PART(x, index == 0)
        return kept
    if primitive == "all_reduce":
        return _wait(_ops.all_reduce(_sendable(x.contiguous()), "sum", group.name)).to(x.dtype)
    if primitive == "slice":
        return _dims(x.reshape(sizes).narrow(to_part, *chunk(sizes[to_part], n, index)).clone(), uncut)
    if primitive == "all_gather":
        rows = _gather_rows(x, group, part, uncut)
        full = _wait(_ops.all_gather_into_tensor(_sendable(rows), n, group.name)).to(x.dtype)
        return _whole(full, part, uncut)
    if primitive == "reduce_scatter":
        rows = _scatter_rows(x, group, to_part, uncut)
        mine = _wait(_ops.reduce_scatter_tensor(_sendable(rows), "sum", n, group.name)).to(x.dtype)
        return _shard(mine, group, to_part, uncut)
    local = x.reshape([chunk(s, n, index)[1] if j == part else s for j, s in enumerate(sizes)])
    if primitive == "pad":
        out = x.new_zeros(sizes)
        out.narrow(part, *chunk(sizes[part], n, index)).copy_(local)
        return _dims(out, uncut)
    # all_to_all: my rows of `part`, all of `to_part`  ->  all rows of `part`, mine of `to_part`
    step, to_step = _step(sizes[part], n), _step(sizes[to_part], n)
    block = _pad(_pad(local, part, step), to_part, n * to_step)
    block = block.unflatten(to_part, (n, to_step)).movedim(to_part, 0).contiguous()
    flat = _wait(_ops.all_to_all_single(_sendable(block).reshape(n, -1), [1] * n, [1] * n, group.name)).to(x.dtype)
    out = flat.reshape(block.shape).movedim(0, part).flatten(part, part + 1)
    return _dims(out.narrow(part, 0, sizes[part]).narrow(to_part, 0, chunk(sizes[to_part], n, index)[1]), uncut)


def transfer_together(values: Sequence[torch.Tensor], moves: Sequence[Move]) -> list[torch.Tensor]:
    """`transfer` of each value by its own move; gathers, and reduce-scatters, of one group and dtype share collectives
    of `BUCKET_BYTES`, all of them started before the first is waited for.
    """
    out: dict[int, torch.Tensor] = {}
    sent = []
    for bucket in _buckets(values, moves):
        _, source, target, _ = moves[bucket[0]]
        if len(bucket) > 1 and _primitive(source, target) in ("all_gather", "reduce_scatter"):
            sent.append((bucket, *_start([values[i] for i in bucket], [moves[i] for i in bucket])))
        else:
            out |= {i: transfer(values[i], *moves[i]) for i in bucket}
    for bucket, rows, pending in sent:
        out |= zip(bucket, _finish(rows, [moves[i] for i in bucket], pending), strict=True)
    return [out[i] for i in range(len(values))]


def _start(values: Sequence[torch.Tensor], moves: Sequence[Move]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Begin one gather, or reduce-scatter, of all the values: their rows, and what is on its way."""
    group, source, _, _ = moves[0]
    n = group.size
    pairs = list(zip(values, moves, strict=True))
    if source[0] == "S":
        rows = [_gather_rows(x, group, parse_placement(at)[1], uncut) for x, (_, at, _, uncut) in pairs]
        flat = _sendable(torch.cat([r.reshape(-1) for r in rows]))
        return rows, _ops.all_gather_into_tensor(flat, n, group.name)
    rows = [_scatter_rows(x, group, parse_placement(to)[1], uncut) for x, (_, _, to, uncut) in pairs]
    flat = torch.cat([r.reshape(n, -1) for r in rows], 1).reshape(-1)
    return rows, _ops.reduce_scatter_tensor(_sendable(flat), "sum", n, group.name)


def _finish(rows: Sequence[torch.Tensor], moves: Sequence[Move], pending: torch.Tensor) -> Iterator[torch.Tensor]:
    """Take each value out of what came."""
    (group, source, _, _), at = moves[0], 0
    gathers = source[0] == "S"
    received = _wait(pending).to(rows[0].dtype).reshape(group.size if gathers else 1, -1)
    for row, (_, source, target, uncut) in zip(rows, moves, strict=True):
        size = row.numel() if gathers else row.numel() // group.size
        lead = row.shape[0] * group.size if gathers else row.shape[0] // group.size
        piece = received[:, at : at + size].reshape(lead, *row.shape[1:])
        if gathers:
            yield _whole(piece, parse_placement(source)[1], uncut)
        else:
            # a view of the bucket would keep all of it
            yield _shard(piece, group, parse_placement(target)[1], uncut).clone()
        at += size


def _buckets(values: Sequence[torch.Tensor], moves: Sequence[Move]) -> Iterator[list[int]]:
    """Positions of what is sent at once, in the order of the last of each; all ranks find the same."""
    open_: dict[tuple[str, str, torch.dtype], tuple[list[int], list[int]]] = {}
    for i, (value, (group, source, target, _)) in enumerate(zip(values, moves, strict=True)):
        key = (_primitive(source, target), group.name, value.dtype)
        bucket, size = open_.setdefault(key, ([], [0]))
        bucket.append(i)
        # of the whole, which is as large on every rank: shards need not be
        size[0] += math.prod(n for dim in moves[i][3] for n in dim) * value.element_size() // group.size
        if size[0] >= BUCKET_BYTES:
            yield open_.pop(key)[0]
    yield from (bucket for bucket, _ in open_.values())


def _primitive(source: str, target: str) -> str:
    kind, to_kind = source[0], target[0]
    return "nothing" if kind == to_kind != "S" else TRANSITIONS[kind, to_kind].forward


def _gather_rows(x: torch.Tensor, group: AxisGroup, part: int, uncut: Uncut) -> torch.Tensor:
    """This rank's rows of a part, as many as any rank has."""
    sizes = [n for dim in uncut for n in dim]
    local = x.reshape([chunk(s, group.size, group.index)[1] if j == part else s for j, s in enumerate(sizes)])
    return _pad(local.movedim(part, 0), 0, _step(sizes[part], group.size)).contiguous()


def _whole(rows: torch.Tensor, part: int, uncut: Uncut) -> torch.Tensor:
    """All ranks' rows in their place."""
    sizes = [n for dim in uncut for n in dim]
    return _dims(rows[: sizes[part]].movedim(0, part), uncut)


def _scatter_rows(x: torch.Tensor, group: AxisGroup, part: int, uncut: Uncut) -> torch.Tensor:
    """The rows of a part, rank by rank."""
    sizes = [n for dim in uncut for n in dim]
    return _pad(x.reshape(sizes).movedim(part, 0), 0, group.size * _step(sizes[part], group.size)).contiguous()


def _shard(rows: torch.Tensor, group: AxisGroup, part: int, uncut: Uncut) -> torch.Tensor:
    """This rank's rows in their place."""
    size = [n for dim in uncut for n in dim][part]
    return _dims(rows[: chunk(size, group.size, group.index)[1]].movedim(0, part), uncut)


def _step(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def _sendable(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def _wait(x: torch.Tensor) -> torch.Tensor:
    return _ops.wait_tensor(x)


def _dims(x: torch.Tensor, uncut: Uncut) -> torch.Tensor:
    """Join the parts of each dim again."""
    shape, at = [], 0
    for dim in uncut:
        shape.append(math.prod(x.shape[at : at + len(dim)]))
        at += len(dim)
    return x.reshape(shape).contiguous()
