"""A pipeline schedule: what each rank computes, in order.

Enters: rows of actions (one row a rank): from `build`, from a text or hand-made. Leaves: a frozen `Schedule`, text.
Refused, with a `PlanError`: actions of stages or micro-batches that do not exist, or on a rank that does not hold them.
Whether a table is complete and free of deadlock is asked of `check`.

    work  meaning                                   text (stage 2, micro-batch 5)
    F     forward                                   2F5
    B     backward, inputs and weights              2B5
    I     gradient of the inputs                    2I5
    W     gradient of the weights, after its I      2W5

Rows hold computation only: sends and receives follow from it (`transfers`), and no idle slots: how long a rank waits
is a question of seconds. In an asynchronous schedule micro-batch -1 is the last one of the call before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError

WORKS = "FBIW"
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = range(4)
"""Codes of the works in a row's array."""

Ints = NDArray[np.integer[Any]]
_TEXT = re.compile(r"([0-9]+)([FBIW])(-?[0-9]+)")


class Action(NamedTuple):
    """One piece of work. A named tuple, not a dataclass: a large table has hundreds of thousands, made at once."""

    stage: int
    work: str
    """One of F, B, I, W."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text such as `2F5`. Raises: PlanError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is no action: write stage, one of F B I W, micro-batch, as in 2F5")
        return cls(int(match[1]), match[2], int(match[3]))


class Row(Sequence[Action]):
    """The actions of one rank in order; kept as an array, since simulations read it whole.

    Fields:  codes: int32 [actions, 3]: stage, work (its place in `WORKS`), micro-batch; not writable.
    """

    __slots__ = ("codes",)
    codes: Ints

    def __init__(self, actions: Iterable[Action | Sequence[Any]] | Ints) -> None:
        """actions: `Action`s, or an array like `codes`."""
        if not isinstance(actions, np.ndarray):
            actions = np.array([(s, WORKS.index(w), m) for s, w, m in actions], dtype=np.int32).reshape(-1, 3)
        codes = np.ascontiguousarray(actions, dtype=np.int32)
        codes.flags.writeable = False
        self.codes = codes

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Row: ...
    def __getitem__(self, index: int | slice) -> Action | Row:
        if isinstance(index, slice):
            return Row(self.codes[index].copy())
        stage, work, microbatch = self.codes[index].tolist()
        return Action(stage, WORKS[work], microbatch)

    def __iter__(self) -> Iterator[Action]:
        for stage, work, microbatch in self.codes.tolist():
            yield Action(stage, WORKS[work], microbatch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.codes.tobytes())

    def __repr__(self) -> str:
        return " ".join(map(str, self))


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A table: for each rank its actions in order.

    Fields:  name: as in `build`. ranks: pipeline ranks (rows). stages: all stages, over all ranks and replicas.
             microbatches: of one call. placement: the rank of each stage. rows: a `Row` (a sequence of `Action`s)
             for each rank. replicas: copies of the model with stages of their own; 2 for Chimera, where micro-batch
             j runs through replica j % 2, and replica k has stages k * depth to (k + 1) * depth - 1.
             asynchronous: rows are those of a call in the middle of a run, without a flush between calls.
    Compared by identity, so that what is derived from a table can be kept beside it; compare `rows` for equality.
    Raises:  PlanError: sizes below 1, a stage, micro-batch or rank out of range, an action on the wrong rank.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[Row, ...]
    replicas: int = 1
    asynchronous: bool = False

    def __post_init__(self) -> None:
        rows = tuple(row if isinstance(row, Row) else Row(row) for row in self.rows)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "placement", tuple(self.placement))
        for what in ("ranks", "stages", "microbatches", "replicas"):
            if getattr(self, what) < 1:
                raise PlanError(f"schedule {self.name}: {getattr(self, what)} {what}; at least 1 is needed")
        if len(rows) != self.ranks:
            raise PlanError(f"schedule {self.name}: {len(rows)} rows for {self.ranks} ranks")
        if len(self.placement) != self.stages or not all(0 <= r < self.ranks for r in self.placement):
            raise PlanError(
                f"schedule {self.name}: placement {self.placement} does not give each of {self.stages} stages one of "
                f"{self.ranks} ranks"
            )
        if self.stages % self.replicas:
            raise PlanError(f"schedule {self.name}: {self.stages} stages cannot be {self.replicas} equal replicas")
        for rank, row in enumerate(rows):
            self._check_row(rank, row)

    def _check_row(self, rank: int, row: Row) -> None:
        stage, work, microbatch = row.codes.T
        known = (stage >= 0) & (stage < self.stages)
        here = known & (np.array(self.placement)[np.where(known, stage, 0)] == rank)
        first = -self.stages * self.microbatches if self.asynchronous else 0  # how late a backward can be at most
        right = here & (work >= 0) & (work < len(WORKS)) & (microbatch >= first) & (microbatch < self.microbatches)
        if not right.all():
            i = int(np.flatnonzero(~right)[0])
            raise PlanError(
                f"schedule {self.name}: action {row[i]} at place {i} of rank {rank}: the table has {self.stages} "
                f"stages, {self.microbatches} micro-batches, and rank {rank} holds stages {self.held(rank)}"
            )

    @property
    def depth(self) -> int:
        """Stages that one micro-batch runs through."""
        return self.stages // self.replicas

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage of one replica: one for each replica."""
        return self.placement[stage :: self.depth]

    def path(self, microbatch: int) -> range:
        """The stages that a micro-batch runs through, in the order of its forward."""
        replica = microbatch % self.replicas
        return range(replica * self.depth, (replica + 1) * self.depth)

    @property
    def splits(self) -> bool:
        """Does it part input gradients from weight gradients?"""
        return any((row.codes[:, 1] == INPUT_GRAD).any() for row in self.rows)

    def forward_only(self) -> Schedule:
        """The same without backwards: evaluation. An order that was free of deadlock stays so."""
        return replace(
            self,
            rows=tuple(Row(row.codes[row.codes[:, 1] == FORWARD]) for row in self.rows),
            asynchronous=False,
        )

    def forwards_first(self) -> Schedule:
        """All forwards, then all backwards, each in this table's order: for a loss computed after the call.

        Every rank then holds all micro-batches at once.
        """
        back = (row.codes[row.codes[:, 1] != FORWARD] for row in self.rows)
        rows = tuple(Row(np.concatenate([f.codes, b])) for f, b in zip(self.forward_only().rows, back, strict=True))
        return replace(self, rows=rows)

    def __str__(self) -> str:
        """One line a rank: `rank 0  0F0 0F1 0B0 0B1`."""
        width = len(str(self.ranks - 1))
        return "\n".join(f"rank {rank:>{width}}  {row!r}" for rank, row in enumerate(self.rows))


def parse(text: str, name: str = "table") -> Schedule:
    """The schedule of a text as `str(schedule)` gives it: a line a rank, actions parted by blanks.

    Sizes and placement are read off the actions; `rank N` at the head of a line is left out of account.
    Raises:  PlanError: a word that is no action, a stage on two ranks or on none, no action at all.
    """
    lines = [re.sub(r"^\s*rank\s+[0-9]+", "", line).split() for line in text.strip().splitlines()]
    rows = [[Action.parse(word) for word in line] for line in lines]
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"schedule {name}: {action} on rank {rank}, but rank {owner[action.stage]} has its stage"
                )
    if sorted(owner) != list(range(len(owner))) or not owner:
        raise PlanError(f"schedule {name}: the actions name stages {sorted(owner)}; stages count from 0 without gaps")
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule(
        name, len(rows), len(owner), microbatches, tuple(owner[s] for s in range(len(owner))), tuple(map(Row, rows))
    )
