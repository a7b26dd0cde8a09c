"""Keep a user's `autograd.Function` whole while a model is traced, with its own backward.

Enters: nothing. Leaves: a context in which `apply` records one op, `autopar::function`. Left to itself, export would
trace through the forward and differentiate that, silently dropping the user's backward.
Refused, as `UserFunctionError`: a Function that writes to an argument, reads a tensor of the model that is no argument
of it (its gradient and its shards would be unknown), or draws random numbers (each rank would draw its own).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import CaptureError
from autopar.user_function import call_of, enrol

_APPLY: Any = Function.__dict__["apply"].__func__
_ORIGINAL = types.FunctionType(_APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, None, _APPLY.__closure__)

_inside = False
"""Within a recorded Function: what it calls itself is a part of it."""


def inside_function() -> bool:
    """Whether a recorded Function's own forward is running."""
    return _inside


class UserFunctionError(CaptureError):
    """A Function that cannot be kept whole; `explain` turns it into a message with module and line."""


def intercepted(cls: Any, args: Any, kwargs: Any) -> Any:
    """What `apply` does meanwhile."""
    global _inside
    if cls is CheckpointFunction:
        return _checkpointed(*args)
    if _inside or cls.__module__.partition(".")[0] == "torch" or not _tensors((args, kwargs)):
        return _ORIGINAL(cls, *args, **kwargs)
    tensors, number = enrol(cls, args, kwargs)
    _inside = True
    try:
        with _Watch(cls.__qualname__, tensors):
            results = torch.ops.autopar.function(tensors, number)
    finally:
        _inside = False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        # What the Function marked as not differentiable: the graph must know, and only a detach says it.
        results = [r if r.requires_grad or not r.dtype.is_floating_point else r.detach() for r in results]
    return call_of(number).result(results)


def _checkpointed(run: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """torch's reentrant checkpoint runs its forward without gradients; ours is traced, and recomputed as planned."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args))):
        return run(*args)


class _Watch(TorchDispatchMode):
    """Refuses what a Function may not do, at the line where its forward does it."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.inputs = {t.untyped_storage()._cdata for t in tensors}
        self.known: dict[int, Tensor] = {id(t): t for t in tensors}
        """Arguments and what was made from them; held, since an id names a tensor only while it lives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UserFunctionError(f"{self.name} draws ({func})")
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                if any(t.untyped_storage()._cdata in self.inputs for t in _tensors(written)):
                    raise UserFunctionError(f"{self.name} writes ({func})")
        for t in _tensors((args, kwargs)):
            if id(t) not in self.known and (isinstance(t, FakeTensor) or t.requires_grad):
                raise UserFunctionError(f"{self.name} reads ({func})")
        out = func(*args, **kwargs)
        self.known |= {id(t): t for t in _tensors(out)}
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Carrier:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        __class__  # noqa: B018 - torch's code has this one free variable, and code is only replaced by its like
        from autopar.capture.functions import intercepted  # it runs with torch's globals

        return intercepted(cls, args, kwargs)


@contextlib.contextmanager
def keep_functions() -> Iterator[None]:
    """Inside, a user's Function is recorded as one op, also through an `apply` taken before (`fn = MyFunction.apply`).

    Replacing the code, not the attribute, reaches bound methods that exist already.
    """
    _APPLY.__code__ = _Carrier.apply.__code__
    try:
        yield
    finally:
        _APPLY.__code__ = _ORIGINAL.__code__
