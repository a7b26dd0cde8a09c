"""Blocks that stand several times in a program: traced once, called as one op where they stand.

Enters: the equal blocks of a local program (`passes.outline`). Leaves: in a joint graph one `autopar::block` and one
`autopar::block_backward` for each of them, and for each kind of block the joint graph of one, which `passes.inline`
puts in their places. Autograd itself adds the gradients up where blocks meet. Refused (`Unequal`): blocks whose trace
holds constants of its own, or that hand out memory they were handed.

A block is traced again where its inputs, or the gradients that come back to it, lie otherwise in memory: what the
trace holds may depend on strides. Inside a trace, `autopar::edge` stands where values leave and gradients come in: so
AOTAutograd sees no aliases between them, and gradients have the strides they will have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd import Function
from torch.fx import Graph, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from autopar.passes.aliases import is_view
from autopar.passes.lower import trace_joint
from autopar.passes.outline import Block, Outline

Decompositions = Mapping[Any, Callable[..., Any]] | None


class Unequal(Exception):
    """The blocks cannot be lowered by one of them; the message says why."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Form:
        return Form(tuple(x.shape), x.stride(), x.dtype, x.device)

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


Inputs = tuple[tuple[Form, bool], ...]
"""Each input, and whether it takes a gradient."""
Tangents = tuple[tuple[int, ...] | None, ...]
"""For each output the strides of the gradient that comes back, None where none does."""


@dataclass(frozen=True, eq=False)
class Template:
    """The joint graph of one block: placeholders are its inputs, then the gradients that come back (`tangents_*`); the
    results are its outputs, then the gradients of its inputs (None where there is none)."""

    graph: Graph
    outputs: tuple[Form, ...]
    differentiable: tuple[bool, ...]
    grads: tuple[Form | None, ...]
    tangents: Tangents


@dataclass(eq=False)
class Kind:
    """What is known of equal blocks. first: the one that is traced."""

    first: Block
    decompositions: Decompositions
    templates: dict[tuple[Inputs, Tangents | None], Template] = field(default_factory=dict)

    def template(self, inputs: Inputs, tangents: Tangents | None = None) -> Template:
        """tangents: None while they are not known: taken to lie as the outputs do."""
        if (inputs, tangents) not in self.templates:
            self.templates[inputs, tangents] = _trace(self.first, inputs, tangents, self.decompositions)
        return self.templates[inputs, tangents]


@dataclass(eq=False)
class Place:
    """A block where it stands. template: of the inputs, and gradients, that reached it last."""

    block: Block
    kind: Kind
    template: Template = field(init=False)
    inputs: Inputs = ()

    def entered(self, values: Sequence[Tensor], wanted: Sequence[bool]) -> Template:
        self.inputs = tuple((Form.of(v), w) for v, w in zip(values, wanted, strict=True))
        self.template = self.kind.template(self.inputs)
        return self.template

    def returned(self, grads: Sequence[Tensor | None]) -> Template:
        tangents = tuple(None if g is None else g.stride() for g in grads)
        if tangents != self.template.tangents:
            self.template = self.kind.template(self.inputs, tangents)
        return self.template


class Repeats:
    """The equal blocks of one program, while it is lowered."""

    def __init__(self, graph: Graph, decompositions: Decompositions = None) -> None:
        self.graph, blocks = Outline(block, _NUMBERS).run(graph)
        kinds: dict[int, Kind] = {}
        for at in blocks.values():
            kinds.setdefault(at.kind, Kind(at, decompositions))
        self.places = {number: Place(at, kinds[at.kind]) for number, at in blocks.items()}

    @contextmanager
    def known(self) -> Iterator[None]:
        """Calls of these blocks can be run, and traced, inside."""
        _PLACES.update(self.places)
        try:
            yield
        finally:
            for number in self.places:
                del _PLACES[number]


_NUMBERS = itertools.count()
_PLACES: dict[int, Place] = {}
"""What can be called now; no number is given twice."""


def block(number: int, *values: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a repeated block, as one op with one backward."""
    return _Block.apply(number, *values)


class _Block(Function):
    @staticmethod
    def forward(ctx: Any, number: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.number = number
        ctx.set_materialize_grads(False)
        template = _PLACES[number].entered(values, ctx.needs_input_grad[1:])
        outputs = torch.ops.autopar.block(values, number)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, template.differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        template = _PLACES[ctx.number].returned(grads)
        found = iter(torch.ops.autopar.block_backward([g for g in grads if g is not None], ctx.number))
        return None, *(None if form is None else next(found) for form in template.grads)


class _Edge(Function):
    """The same value. stride: of the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: Sequence[int]) -> Tensor:
        ctx.stride = stride
        return torch.ops.autopar.edge(x, x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.ops.autopar.edge(grads[0], ctx.stride), None


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("block(Tensor[] values, int number) -> Tensor[]")
_LIBRARY.define("block_backward(Tensor[] grads, int number) -> Tensor[]")
_LIBRARY.define("edge(Tensor x, int[] stride) -> Tensor")


def _outputs(values: Sequence[Tensor], number: int) -> list[Tensor]:
    return [form.made() for form in _PLACES[number].template.outputs]


def _grads(grads: Sequence[Tensor], number: int) -> list[Tensor]:
    return [form.made() for form in _PLACES[number].template.grads if form is not None]


torch.library.register_fake("autopar::block", _outputs, lib=_LIBRARY)
torch.library.register_fake("autopar::block_backward", _grads, lib=_LIBRARY)
torch.library.register_fake("autopar::edge", lambda x, stride: x.new_empty_strided(x.shape, stride), lib=_LIBRARY)


def _trace(of: Block, inputs: Inputs, tangents: Tangents | None, decompositions: Decompositions) -> Template:
    """The joint graph of a block for inputs, and gradients coming back, that lie like these."""
    # the interpreter hands each node's record on to the traced nodes; calling the module would lose it
    run = Interpreter(torch.nn.Module(), graph=of.alone()).run
    differentiable: list[bool] = []

    def edged(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = run(*values)
        strides = [o.stride() for o in outputs] if tangents is None else tangents
        differentiable[:] = [o.requires_grad for o in outputs]
        return tuple(
            _Edge.apply(o, s) if s is not None else _Edge.apply(o.detach(), o.stride())
            for o, s in zip(outputs, strides, strict=True)
        )

    mode = detect_fake_mode()
    assert mode is not None, "blocks are traced while the program around them is"
    with _disable_current_modes(), torch.enable_grad():
        with mode:
            values = [form.made().requires_grad_(wanted) for form, wanted in inputs]
        graph, count = trace_joint(edged, values, decompositions)
    results = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(results, (tuple, list))
    if count != len(of.outputs) or graph.find_nodes(op="get_attr"):
        raise Unequal("the trace of a block writes to its inputs or holds constants")
    outputs, grads = results[:count], results[count:]
    if any(_hands_on(o) for o in outputs):
        raise Unequal("a block hands out a view of what it was handed")
    forms = tuple(Form.of(o.meta["val"]) for o in outputs)  # type: ignore[union-attr]
    return Template(
        graph,
        forms,
        tuple(differentiable),
        tuple(Form.of(g.meta["val"]) if isinstance(g, Node) else None for g in grads),
        tangents or tuple(f.stride if d else None for f, d in zip(forms, differentiable, strict=True)),
    )


def _hands_on(output: Any) -> bool:
    while isinstance(output, Node) and (is_view(output) or output.target is torch.ops.autopar.edge.default):
        output = output.args[0]
    return not isinstance(output, Node) or output.op == "placeholder"
