"""What a call makes: its fake result, remembered by the shapes, strides and dtypes of what goes in.

A model's blocks are alike and so are its ranks, so most calls have been asked before; a remembered answer costs a
twentieth of asking torch again. Nodes of one fake mode whose results look the same share one fake tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

_KNOWN: dict[Any, Any] = {}
_MOST = 100_000


def fake_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """The fake value of `target(*args, **kwargs)`; nodes among the arguments stand for their `meta["val"]`."""
    try:
        key = (target, _described(args), _described(kwargs))
        known = _KNOWN.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _asked(target, args, kwargs, mode)
    here = mode.__dict__.setdefault("_autopar_results", {})  # the tensors live as long as their mode
    if key not in here:
        if known is not None:
            with mode:
                flat = [torch.empty_strided(size, stride, dtype=d, device=at) for size, stride, d, at in known[0]]
            here[key] = pytree.tree_unflatten(flat, known[1])
            return here[key]
        value = _asked(target, args, kwargs, mode)
        flat, spec = pytree.tree_flatten(value)
        if len(_KNOWN) >= _MOST or not all(isinstance(t, torch.Tensor) for t in flat):
            return value
        _KNOWN[key], here[key] = ([_description(t) for t in flat], spec), value
    return here[key]


def _asked(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _described(value: Any) -> Any:
    """A hashable stand-in; equal Python numbers of different types (1, 1.0, True) stay apart."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        return _description(value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_described, value))
    if isinstance(value, dict):
        return (dict, *((k, _described(v)) for k, v in value.items()))
    return (type(value), value)
