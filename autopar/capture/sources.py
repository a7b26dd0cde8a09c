"""The placeholders of a program: every parameter and buffer of the module, lifted constants, tensor inputs.

Enters: the module, its exported form, the example. Leaves: placeholders in that order, each with its `Source`; tied
tensors are one placeholder, and parameters that forward never uses have one too. Refused: script objects as state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.capture.inputs import input_paths
from autopar.errors import CaptureError
from autopar.program import Source


@dataclass
class Sources:
    """Filled by `make_sources`. `mapping`: export's placeholder -> ours, or the constant it stands for."""

    graph: Graph
    by_node: dict[Node, Source] = field(default_factory=dict)
    mapping: dict[Node, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, val: Tensor, places: Iterable[Node], kind: str, path: str | None, **more: bool) -> str:
        """One more placeholder for export's `places`; returns its path (its node's name when it has none)."""
        node = self.graph.placeholder(name)
        node.target = node.name  # torch.fx prints it as a parameter's name, and a path may be none or another's
        node.meta["val"] = val
        self.by_node[node] = Source(node.name, kind, node.name if path is None else path, **more)
        self.mapping.update(dict.fromkeys(places, node))
        return self.by_node[node].path


def make_sources(graph: Graph, model: nn.Module, exported: ExportedProgram, inputs: Any) -> Sources:
    """Create all placeholders of `graph`. inputs: `(args, kwargs)` as the user passed them."""
    made = Sources(graph, ties={**_ties(model.named_parameters), **_ties(model.named_buffers)})
    places = [n for n in exported.graph.nodes if n.op == "placeholder"]
    mode = next((n.meta["val"].fake_mode for n in places if hasattr(n.meta.get("val"), "fake_mode")), None)
    mode = mode or FakeTensorMode()
    used: dict[str, list[Node]] = {}
    user_places: list[tuple[Node, Any]] = []
    constants: list[tuple[Node, str]] = []
    for place, spec in zip(places, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            used.setdefault(made.ties.get(spec.target, spec.target), []).append(place)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants.append((place, spec.target))
        elif spec.kind is InputKind.USER_INPUT:
            user_places.append((place, spec.arg))
        else:
            raise CaptureError(f"{place.name}: script objects and ordered effects cannot be split; use plain tensors")

    def owned(letter: str, path: str, tensor: Tensor, **more: bool) -> None:
        found = used.get(path, [])
        val = found[0].meta["val"] if found else mode.from_tensor(tensor)
        made.add(
            f"{letter}_{path.replace('.', '_')}", val, found, "parameter" if letter == "p" else "buffer", path, **more
        )
        made.state[path] = tensor

    for path, tensor in model.named_parameters():
        owned("p", path, tensor, trainable=tensor.requires_grad)
    passing = {f"{p}.{b}" if p else b for p, m in model.named_modules() for b in m._non_persistent_buffers_set}
    for path, tensor in model.named_buffers():
        owned("b", path, tensor, persistent=path not in passing)
    for place, target in constants:
        path = made.add(place.name, place.meta["val"], [place], "constant", None, persistent=False)
        made.state[path] = exported.constants[target]
    _add_inputs(made, exported, user_places, inputs)
    return made


def _add_inputs(made: Sources, exported: ExportedProgram, places: list[tuple[Node, Any]], inputs: Any) -> None:
    """Tensor inputs, in the order of the user's call (export orders keywords as the signature does)."""
    args, kwargs = pytree.tree_unflatten(range(len(places)), exported.call_spec.in_spec)
    in_order = pytree.tree_leaves((args, {key: kwargs[key] for key in inputs[1]}))
    for index, leaf, path in zip(in_order, pytree.tree_leaves(inputs), input_paths(inputs), strict=True):
        place, argument = places[index]
        if isinstance(argument, ConstantArgument):
            made.mapping[place] = argument.value
        else:
            made.add(place.name, place.meta["val"], [place], "input", path, trainable=leaf.requires_grad)


def _ties(named: Callable[..., Iterable[tuple[str, Tensor]]]) -> dict[str, str]:
    """Alias -> first name, of tensors that have several names."""
    first: dict[int, str] = {}
    every = list(named(remove_duplicate=False))
    for path, tensor in every:
        first.setdefault(id(tensor), path)
    return {path: first[id(tensor)] for path, tensor in every if first[id(tensor)] != path}
