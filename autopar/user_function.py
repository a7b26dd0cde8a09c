"""A user's `autograd.Function` as one op of the graph: `autopar::function(Tensor[] tensors, int id) -> Tensor[]`.

Enters: a class and the arguments of one `apply`, while a model is traced. Leaves: a number for the op; tensors are the
op's inputs, everything else is remembered here, in this process. Running the op calls `apply` again, so that the
user's backward stays what it was. Calls that differ in their tensors alone share a number: equal blocks stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import Node
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """Stands in `FunctionCall.leaves` where a tensor goes."""


TENSOR = _TensorPlace()

_PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(slots=True, eq=False)
class FunctionCall:
    """What one number stands for."""

    cls: type[Function]
    spec: pytree.TreeSpec
    """Of `(args, kwargs)`."""
    leaves: tuple[Any, ...]
    """`TENSOR` at each tensor's place, other values as they were."""
    output: tuple[pytree.TreeSpec, tuple[Any, ...]] | None = None
    """Structure of the latest result, `TENSOR` at each tensor's place."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`apply` on these tensors; the tensors of the result, in order."""
        taken = iter(tensors)
        leaves = [next(taken) if leaf is TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results, spec = pytree.tree_flatten(self.cls.apply(*args, **kwargs))
        self.output = spec, tuple(TENSOR if isinstance(r, Tensor) else r for r in results)
        return [r for r in results if isinstance(r, Tensor)]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The latest result's structure around these tensors."""
        assert self.output is not None
        spec, leaves = self.output
        taken = iter(tensors)
        return pytree.tree_unflatten([next(taken) if leaf is TENSOR else leaf for leaf in leaves], spec)


_CALLS: list[FunctionCall] = []


def enrol(cls: type[Function], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The tensors of a call in order, and the number under which `torch.ops.autopar.function` runs it."""
    flat, spec = pytree.tree_flatten((tuple(args), kwargs))
    leaves = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat)
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    for number, known in enumerate(_CALLS):
        if known.cls is cls and known.spec == spec and all(map(_same, known.leaves, leaves)):
            return tensors, number
    _CALLS.append(FunctionCall(cls, spec, leaves))
    return tensors, len(_CALLS) - 1


def _same(a: Any, b: Any) -> bool:
    """Only plain values are compared: what `==` of anything else means is unknown. repr tells 0.0 from -0.0."""
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and repr(a) == repr(b))


def call_of(number: int) -> FunctionCall:
    return _CALLS[number]


def function_class(node: Node) -> type[Function] | None:
    """The class behind a node that calls a user's Function, else None."""
    if node.op != "call_function" or node.target is not torch.ops.autopar.function.default:
        return None
    number = node.args[1]
    assert isinstance(number, int)
    return _CALLS[number].cls


def op_text(node: Node) -> str:
    """How messages and plans name an op: `aten.linear.default`, `mylib.rotate.default`, `autograd.Function Mine`."""
    cls = function_class(node)
    return str(node.target) if cls is None else f"autograd.Function {cls.__qualname__}"


def _with_autograd(tensors: list[Tensor], id: int) -> list[Tensor]:
    """`apply` records the user's backward itself."""
    return _CALLS[id](tensors)


def _below_autograd(tensors: list[Tensor], id: int) -> list[Tensor]:
    """Values only; an op may not hand its inputs out again here."""
    held = {t.untyped_storage()._cdata for t in tensors}
    with torch.no_grad():
        return [r.clone() if r.untyped_storage()._cdata in held else r for r in _CALLS[id](tensors)]


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("function(Tensor[] tensors, int id) -> Tensor[]")
_LIBRARY.impl("function", _with_autograd, "Autograd")
_LIBRARY.impl("function", _below_autograd, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::function", _below_autograd, lib=_LIBRARY)
