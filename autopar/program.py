"""The captured model: one fx graph, and where each of its inputs comes from and each of its outputs goes.

Placeholders stand first, one for each `Source`, in the order parameters, buffers, constants, inputs. What autopar
knows about a node is one `Record` under `node.meta["custom"]["autopar"]`, the only key that AOTAutograd carries into
both graphs; only this module reads and writes it. `node.meta["val"]` holds the node's fake tensor(s).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.layout import Layout, Parts


@dataclass(frozen=True, slots=True)
class Record:
    """What autopar knows about one node."""

    op: str
    """Stable name: `<module path>/<op>/<occurrence>`, e.g. `model.layers.0.mlp/linear/1`."""
    block: str
    """The block it belongs to, e.g. `model.layers.3`, `model.layers.3#2`, `before:model.layers.0`."""
    where: str = ""
    """`file.py:line` of the user's code."""
    parts: Parts | None = None
    layout: Layout | None = None
    """After the shard pass: the (global) parts of the value and how it lies on the mesh."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """One placeholder. kind: "parameter", "buffer", "constant" (a tensor made in forward), "input"."""

    node: str
    kind: str
    path: str
    """Qualified name of a parameter or buffer; `args[0]`, `kwargs['x']['table']` for an input."""
    trainable: bool = False
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Sink:
    """One output of the graph. kind: "user", or "state": the new value of the buffer or parameter `path`."""

    kind: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Blocks of equal structure; `nodes[i]` are the node names of `blocks[i]`, corresponding position by position."""

    name: str
    blocks: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A model as data; see the module docstring. Passes return a new Program and never change the old one."""

    graph: Graph
    sources: tuple[Source, ...]
    sinks: tuple[Sink, ...]
    state: dict[str, torch.Tensor]
    """Parameters, buffers and constants by qualified name (constants: by placeholder name); may be on meta."""
    ties: dict[str, str]
    """Alias -> canonical qualified name, for parameters and buffers stored under several names."""
    in_spec: pytree.TreeSpec
    """Of `(args, kwargs)`."""
    in_values: tuple[Any, ...]
    """The flat inputs: `None` stands at each tensor's place (`in_tensors` says which), other values as captured."""
    in_tensors: tuple[bool, ...]
    out_spec: pytree.TreeSpec
    out_values: tuple[Any, ...]
    """The flat user outputs: a `Sink` index for each tensor wrapped as `OutputRef`, other values as captured."""
    classes: tuple[BlockClass, ...] = ()
    blocks: tuple[str, ...] = ()
    training: bool = True
    name: str = "model"

    @property
    def placeholders(self) -> tuple[Node, ...]:
        return tuple(n for n in self.graph.nodes if n.op == "placeholder")

    @property
    def calls(self) -> Iterator[Node]:
        return (n for n in self.graph.nodes if n.op == "call_function")

    @property
    def output(self) -> Node:
        last: Node = next(iter(reversed(self.graph.nodes)))
        return last

    def source(self, node: Node) -> Source:
        return self.by_node[node.name]

    @property
    def by_node(self) -> dict[str, Source]:
        return {s.node: s for s in self.sources}


@dataclass(frozen=True, slots=True)
class OutputRef:
    """Stands in `Program.out_values` for the tensor of sink number `index`."""

    index: int


def record(node: Node) -> Record:
    """The record of a node; an empty one when a pass has made the node without."""
    found = node.meta.get("custom", {}).get("autopar")
    return found if found is not None else Record(op=node.name, block="")


def set_record(node: Node, value: Record | None = None, **changes: Any) -> None:
    """Replace a node's record, or some of its fields."""
    custom = dict(node.meta.get("custom", {}))
    custom["autopar"] = replace(value if value is not None else record(node), **changes)
    node.meta["custom"] = custom


def tensor_of(node: Node) -> torch.Tensor | None:
    """The fake tensor of a node with one tensor as value, else None."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def tensors_of(node: Node) -> tuple[torch.Tensor, ...]:
    """All fake tensors of a node's value."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, torch.Tensor)) if isinstance(value, (tuple, list)) else ()
