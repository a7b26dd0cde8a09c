"""Find the rule of an op that has none by running it on shards of small random tensors.

Enters: a call without a rule. Leaves: notation for it, or nothing. For every set of dims of equal size, at most one a
tensor, the op is run on 2 and 3 shards (at the call's own sizes where they are small, and with the dims of the set made
longer, so that shards are uneven), at two scales of the data. The set is one factor when outputs that have it, joined,
and outputs that lack it, summed, are those of the whole op, and so are the gradients of the inputs, and when that holds
inside a shard of every other factor, too.

Random tests are no proof: an op that behaves otherwise for rare values passes them. A plan says which rules were found
so. Refused: ops with random results, with more dims than can be tried, or that run neither in float64 nor in their own
dtype on small tensors on the device they were captured on.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.errors import RuleError
from autopar.layout import chunk
from autopar.program import record
from autopar.rules import rule_of
from autopar.rules.call import Call, tensor_inputs
from autopar.rules.register import build
from autopar.rules.rule import Rule
from autopar.user_function import op_text

LARGEST = 1 << 16
"""Elements of the largest tensor that is run at its own size; larger ones are shrunk."""

SMALL_SIZES = (6, 4, 9, 10, 8, 12, 14, 15)
"""What the distinct sizes of a shrunk call become, in order."""

LONGER = 7
"""A factor's other size: neither 2 nor 3 divides it."""

MOST_SETS = 2000
"""Sets of dims that are tried at most."""

SCALES = (1.0, 30.0)

_NO_BACKWARD = re.compile(r"no autograd formula was registered|derivative for .* is not implemented")
"""Of an op that no model can train through: its forward decides."""

Shapes = tuple[tuple[int, ...], ...]
Cut = tuple[int, ...]
"""For each tensor, inputs then outputs, the dim that is cut, or -1."""


@dataclass(eq=False)
class Discover:
    """`rule_of`, and for ops without a rule what running them suggests. `notes` tells of each op that was tried."""

    rules: Callable[[Node], Rule | None] = rule_of
    notes: list[str] = field(default_factory=list)
    _known: dict[Any, tuple[str, str] | None] = field(default_factory=dict)

    def __call__(self, node: Node) -> Rule | None:
        found = self.rules(node)
        if found is not None or not tensor_inputs(node) or not isinstance(node.target, OpOverload):
            return found
        key = _key(node)
        if key not in self._known:
            self._known[key] = discover(node)
            self.notes.append(self._note(node, self._known[key]))
        line = self._known[key]
        return None if line is None else build(Call(node), *line)

    def _note(self, node: Node, line: tuple[str, str] | None) -> str:
        place = f"{op_text(node)} ({record(node).where or node.name})"
        if line is None:
            return f"no rule discovered for {place}"
        whole = f", whole {line[1]}" if line[1] else ""
        return f"rule discovered for {place}: {line[0]}{whole}; random tests are no proof"


def _key(node: Node) -> Any:
    """Calls that differ in nothing that discovery looks at."""

    def plain(leaf: Any) -> Any:
        value = leaf.meta.get("val") if isinstance(leaf, Node) else None
        return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(leaf)

    leaves, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    return str(node.target), str(spec), tuple(map(plain, leaves))


def discover(node: Node) -> tuple[str, str] | None:
    """(notation, whole factors) of a call, None when no dim of it can be cut."""
    with torch.random.fork_rng(devices=[t.device for t in Call(node).inputs if t.is_cuda]):
        return _discover(node)


def _discover(node: Node) -> tuple[str, str] | None:
    trial = _trial(node)
    if trial is None:
        return None
    found: list[Cut] = []
    for cut in trial.candidates():
        overlaps = any(a == b >= 0 for other in found for a, b in zip(cut, other, strict=True))
        if not overlaps and trial.holds(cut) and all(trial.holds_within(cut, other) for other in found):
            found.append(cut)
    if not found:
        return None
    line = _notation(found, Call(node))
    try:
        return line if build(Call(node), *line) else None
    except RuleError:  # dims that are equal in the trial and not in the call
        return None


def _notation(found: Sequence[Cut], call: Call) -> tuple[str, str]:
    names = iter(itertools.chain(string.ascii_lowercase, (f"x{i}" for i in itertools.count())))
    of: dict[tuple[int, int], str] = {}
    for cut in found:
        name = next(names)
        of |= {(tensor, dim): name for tensor, dim in enumerate(cut) if dim >= 0}
    whole: list[str] = []
    tensors = []
    for t, shape in enumerate([*call.in_shapes, *call.out_shapes]):
        for d, size in enumerate(shape):
            if (t, d) not in of:
                of[t, d] = next(names) if size != 1 else "1"
                whole += [of[t, d]] * (size != 1)
        tensors.append(" ".join(of[t, d] for d in range(len(shape))))
    n = len(call.in_shapes)
    return f"{', '.join(tensors[:n])} -> {', '.join(tensors[n:])}", " ".join(whole)


def _trial(node: Node) -> _Trial | None:
    """A size and a dtype in which the op runs, twice with the same result; shapes of the outputs as they are to be."""
    call = Call(node)
    given: Shapes = tuple(call.in_shapes)
    outs: Shapes = tuple(call.out_shapes)
    if not outs or any(0 in shape for shape in (*given, *outs)):
        return None
    large = any(torch.Size(shape).numel() > LARGEST for shape in (*given, *outs))
    ins, expected = _shrunk(given, outs) if large else (given, outs)
    own = {t.dtype for t in call.inputs if t.dtype.is_floating_point or t.dtype.is_complex}
    for exact in (True, False) if own - {torch.float64, torch.complex128} else (True,):
        trial = _Trial(node, call, ins, expected, exact)
        if trial.runs():
            return trial
    return None


def _shrunk(ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Every distinct size above the small ones becomes a small one that nothing else has."""
    sizes = sorted({n for shape in (*ins, *outs) for n in shape if n > 2}, reverse=True)
    free = [s for s in SMALL_SIZES if s not in sizes] + list(range(16, 16 + len(sizes)))
    small = dict(zip([n for n in sizes if n > max(SMALL_SIZES)], free, strict=False))

    def shrink(shapes: Shapes) -> Shapes:
        return tuple(tuple(small.get(n, n) for n in shape) for shape in shapes)

    return shrink(ins), shrink(outs)


@dataclass(eq=False)
class _Trial:
    """One call at one size: runs it whole and in shards."""

    node: Node
    call: Call
    ins: Shapes
    outs: Shapes
    exact: bool
    """In float64; else in the call's own dtypes."""

    def runs(self) -> bool:
        """Does it run, give outputs of the shapes we expect, and the same ones twice?"""
        tensors = self.random(self.ins, SCALES[0])
        first, second = self.run(tensors), self.run(tensors)
        if first is None or second is None or tuple(tuple(o.shape) for o in first.outs) != self.outs:
            return False
        return first.equals(second)

    def candidates(self) -> Iterator[Cut]:
        """Sets with an input dim, those with most tensors first: a dim is cut together with all that go along."""
        shapes = (*self.ins, *self.outs)
        n = len(self.ins)
        found: list[Cut] = []
        for size in dict.fromkeys(s for shape in self.ins for s in shape if s > 1):
            options = [(-1, *(d for d, s in enumerate(shape) if s == size)) for shape in shapes]
            if torch.Size(map(len, options)).numel() + len(found) > MOST_SETS:
                continue
            found += [cut for cut in itertools.product(*options) if any(d >= 0 for d in cut[:n])]
        yield from sorted(found, key=lambda cut: cut.count(-1))

    def holds(self, cut: Cut) -> bool:
        """Is the set a factor, at this size and at a longer one?"""
        if not all(self.splits(cut, self.random(self.ins, scale)) for scale in SCALES):
            return False
        longer = [
            tuple(LONGER if d == at else n for d, n in enumerate(shape))
            for shape, at in zip((*self.ins, *self.outs), cut, strict=True)
        ]
        tensors, expected = self.random(longer[: len(self.ins)], SCALES[0]), longer[len(self.ins) :]
        whole = self.run(tensors)
        if whole is None or [tuple(o.shape) for o in whole.outs] != expected:
            return True  # another size does not fit the call's other arguments
        return self.splits(cut, tensors)

    def holds_within(self, cut: Cut, other: Cut) -> bool:
        """Is the set still a factor of the call on half of another factor?"""
        return self.splits(cut, _shards(self.random(self.ins, SCALES[0]), other, 2)[0])

    def splits(self, cut: Cut, tensors: Sequence[Tensor]) -> bool:
        """Do 2 and 3 shards together give the whole?"""
        size = next(t.shape[d] for t, d in zip(tensors, cut, strict=False) if d >= 0)
        counts = [n for n in (2, 3) if all(chunk(size, n, i)[1] for i in range(n))]
        whole = self.run(tensors)
        return bool(counts) and whole is not None and all(self.joins(cut, tensors, whole, n) for n in counts)

    def joins(self, cut: Cut, tensors: Sequence[Tensor], whole: _Result, count: int) -> bool:
        n = len(tensors)
        seeds = _shards(whole.seeds, cut[n:], count)
        parts: list[_Result] = []
        for shards, mine in zip(_shards(tensors, cut[:n], count), seeds, strict=True):
            part = self.run(shards, mine)
            if part is None:
                return False
            parts.append(part)
        together = _Result(
            tuple(_join([p.outs[i] for p in parts], d) for i, d in enumerate(cut[n:])),
            whole.seeds,
            tuple(_join_gradients([p.grads[i] for p in parts], d) for i, d in enumerate(cut[:n])),
        )
        return whole.equals(together)

    def run(self, tensors: Sequence[Tensor], seeds: Sequence[Tensor] | None = None) -> _Result | None:
        """Forward and backward; None when the op refuses these tensors. seeds: gradients of the outputs."""
        taken = iter([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
        places = set(tensor_inputs(self.node))
        leaves, spec = pytree.tree_flatten((list(self.node.args), dict(self.node.kwargs)))
        used = [next(taken) if isinstance(leaf, Node) and leaf in places else leaf for leaf in leaves]
        leaf_tensors = [t for t in used if isinstance(t, Tensor)]
        args, kwargs = pytree.tree_unflatten(used, spec)
        try:
            with torch.enable_grad():
                results = pytree.tree_leaves(self.node.target(*args, **kwargs))  # type: ignore[operator]
        except Exception:  # whatever a user's op raises means that it does not take these tensors
            return None
        outs = tuple(r for r in results if isinstance(r, Tensor))
        seeds = self.seeds(outs) if seeds is None else seeds
        if [o.shape for o in outs] != [s.shape for s in seeds]:
            return None
        roots = [(o, s) for o, s in zip(outs, seeds, strict=True) if o.requires_grad]
        try:
            torch.autograd.backward([o for o, _ in roots], [s.to(o.dtype) for o, s in roots])
        except Exception as error:
            if not _NO_BACKWARD.search(str(error)):
                return None
        return _Result(tuple(o.detach() for o in outs), tuple(seeds), tuple(t.grad for t in leaf_tensors))

    def random(self, shapes: Sequence[tuple[int, ...]], scale: float) -> list[Tensor]:
        """Inputs of these shapes: the same for the same arguments."""
        generator = torch.Generator().manual_seed(20)
        return [self.one(shape, like, scale, generator) for shape, like in zip(shapes, self.call.inputs, strict=True)]

    def one(self, shape: tuple[int, ...], like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
        device = torch.device("cpu") if like.is_meta or like.device.type == "meta" else like.device
        if not (like.dtype.is_floating_point or like.dtype.is_complex):
            return torch.randint(0, 2, shape, generator=generator).to(device, like.dtype)
        wide = torch.complex128 if like.dtype.is_complex else torch.float64
        drawn = torch.randn(shape, dtype=wide, generator=generator) * scale
        return drawn.to(device, wide if self.exact else like.dtype).requires_grad_()

    def seeds(self, outs: Sequence[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(21)
        return [torch.randn(o.shape, dtype=torch.float64, generator=generator).to(o.device) for o in outs]


@dataclass(frozen=True, eq=False)
class _Result:
    outs: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    """Gradients of the outputs."""
    grads: tuple[Tensor | None, ...]
    """Of the inputs."""

    def equals(self, other: _Result) -> bool:
        return all(_close(a, b) for a, b in zip((*self.outs, *self.grads), (*other.outs, *other.grads), strict=True))


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal up to rounding, relative to the largest element."""
    if a is None or b is None:
        return a is None and b is None
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    tolerance = min(1e-4, max(1e-9, 20 * torch.finfo(a.dtype).eps))
    return a.numel() == 0 or bool((a - b).abs().max() <= tolerance * a.abs().max())


def _shards(tensors: Sequence[Tensor], cut: Sequence[int], count: int) -> list[list[Tensor]]:
    """For each shard its pieces; tensors that are not cut are whole in all."""
    return [
        [t if d < 0 else t.narrow(d, *chunk(t.shape[d], count, i)) for t, d in zip(tensors, cut, strict=False)]
        for i in range(count)
    ]


def _join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Shards joined, or parts summed. A sum of booleans is none: the result then equals nothing."""
    if dim >= 0:
        return torch.cat(list(pieces), dim)
    if pieces[0].dtype == torch.bool:
        return pieces[0].new_empty((0,) * (pieces[0].ndim + 1))
    return torch.stack(list(pieces)).sum(0, dtype=pieces[0].dtype)


def _join_gradients(pieces: Sequence[Tensor | None], dim: int) -> Tensor | None:
    """None where no shard has one; a shard without one has zeros when it is a part of a sum, else there is no rule."""
    present = [p for p in pieces if p is not None]
    if not present:
        return None
    return _join(present, dim) if dim < 0 or len(present) == len(pieces) else present[0]
