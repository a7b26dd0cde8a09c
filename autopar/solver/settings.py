"""What the user asked for, beside the model and the mesh, in the planner's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar.cost.fitted import Software
from autopar.pins import Pins


@dataclass(frozen=True, eq=False)
class Fixed:
    """Decisions by stable names: options of ops, placements (as text) of parameters and of common reads."""

    ops: Mapping[str, tuple[str, ...]]
    params: Mapping[str, tuple[str, ...]]
    reads: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Pipeline ranks, micro-batches of a call, the ZeRO level of all parameters; None: each parameter's is chosen."""

    stages: int
    microbatches: int
    zero: int | None = None


@dataclass(frozen=True, eq=False)
class Settings:
    """What the user asked for, beside the model and the mesh."""

    pins: Pins
    memory_bytes: float
    optimizer: str | int = "adamw"
    precision: str | None = None
    batch_dims: Mapping[str, int] | None = None
    recompute: str = "none"
    """What the repeated blocks recompute in the backward: "none", "selective" (everything but products), "full"."""
    loss_chunks: int = 1
    """Parts of the rows in which the head's product and its loss are made."""
    chunked: bool = True
    """Whether the backend can make them in parts."""
    fixed: Fixed | None = None
    """Decisions of a plan that is given; what it does not name is chosen around it."""
    software: Software | None = None
    """What runs the plan; None: what runs on such devices."""
    held: float = 1.0
    """Share of a batch whose activations a device holds at once."""
    largest: float = 1.0
    """Share of a batch that the largest micro-batch is."""

    @property
    def pieces(self) -> int:
        """Micro-batches of a call."""
        return int(self.pins.given.get("microbatches", 1))

    @property
    def pipeline_ranks(self) -> int:
        return int(self.pins.given.get("pp", 1))

    def shaped(self, shape: Shape) -> Settings:
        """As if the shape were pinned."""
        given = {**self.pins.given, "pp": shape.stages, "microbatches": shape.microbatches}
        degrees = {**self.pins.degrees, "pp": shape.stages}
        if shape.zero is not None:
            given["zero"] = shape.zero
        return replace(self, pins=replace(self.pins, degrees=degrees, zero=given.get("zero"), given=given))

    def inside_stage(self) -> Settings:
        """For the devices of one stage of a pipeline: the model as a whole may take the memory of all stages; which of
        them has how much is balanced later.
        """
        degrees = {role: n for role, n in self.pins.degrees.items() if role != "pp"}
        stages = self.pins.degrees.get("pp", 1)
        return replace(self, pins=replace(self.pins, degrees=degrees), memory_bytes=self.memory_bytes * stages)


def compute_dtype(dtype: torch.dtype, precision: str | None) -> torch.dtype:
    """The dtype a tensor has while computing under a precision."""
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    return lower if lower is not None and dtype == torch.float32 else dtype
