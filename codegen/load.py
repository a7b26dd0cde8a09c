"""From printed kernels to functions: built once a text, kept as source files on disk.

Enters: the text of `triton_text`. Leaves: its functions, compiled by Triton at their first launch on a GPU, or run by
Triton's interpreter on a CPU. The cache holds source only, named by its digest and compared before it is used; nothing
is unpickled. Triton keeps what it compiles in a cache of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

_LOADED: dict[tuple[str, bool], ModuleType] = {}


def cache_folder() -> Path:
    """`$AUTOPAR_CACHE`, or autopar's folder in the user's cache."""
    given = os.environ.get("AUTOPAR_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if given else Path(base) / "autopar"


def source_file(text: str) -> Path:
    """The file that holds this text; written when it is missing or holds another."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    file = cache_folder() / "kernels" / f"kernel_{digest}.py"
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(name, file)  # ranks may write the same file at once
    return file


def load(text: str, *, interpret: bool = False) -> ModuleType:
    """The module of a printed text. interpret: its functions run in Triton's interpreter, not on a device."""
    key = (text, interpret)
    if key not in _LOADED:
        import triton

        file = source_file(text)
        spec = importlib.util.spec_from_file_location(f"autopar_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = triton.knobs.runtime.interpret
        triton.knobs.runtime.interpret = interpret  # read when a function is decorated
        try:
            spec.loader.exec_module(module)
        finally:
            triton.knobs.runtime.interpret = before
        _LOADED[key] = module
    return _LOADED[key]


def mode_of(kernels: str, device: str) -> str | None:
    """How groups run on a device of this type, None: nothing is fused. kernels: "auto", "on" or "off"."""
    if kernels == "off" or (kernels == "auto" and device != "cuda") or not usable():
        return None
    return "kernel" if device == "cuda" else "interpreter"


@cache
def usable() -> bool:
    """Is a Triton here that these kernels can be given to? Warns once when not."""
    try:
        import triton
        import triton.language as tl

        missing = [name for name in ("rsqrt", "erf", "broadcast_to", "PropagateNan") if not hasattr(tl, name)]
        if not missing and hasattr(triton, "knobs"):
            return True
        said = f"version {triton.__version__} lacks {', '.join(missing) or 'knobs'}"
    except ImportError as error:
        said = f"it cannot be imported ({error})"
    warnings.warn(f"kernels: triton is of no use, {said}; every op runs by itself", stacklevel=2)
    return False


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


def launch(function: Any, grid: tuple[int, int], args: tuple[Any, ...], warps: int, *, interpret: bool = False) -> None:
    """Run one function of a loaded module."""
    if interpret:
        # lanes beyond a mask compute what nobody stores
        with interpreting(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of rows of NaN
            function[grid](*args)
    else:
        function[grid](*args, num_warps=warps, enable_fp_fusion=True)
