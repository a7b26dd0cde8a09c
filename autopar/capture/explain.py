"""Turn what export raises into one line that a user can act on.

Enters: any exception from a traced forward, or a node that autopar cannot take. Leaves: a `CaptureError` with the
module's path, the user's file and line, what is wrong there, and the usual rewrite.
"""

from __future__ import annotations

import contextlib
import gc
import io
import linecache
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

import torch
from torch import nn
from torch.fx import Node

from autopar.errors import CaptureError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_FRAME = re.compile(r'File "(.+?)", line (\d+)')

_DATA = r"data-dependent|DataDependent|_local_scalar_dense"
ADVICE: tuple[tuple[str, str, str], ...] = (
    # (pattern in module class, error class and message, what happens there, what to write instead)
    (
        rf"^\w*BatchNorm\w* .*({_DATA})",
        "BatchNorm with momentum=None reads its batch counter as a Python number",
        "set momentum to a number",
    ),
    (
        r"^RecursiveScriptModule ",
        "a TorchScript module cannot be traced",
        "use the module that it was scripted from",
    ),
    (
        r"^(LSTM|GRU|RNN) .*failed to unpack",
        "the shape of a packed sequence depends on its lengths",
        "run the layer on the padded batch and mask what it returns",
    ),
    (
        _DATA,
        "the value of a tensor decides what runs next (.item(), int(), float(), or `if` on a tensor)",
        "choose with torch.where or multiply by a mask, or compute the number outside the model and pass it in",
    ),
    (
        r"not a known type|register a pytree|Unsupported (input|output)|pytree|only.*tensor.*outputs",
        "an input or output is of a type that torch cannot take apart",
        "use tuples, lists, dicts and tensors, or torch.export.register_dataclass(YourType)",
    ),
    (
        r"\.numpy\(\)|numpy\(\) is not supported",
        "a tensor leaves torch for numpy",
        "stay in torch inside forward",
    ),
    (
        r"fake tensor in the exported program constant",
        "a tensor is used that is not tracked as computed from the inputs",
        "make it from the inputs, or register it as a buffer",
    ),
    (
        r"HigherOrder|torch\.cond|torch\._higher_order",
        "control flow as an operator (torch.cond, while_loop, ...) cannot be split",
        "choose with torch.where",
    ),
    (
        r"UserFunctionError: \S+ writes",
        "an autograd.Function writes to its argument in place",
        "return a new tensor, without mark_dirty",
    ),
    (
        r"UserFunctionError: \S+ reads",
        "an autograd.Function reads a tensor of the model that is none of its arguments",
        "pass the tensor to apply, so that its gradient is known",
    ),
    (
        r"UserFunctionError: \S+ draws",
        "an autograd.Function draws random numbers, and every rank would draw its own",
        "draw them before and pass them to apply",
    ),
    (
        r"DroppedError: hooks",
        "a gradient hook on a value inside forward would be lost",
        "change the gradient in the backward of an autograd.Function",
    ),
    (
        r"DroppedError: differentiates",
        "a gradient is taken inside forward in a way that a graph cannot hold",
        "take it with torch.autograd.grad, of real values, or put it in an autograd.Function",
    ),
    (
        r"DynamicOutputShape",
        "the shape of an operator's result depends on data",
        "keep shapes fixed: use a mask, or put the call in an autograd.Function",
    ),
    (
        r"UnrolledError",
        "a vmap is unrolled into one copy of its function for each slice",
        "write the function for the whole batch",
    ),
    (
        r"missing .*required|unexpected keyword|takes .* positional|too many positional",
        "the example does not fit forward",
        "fix example_args / example_kwargs",
    ),
)


def is_user_file(path: str) -> bool:
    """Not torch's, not the standard library's, not capture's own."""
    return not path.startswith((_TORCH, _OURS, "<")) and not (path.startswith(_STDLIB) and "-packages" not in path)


@lru_cache(maxsize=65536)
def where_of(stack_trace: str | None) -> str:
    """`file.py:line` of the innermost frame outside torch in a node's stack trace, else of the innermost one."""
    frames = _FRAME.findall(stack_trace or "")
    own = [f for f in frames if is_user_file(f[0])] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def explain(error: BaseException, model: nn.Module) -> CaptureError:
    """One `CaptureError` for anything that export of `model` raised."""
    names = {id(m): (path, type(m).__name__) for path, m in model.named_modules()}
    path, kind, where, code, inside = "", type(model).__name__, "", "", False
    for frame, line in _frames(error):
        owner = id(frame.f_locals.get("self"))
        if owner in names:
            (path, kind), inside = names[owner], True
        if inside and is_user_file(frame.f_code.co_filename):
            where = f"{frame.f_code.co_filename}:{line}"
            code = linecache.getline(frame.f_code.co_filename, line).strip()
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    probe = f"{kind} {type(error).__module__}.{type(error).__name__}: {error}".replace("\n", " ")
    what, remedy = next(((w, r) for pattern, w, r in ADVICE if re.search(pattern, probe)), ("", ""))
    head = f"{path or kind} ({', '.join(filter(None, (kind if path else '', where)))})" if path or where else kind
    said = f"{type(error).__name__}: {text:.200}"
    body = f"{what}: {remedy}" if what else said
    shown = f", at `{code:.100}`" if code else ""
    return CaptureError(f"{head}: cannot capture the model{shown}: {body}" + (f" [{said}]" if what else ""))


def refuse(node: Node, what: str, remedy: str) -> CaptureError:
    """A `CaptureError` about a node of the captured graph."""
    path = module_of(node)
    place = ", ".join(filter(None, (str(node.target), where_of(node.meta.get("stack_trace")))))
    return CaptureError(f"{path or 'forward'} ({place}): {what}; {remedy}")


def module_of(node: Node) -> str:
    """Qualified name of the module that made a node; "" is the model itself."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """(frame, line) from the outermost to the innermost; of the original error, when one replaced another."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's own reports while export runs; on success what the model wrote to stderr is passed on.

    Export prints half-made graphs and log lines for an error that we put in one line. The garbage collector is held:
    tracing makes many long-lived objects, and its full passes cost a tenth of the time.
    """
    held, real, log_level, collecting = io.StringIO(), sys.stderr, logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    sys.stderr = held
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        if held.getvalue():
            real.write(held.getvalue())
    finally:
        sys.stderr = real
        logging.disable(log_level)
        if collecting:
            gc.enable()
