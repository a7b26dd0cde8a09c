"""Triton's interpreter beside a Triton that was imported for a device, with numbers as devices round them.

Enters: nothing. Leaves: a context in which functions loaded for the interpreter can be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def interpreting() -> Iterator[None]:
    """Inside, functions loaded for the interpreter can be launched.

    Triton decides at its own import whether its library (`tl.sum`, `tl.max`, ...) is interpreted. Here it was imported
    for a device, so these few are replaced while a kernel runs. So is its cast between float32 and bfloat16, which
    cuts off where devices round to the nearest even number, its spreading of one truth value, which makes a float32 of
    it, and its assertion, which asserts nothing.
    """
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    combine = {
        "sum": tl.standard._sum_combine,
        "max": tl.standard._elementwise_max,
        "min": tl.standard._elementwise_min,
    }
    before = {name: getattr(tl, name) for name in (*combine, "device_assert")}
    interpreted = triton.knobs.runtime.interpret
    cast, splat = InterpreterBuilder.cast_impl, InterpreterBuilder.create_splat

    def reducer(function: Any) -> Any:
        return lambda value, axis=None, keep_dims=False: tl.reduce(value, axis, function, keep_dims=keep_dims)

    try:
        triton.knobs.runtime.interpret = True
        for name, function in combine.items():
            setattr(tl, name, reducer(function))
        tl.device_assert = _assert
        InterpreterBuilder.cast_impl = _cast_rounded(cast)
        InterpreterBuilder.create_splat = _splat_truth(splat)
        yield
    finally:
        triton.knobs.runtime.interpret = interpreted
        InterpreterBuilder.cast_impl, InterpreterBuilder.create_splat = cast, splat
        for name, function in before.items():
            setattr(tl, name, function)


def _assert(condition: Any, message: str, mask: Any = None) -> None:
    held, wanted = (getattr(getattr(x, "handle", None), "data", x) for x in (condition, mask))
    if not np.all(held if wanted is None else held | np.logical_not(wanted)):
        raise IndexError(message)


def _splat_truth(splat: Callable[..., Any]) -> Callable[..., Any]:
    """What a comparison gives keeps the kind of what was compared."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def spread(builder: Any, shape: Any, value: Any) -> Any:
        return splat(builder, shape, TensorHandle(value.data, tl.int1) if value.data.dtype == np.bool_ else value)

    return spread


def _cast_rounded(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's cast, with numpy's numbers rounded as torch does."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast(builder: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(source.data, dtype=np.float32)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            bits = torch.from_numpy(np.array(source.data, dtype=np.uint16).view(np.int16))
            return TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)
        return otherwise(builder, source, target)

    return cast
