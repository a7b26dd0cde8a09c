"""A process group of one rank, so that real collectives are traced and run in the test's own process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from autopar.runtime.moves import use_groups
from autopar.runtime.transfer import AxisGroup


@contextmanager
def one_rank(folder: Path, *axes: str) -> Iterator[None]:
    """The axes' groups, each of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        with use_groups({axis: AxisGroup(dist.group.WORLD, 1, 0) for axis in axes}):
            yield
    finally:
        dist.destroy_process_group()
