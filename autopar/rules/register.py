"""Rules that users register for their own ops and autograd.Functions; they go before autopar's own.

Enters: an op or a Function class, notation, the factors to keep whole. Leaves: at each call of it a `Rule`.
Refused, as `RuleError`: notation that no op could have (when it is registered), notation that does not fit the call's
tensors (when it is used; the message names the op and the user's line).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function
from torch.fx import Node

from autopar.errors import RuleError
from autopar.program import record
from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule
from autopar.user_function import function_class, op_text


@dataclass(frozen=True, slots=True)
class Registered:
    """One line of `register_rule`."""

    notation: str
    whole: str
    inputs: int
    outputs: int


_RULES: dict[Any, dict[tuple[int, int], Registered]] = {}
"""By Function class, or by op name with or without overload; then by numbers of tensors, so that an op with an optional
tensor can have two."""

_TENSOR = re.compile(r"(?:\s*(?:\.\.\.|1|[A-Za-z_]\w*|\((?:\s*[A-Za-z_]\w*)+\s*\)))*\s*")
_LEADING = re.compile(r"e\d+")
"""Names that the dims of `...` get."""


def register_rule(op_or_function: Any, notation: str, whole: str = "") -> None:
    """Say how an op of your own, or a `torch.autograd.Function`, can be split.

        autopar.register_rule(MyNorm, "b ... d, d -> b ... d", whole="d")

    Each name is a *factor*: a loop of the op whose iterations are independent. Cutting it shards every tensor that has
    it, copies every input that lacks it, and makes outputs that lack it partial sums. The rule speaks for the backward
    too: an input without the factor gets the sum of the shards' gradients.

    Args:
        op_or_function: an op of torch.library (what `custom_op` returns, `torch.ops.ns.name`, or an overload of it), or
            a subclass of `torch.autograd.Function`. A rule for one of torch's own ops goes before autopar's.
        notation: `"inputs -> outputs"`, the tensors of each separated by commas, in the order of the arguments. A dim
            is a name, `1`, or a product of names in parentheses, outermost first; `...` stands for leading dims.
            Another line with other numbers of tensors is kept beside this one; one with the same numbers replaces it.
        whole: names, separated by spaces, of factors that must not be cut.
    Raises:
        RuleError: the notation is malformed, or this is nothing that can have a rule.
    """
    key = _key(op_or_function)

    def refuse(what: str) -> RuleError:
        return RuleError(f'rule "{notation}" for {key_text(key)}: {what}')

    left, arrow, right = notation.partition("->")
    tensors = [*left.split(","), *right.split(",")]
    if not arrow or "->" in right:
        raise refuse('needs one "->" between inputs and outputs')
    for tensor in tensors:
        if not _TENSOR.fullmatch(tensor) or tensor.count("...") > 1:
            raise refuse(f'"{tensor.strip()}" is no list of names, (products of names), 1 and at most one "..."')
    names = re.findall(r"[A-Za-z_]\w*", notation)
    if "..." in notation and any(map(_LEADING.fullmatch, names)):
        raise refuse('names e0, e1, ... are taken by the dims of "..."; choose others')
    unknown = [name for name in whole.split() if name not in (*names, "...")]
    if unknown or ("..." in whole.split() and "..." not in notation):
        raise refuse(f'whole="{whole}" names what is no factor of it')
    inputs = len(left.split(","))
    registered = Registered(notation, whole, inputs, len(tensors) - inputs)
    _RULES.setdefault(key, {})[registered.inputs, registered.outputs] = registered


def _key(op: Any) -> Any:
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return op.name()
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, type) and issubclass(op, Function) and op is not Function:
        return op
    raise RuleError(f"{op!r:.80} can have no rule: pass an op of torch.library or an autograd.Function class")


def key_text(key: Any) -> str:
    return key if isinstance(key, str) else f"autograd.Function {key.__qualname__}"


def registered_rule(node: Node) -> Rule | None:
    """The registered rule of a call, None when nobody registered one.

    Raises:
        RuleError: there is one, and it does not fit this call; names the op and the user's line.
    """
    if not _RULES or not isinstance(node.target, OpOverload):
        return None
    cls = function_class(node)
    keys = (cls,) if cls is not None else (node.target.name(), node.target._schema.name)
    found = [_RULES[key] for key in keys if key in _RULES]
    if not found:
        return None
    call = Call(node)
    count = len(call.in_shapes), len(call.out_shapes)
    fitting = next((lines[count] for lines in found if count in lines), None)
    where = f"{record(node).where or node.name}: {op_text(node)}"
    if fitting is None:
        lines = "; ".join(f'"{r.notation}"' for lines in found for r in lines.values())
        raise RuleError(
            f"{where}: this call has {count[0]} input and {count[1]} output tensors, as no rule of it ({lines}) has"
        )
    try:
        return build(call, fitting.notation, fitting.whole)
    except RuleError as error:
        raise RuleError(f"{where}, shapes {call.in_shapes} -> {call.out_shapes}: {error}") from error


def build(call: Call, notation: str, whole: str) -> Rule:
    """A rule in a user's notation for one call. Raises: RuleError when the shapes contradict it."""
    found = rule(notation, call.in_shapes, call.out_shapes, saves=tuple(range(len(call.inputs))))
    read = Counter(f for dims in found.ins for f in {f for dim in dims for f in dim})
    written = {f for dims in found.outs for dim in dims for f in dim}
    leading = (f for f in found.sizes if "..." in whole.split() and _LEADING.fullmatch(f))
    # A factor that only outputs have comes from no cut input: each shard of the call would give all of it.
    kept = {*whole.split(), *leading, *(written - read.keys())} - {"..."}
    product = any(count > 1 and f not in written for f, count in read.items())
    flop = 2.0 * math.prod(found.sizes[f] for f in found.letters) if product else 0.0
    return replace(found, whole=frozenset(kept), flop=flop, linear_backward=has_linear_backward(call.node))


def has_linear_backward(node: Node) -> bool:
    """torch's own formulas are linear in the incoming gradient; a user's may clip it, or take its sign."""
    if function_class(node) is not None:
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace in ("aten", "prims", "autopar")
