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
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from autopar.codegen.interpreter import interpreting

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


def launch(function: Any, grid: tuple[int, int], args: tuple[Any, ...], warps: int, *, interpret: bool = False) -> None:
    """Run one function of a loaded module."""
    if interpret:
        # lanes beyond a mask compute what nobody stores
        with interpreting(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of rows of NaN
            function[grid](*args)
    else:
        function[grid](*args, num_warps=warps, enable_fp_fusion=True)
