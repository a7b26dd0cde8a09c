"""What torch.autocast does to one op, found by asking torch: which of its arguments are cast, and to what.

Enters: an op call of a region under an enabled autocast, with the fake values of its arguments. Leaves: the dtype that
each tensor argument is cast to. The program then has these casts as nodes, so that no rank needs the region.
Refused: an op that casts something inside itself which is no argument of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_PRODUCTS = frozenset("einsum tensordot inner linalg_multi_dot chain_matmul bilinear".split())
"""Ops made of matrix products and views: autocast casts the products' operands, which is casting the arguments."""

_CASTS = frozenset("to _to_copy type_as".split())


@dataclass(frozen=True, slots=True)
class Region:
    """An enabled `torch.autocast`: the kind of device it is for and what it casts to."""

    device: str
    dtype: torch.dtype

    @staticmethod
    def of(device: Any, dtype: Any, enabled: Any, *rest: Any) -> Region | None:
        """From the arguments of torch's `_enter_autocast`; None for one that is off."""
        return Region(device, dtype or torch.get_autocast_dtype(device)) if enabled else None


class CannotTell(Exception):
    """The op casts something that is not an argument."""


class _Watch(TorchDispatchMode):
    """Notes every op that runs, and of those that cast one of the given tensors, which and to what."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.places = {id(t): i for i, t in enumerate(tensors)}
        self.ran: list[tuple[Any, int, Any]] = []
        """(op, place of the tensor that it casts or -1, dtype that it casts to)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default:
            self.ran.append((func, self.places.get(id(args[0]), -1), kwargs.get("dtype")))
        elif func.namespace == "aten":  # torch asks for devices by ops, too
            self.ran.append((func, -1, None))
        return func(*args, **kwargs)

    def casts(self, to: Container[torch.dtype]) -> dict[int, torch.dtype]:
        """The first cast of each given tensor, if it is to one of these dtypes."""
        first: dict[int, torch.dtype] = {}
        for _, place, dtype in self.ran:
            if place >= 0 and dtype is not None:
                first.setdefault(place, dtype)
        return {place: dtype for place, dtype in first.items() if dtype in to}


def casts_of(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], region: Region, mode: Any
) -> dict[int, torch.dtype]:
    """{which of the call's tensors, in order: dtype that the region casts it to}; args and kwargs hold fake tensors.

    Raises:  CannotTell: no casts of the arguments make the op run as it does under the region.
    """
    name = target._schema.name.removeprefix("aten::")
    if name in _CASTS:
        return {}
    with mode, torch.no_grad():
        asked = _fresh((args, kwargs))
        with torch.autocast(region.device, dtype=region.dtype, cache_enabled=False), _Watch(_tensors(asked)) as under:
            dtypes = _dtypes(target(*asked[0], **asked[1]))
        # What runs under the region, less its casts, is what runs on cast arguments; an op may cast something itself.
        none: dict[int, torch.dtype] = {}
        for found in (none, under.casts({region.dtype}), under.casts({region.dtype, torch.float32})):
            cast = _fresh((args, kwargs), found)
            with contextlib.suppress(RuntimeError), _Watch(_tensors(cast)) as alone:
                if _dtypes(target(*cast[0], **cast[1])) == dtypes:
                    ran = Counter(func for func, *_ in under.ran)
                    ran[aten._to_copy.default] -= len(found)
                    if +ran == Counter(func for func, *_ in alone.ran):
                        return found
        every = {i: region.dtype for i, t in enumerate(_tensors(asked)) if t.is_floating_point()}
        if name in _PRODUCTS and _dtypes(target(*_fresh((args, kwargs), every)[0], **kwargs)) == dtypes:
            return every
    raise CannotTell


def _fresh(tree: Any, dtypes: Mapping[int, torch.dtype] | None = None) -> Any:
    """The same tree with new tensors, since an op may write to its arguments; some in another dtype."""
    leaves, spec = pytree.tree_flatten(tree)
    place = -1
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            place += 1
            dtype = (dtypes or {}).get(place, leaf.dtype)
            leaves[k] = torch.empty_strided(leaf.size(), leaf.stride(), dtype=dtype, device=leaf.device)
    return pytree.tree_unflatten(leaves, spec)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _dtypes(result: Any) -> list[torch.dtype]:
    return [t.dtype for t in _tensors(result)]
