"""What a rule is: how the tensors of one op use the op's factors, in einops-like notation.

    "b s i, o i, o -> b s o"     a linear layer: `i` is missing from the output, so it is summed
    "b s (h d) -> b s h d"       a view that splits a dim
    "..., ... -> ..."            leading dims, aligned from the right; a dim of size 1 is broadcast and has no factor

Cutting a factor on a mesh axis shards every tensor that has it, replicates (R) every input that lacks it and leaves
every output that lacks it partial (P). `whole` factors are never cut. `linear` names sets of inputs which, partial
together with the others replicated, give partial outputs (a view of P is P; so is a sum of two P).

A rule enters as notation plus shapes and leaves as a `Rule`; letters whose sizes contradict each other are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import RuleError

if TYPE_CHECKING:
    from autopar.rules.local import Local

Dim = tuple[str, ...]
"""The factors of one dim, outermost first; `()` is a dim of size one."""
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective inside a distributed strategy: what it costs, not how it runs."""

    forward: str
    backward: str
    factors: tuple[str, ...]
    """Its buffer has these factors (their local sizes)."""


@dataclass(frozen=True, slots=True)
class Distributed:
    """How an op computes across the shards of a factor that a plain call on shards would get wrong."""

    collectives: tuple[Collective, ...] = ()
    output: str = ""
    """Placement kind of outputs that lack the factor, when it isn't P ("I": the op reduced it itself)."""


@dataclass(frozen=True, eq=False)
class Rule:
    """One op call's factors; see the module docstring."""

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()
    """Factors whose shards are found by an offset (a vocabulary, causal queries): only their outermost part is cut."""
    filled: frozenset[str] = frozenset()
    """Factors of which every rank must get something, because the op refuses an empty dim."""
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    """Inputs added to a sum (a bias): partial, not replicated, where the sum is."""
    distributed: Mapping[str, Distributed] = field(default_factory=dict)
    linear_backward: bool = True
    """Is the gradient of a sum of parts the sum of their gradients? Unknown (False) of a user's backward: "R" is then
    not offered.
    """
    local: Callable[[Local], object] | None = None
    """Makes the local program of the op; None calls the op itself on shards."""
    flop: float = 0.0
    """Floating-point operations of the forward of the whole op (2 a multiply-add)."""
    saves: tuple[int, ...] = ()
    """Inputs that autograd keeps for the backward, by position."""
    saves_output: bool = False
    view: bool = False
    """The output aliases the input: no bytes moved."""

    @property
    def letters(self) -> tuple[str, ...]:
        """All factors, in order of first appearance in outputs, then inputs."""
        return tuple(dict.fromkeys(f for dims in (*self.outs, *self.ins) for dim in dims for f in dim))


_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


def _dims(text: str) -> list[Dim]:
    found: list[Dim] = []
    for group, single in _GROUP.findall(text):
        if single:
            found.append(() if single == "1" else (single,))
        else:
            found.append(tuple(group.split()))
    return found


def parse(
    notation: str,
    in_shapes: Sequence[Sequence[int]],
    out_shapes: Sequence[Sequence[int]],
    *,
    whole: str = "",
    sizes: Mapping[str, int] | None = None,
) -> tuple[tuple[Dims, ...], tuple[Dims, ...], dict[str, int]]:
    """Notation and shapes -> (input dims, output dims, factor sizes).

    Args:
        notation: `"ins -> outs"`, tensors separated by commas.
        sizes: of factors that shapes alone do not give.
    Raises:
        RuleError: another number of tensors or dims than the shapes, or contradicting sizes.
    """
    left, arrow, right = notation.partition("->")
    if not arrow:
        raise RuleError(f'rule "{notation}": no "->"')
    specs = [_dims(t) for t in left.split(",")] + [_dims(t) for t in right.split(",")]
    n_in = len(left.split(","))
    shapes = [tuple(s) for s in (*in_shapes, *out_shapes)]
    if len(specs) != len(shapes) or n_in != len(in_shapes):
        raise RuleError(
            f'rule "{notation}" names {n_in} inputs and {len(specs) - n_in} outputs; '
            f"the op has {len(in_shapes)} and {len(out_shapes)}"
        )
    leading = max(
        (len(shape) - len(spec) + 1 for spec, shape in zip(specs, shapes, strict=True) if ("...",) in spec), default=0
    )
    known: dict[str, int] = dict(sizes or {})
    expanded: list[list[Dim]] = []
    for spec, shape in zip(specs, shapes, strict=True):
        if ("...",) in spec:
            at, missing = spec.index(("...",)), len(shape) - len(spec) + 1
            if missing < 0:
                raise RuleError(f'rule "{notation}": a tensor of shape {shape} has too few dims')
            spec = [*spec[:at], *(((f"e{leading - missing + i}",)) for i in range(missing)), *spec[at + 1 :]]
        if len(spec) != len(shape):
            raise RuleError(f'rule "{notation}": a tensor of shape {shape} does not have {len(spec)} dims')
        expanded.append(spec)
        for dim, size in zip(spec, shape, strict=True):
            if len(dim) == 1:
                known[dim[0]] = max(known.get(dim[0], 1), size) if size != 0 else 0
    tensors: list[Dims] = []
    for spec, shape in zip(expanded, shapes, strict=True):
        dims: list[Dim] = []
        for dim, size in zip(spec, shape, strict=True):
            missing_sizes = [f for f in dim if f not in known]
            product = _product(known, [f for f in dim if f in known])
            if len(missing_sizes) == 1 and product and size % product == 0:
                known[missing_sizes[0]] = size // product
            if dim and size == 1 and _product(known, dim) != 1 and len(dim) == 1:
                dims.append(())  # broadcast
            elif _product(known, dim) != size:
                raise RuleError(
                    f'rule "{notation}": dim {" ".join(dim)} has size {_product(known, dim)}, '
                    f"the tensor of shape {shape} has {size}"
                )
            else:
                dims.append(dim)
        tensors.append(tuple(dims))
    return tuple(tensors[:n_in]), tuple(tensors[n_in:]), known


def _product(sizes: Mapping[str, int], dim: Sequence[str]) -> int:
    out = 1
    for factor in dim:
        out *= sizes.get(factor, 1)
    return out


def rule(
    notation: str,
    in_shapes: Sequence[Sequence[int]],
    out_shapes: Sequence[Sequence[int]],
    *,
    whole: str = "",
    sizes: Mapping[str, int] | None = None,
    **options: object,
) -> Rule:
    """Build a `Rule` from notation. `whole` lists factors that are never cut; options are the fields of `Rule`."""
    ins, outs, known = parse(notation, in_shapes, out_shapes, sizes=sizes)
    return Rule(ins=ins, outs=outs, sizes=known, whole=frozenset(whole.split()), **options)  # type: ignore[arg-type]
