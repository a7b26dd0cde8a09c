"""Notice a user's `autograd.Function` while a model is traced.

Enters: nothing. Leaves: a context in which calling one raises. Refused: every Function outside torch itself. Export
would trace through its forward and differentiate that, silently dropping the user's own backward.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from torch.autograd import Function

from autopar.errors import CaptureError

_APPLY: Any = Function.__dict__["apply"].__func__
_ORIGINAL = types.FunctionType(_APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, None, _APPLY.__closure__)


class UserFunctionError(CaptureError):
    """A call of a user's `autograd.Function`; `explain` turns it into a message with module and line."""


def intercepted(cls: type, args: Any, kwargs: Any) -> Any:
    """What `apply` does meanwhile."""
    if cls.__module__.partition(".")[0] == "torch":
        return _ORIGINAL(cls, *args, **kwargs)
    raise UserFunctionError(cls.__qualname__)


class _Carrier:
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        __class__  # noqa: B018 - torch's code has this one free variable, and code is only replaced by its like
        from autopar.capture.functions import intercepted  # it runs with torch's globals

        return intercepted(cls, args, kwargs)


@contextlib.contextmanager
def refuse_functions() -> Iterator[None]:
    """Inside, a user's Function raises, also through an `apply` taken before (`fn = MyFunction.apply`).

    Replacing the code, not the attribute, reaches bound methods that exist already.
    """
    _APPLY.__code__ = _Carrier.apply.__code__
    try:
        yield
    finally:
        _APPLY.__code__ = _ORIGINAL.__code__
