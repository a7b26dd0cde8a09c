"""Agreement between ranks, before anything could hang: digests compared with two small collectives.

What enters: this rank's view (plan, shapes, values, versions) as named digests. What leaves: nothing. Refused: any
    difference, with a
`RuntimeMismatchError` on every rank that names what differs and which ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar import errors
from autopar.errors import AutoparError, RuntimeMismatchError

T = TypeVar("T")


def digest(text: str | bytes) -> int:
    """63 bits of a hash, so that it travels in an int64."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1


def value_digest(tensor: torch.Tensor) -> int:
    """Digest of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def agree(views: Mapping[str, int], device: torch.device) -> None:
    """Compare named digests over all ranks. Raises: RuntimeMismatchError on every rank when one differs."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = torch.tensor(list(views.values()), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone).cpu()
    for column, what in enumerate(views):
        different = [r for r in range(len(everyone)) if table[r, column] != table[0, column]]
        if different:
            ranks = ", ".join(map(str, different[:8]))
            raise RuntimeMismatchError(
                f"ranks disagree on {what}: rank(s) {ranks} differ from rank 0; give every rank the same {what}"
            )


def same_everywhere(value: int, device: torch.device, *flags: bool) -> tuple[bool, ...]:
    """Is this digest equal on all ranks; is each flag set on any? One all-reduce; the cheap check of every step."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True, *flags
    told = torch.tensor([value, -value, *flags], dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    high, low, *most = told.tolist()
    return high == -low, *map(bool, most)


def of_all(names: Sequence[str]) -> tuple[str, ...]:
    """The names that any rank gives, in order. A collective call."""
    everyone: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    return tuple(sorted({name for each in everyone for name in each}))


def share(make: Any, device: torch.device) -> Any:
    """Rank 0's `make()` (JSON data) on every rank; its AutoparError is raised on every rank, too."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    message: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            message = {"value": make()}
        except AutoparError as error:
            message = {"error": type(error).__name__, "text": str(error)}
        except Exception as error:  # other ranks must not wait for a rank that failed
            message = {"error": "AutoparError", "text": f"planning failed on rank 0: {type(error).__name__}: {error}"}
            _send(message, device)
            raise
    message = _send(message, device)
    if "error" in message:
        raise getattr(errors, message["error"], AutoparError)(message["text"])
    return message["value"]


def together(step: Callable[[], T], device: torch.device) -> T:
    """This rank's `step()`, that every rank takes on its own; when one rank fails, all raise and none waits for it.

    Raises:  what the step raised here; RuntimeMismatchError where it went well and another rank failed.
    """
    error: Exception | None = None
    try:
        value = step()
    except Exception as raised:
        error = raised
    mine = torch.tensor([error is not None], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    failed = [r for r, each in enumerate(everyone) if each.item()]
    if failed:
        told = {"text": f"{type(error).__name__}: {error}"} if error is not None else {}
        told = _send(told, device, failed[0])
        raise error or RuntimeMismatchError(f"rank {failed[0]} failed: {told['text']}")
    return value


def _send(message: dict[str, Any], device: torch.device, source: int = 0) -> dict[str, Any]:
    """Broadcast JSON from one rank."""
    data = json.dumps(message).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source)
    return dict(json.loads(bytes(buffer.cpu().tolist())))
