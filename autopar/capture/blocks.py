"""Blocks: the instances of repeated modules, and classes of equal ones.

Enters: a captured graph whose nodes carry `nn_module_stack`. Leaves: block names in execution order, the block of every
call, and classes whose blocks correspond node by node.

A *group* is a set of sibling calls whose paths differ only in numbers (`layers.0`, `layers.1`, or `layer`, `layer#2`)
and of which at least two have equal structure and parameters. The outermost groups are the blocks; what stands before,
between and after them are blocks too. Without groups, equal siblings of one class are tried, then numbered siblings of
one class, then the top-level children.

Structure is compared by a hash over ops, constants, local argument positions, shapes and dtypes of values and of what
comes from outside: equal hashes mean that nodes correspond position by position. networkx confirms the first pair.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import networkx as nx
from torch import Tensor
from torch.fx import Graph, Node

from autopar.program import BlockClass

_SMALL = 0.1
"""Groups with less than this share of the largest group's ops are details of a block, not blocks."""

_WORTHWHILE = 0.25
"""Groups with less than this share of all ops (two equal norms in a model, say) are no repetition."""


@dataclass(eq=False)
class _Call:
    """One call of a module: `model.layers.3`, or `model.layers.3#2` for its second call."""

    name: str
    path: str
    kind: str
    children: dict[str, _Call] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    """All calls inside, in execution order."""


_Key = Callable[[_Call, _Call], "str | None"]
"""(a call, the call around it) -> what the members of a group share, or None for a call that joins none."""


def find_blocks(
    graph: Graph, origins: Mapping[Node, str], name: str
) -> tuple[tuple[str, ...], tuple[BlockClass, ...], dict[Node, str]]:
    """Divide a graph into blocks.

    Args:    origins: what each placeholder is; "parameter..." or another word; placeholders of unlike origin are not
             interchangeable between blocks, those without one are like values of other blocks.
             name: of the only block when the model has no modules.
    Returns: blocks in execution order, classes (every block is in one), the block of each call.
    """
    structure = _Structure(origins)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    root, stacks = _call_tree(calls)
    chosen = {c.name for c in _choose(root, structure)}
    members = _members(calls, [next((s for s in stack if s in chosen), None) for stack in stacks], name)
    classes: dict[str, list[str]] = defaultdict(list)
    for block, nodes in members.items():
        # Gaps are equal only when they stand before blocks of one kind: their neighbours decide what suits them.
        place = _masked(block) if ":" in block else ""
        classes[structure(nodes, block) + place].append(block)
    taken: set[str] = set()
    named = []
    for blocks in classes.values():
        nodes = tuple(tuple(n.name for n in members[b]) for b in blocks)
        if len(blocks) > 1 and not _isomorphic(members[blocks[0]], members[blocks[1]]):
            raise AssertionError(f"blocks {blocks[0]} and {blocks[1]} hash alike and differ")
        named.append(BlockClass(_class_name(blocks, taken), tuple(blocks), nodes))
    block_of = {n: block for block, nodes in members.items() for n in nodes}
    return tuple(members), tuple(named), block_of


def _call_tree(calls: Sequence[Node]) -> tuple[_Call, list[tuple[str, ...]]]:
    """The tree of module calls, and the names of the calls around each node, outermost first."""
    root = _Call("", "", "", nodes=list(calls))
    stacks = []
    for node in calls:
        here, stack = root, []
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if not path:
                continue
            again = int(key.rpartition("@")[2]) if "@" in key else 0
            name = f"{path}#{again + 1}" if again else path
            here = here.children.setdefault(name, _Call(name, path, str(kind)))
            here.nodes.append(node)
            stack.append(name)
        stacks.append(tuple(stack))
    return root, stacks


def _choose(root: _Call, structure: _Structure) -> list[_Call]:
    """The calls that become blocks."""
    trials: tuple[tuple[_Key, bool], ...] = ((_numbered, True), (_same_kind, True), (_numbered_kind, False))
    for key, equal in trials:
        groups = list(_groups(root, key, structure if equal else None, structure.has_parameters))
        sizes = [sum(len(c.nodes) for c in group) for group in groups]
        if sum(sizes) >= _WORTHWHILE * len(root.nodes):
            kept = [g for g, size in zip(groups, sizes, strict=True) if size >= _SMALL * max(sizes)]
            return list(_with_relatives(root, [c for group in kept for c in group]))
    while len(root.children) == 1:
        root = next(iter(root.children.values()))
    children = list(root.children.values())
    return [c for c in children if structure.has_parameters(c)] or children


def _with_relatives(root: _Call, chosen: Sequence[_Call]) -> Iterable[_Call]:
    """The chosen calls and all others of their classes: a stage of a ResNet may hold no two equal blocks."""
    names, kinds = {c.name for c in chosen}, {c.kind for c in chosen if c.children and not c.kind.startswith("torch.")}
    for child in root.children.values():
        if child.name in names or child.kind in kinds:
            yield child
        else:
            yield from _with_relatives(child, chosen)


def _numbered(call: _Call, parent: _Call) -> str | None:
    return _masked(call.path.removeprefix(parent.path))


def _same_kind(call: _Call, parent: _Call) -> str | None:
    return call.kind if call.children else None


def _numbered_kind(call: _Call, parent: _Call) -> str | None:
    """The last resort: `layers.0` and `layers.1` of one class that differ in structure."""
    return f"{_numbered(call, parent)} {call.kind}" if call.children else None


def _groups(
    parent: _Call, key: _Key, structure: _Structure | None, has_parameters: Callable[[_Call], bool]
) -> Iterable[list[_Call]]:
    """The outermost groups below `parent`. structure: given, two calls of a group at least must be equal by it."""
    siblings: dict[str | None, list[_Call]] = defaultdict(list)
    for child in parent.children.values():
        siblings[key(child, parent)].append(child)
    for shared, group in siblings.items():
        if shared is not None and len(group) > 1 and any(map(has_parameters, group)):
            hashes = [structure(c.nodes, c.name) for c in group] if structure else []
            if not structure or len(set(hashes)) < len(hashes):
                yield group
                continue
        for child in group:
            yield from _groups(child, key, structure, has_parameters)


def _members(calls: Sequence[Node], blocks: Sequence[str | None], name: str) -> dict[str, list[Node]]:
    """Nodes of each block in execution order; runs without one are `before:` the next or `after:` the last."""
    runs: list[tuple[str | None, list[Node]]] = []
    seen: set[str] = set()
    for node, block in zip(calls, blocks, strict=True):
        if runs and block is not None and block in seen and runs[-1][0] != block:
            block = None  # made late for a module that has ended, such as a view read after a write
        if not runs or runs[-1][0] != block:
            runs.append((block, []))
        if block is not None:
            seen.add(block)
        runs[-1][1].append(node)
    members: dict[str, list[Node]] = {}
    last = None
    for i, (block, nodes) in enumerate(runs):
        if block is None:
            following = runs[i + 1][0] if i + 1 < len(runs) else None
            block = f"before:{following}" if following else f"after:{last}" if last else name
        else:
            last = block
        members[block] = nodes
    return members


class _Structure:
    """Hashes node lists; see the module docstring."""

    def __init__(self, origins: Mapping[Node, str]) -> None:
        self.origins = origins
        self.described: dict[Node, str] = {}

    def __call__(self, nodes: Sequence[Node], block: str) -> str:
        index = {n: i for i, n in enumerate(nodes)}
        outside: dict[Node, int] = {}
        digest = hashlib.sha256()

        def encode(value: Any) -> str:
            if isinstance(value, Node):
                if value in index:
                    return f"%{index[value]}"
                known = value in outside
                number = outside.setdefault(value, len(outside))
                return f"^{number}" if known else f"^{number}{self.origins.get(value, '')}{self._describe(value)}"
            if isinstance(value, (tuple, list)):
                return f"[{','.join(map(encode, value))}]"
            if isinstance(value, dict):
                return f"{{{','.join(f'{k}:{encode(v)}' for k, v in value.items())}}}"
            if isinstance(value, slice):
                return f"slice{encode((value.start, value.stop, value.step))}"
            return repr(value)

        for node in nodes:
            escapes = "out" if any(u not in index for u in node.users) else ""
            inputs = encode((node.args, node.kwargs))
            line = (str(node.target), _inside(node, block), inputs, self._describe(node), escapes)
            digest.update("|".join(line).encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def has_parameters(self, call: _Call) -> bool:
        """Whether a call reads a parameter: activations and tables of positions alone make no block."""
        return any(self.origins.get(a, "").startswith("parameter") for n in call.nodes for a in n.all_input_nodes)

    def _describe(self, node: Node) -> str:
        found = self.described.get(node)
        if found is None:
            found = self.described[node] = _described(node)
        return found


def _described(node: Node) -> str:
    """Shape and dtype of a node's value(s)."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return ";".join(f"{tuple(v.shape)}{v.dtype}" if isinstance(v, Tensor) else repr(v) for v in values)


def _inside(node: Node, block: str) -> str:
    """The module path of a node relative to its block, without numbers."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    return _masked(path.removeprefix(block.partition("#")[0]))


@lru_cache(maxsize=65536)
def _masked(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _isomorphic(left: Sequence[Node], right: Sequence[Node]) -> bool:
    """Whether two blocks are equal as labelled graphs, nodes matched by position."""
    return nx.utils.graphs_equal(_digraph(left), _digraph(right))


def _digraph(nodes: Sequence[Node]) -> nx.DiGraph:
    index = {n: i for i, n in enumerate(nodes)}
    graph = nx.DiGraph()
    for node, i in index.items():
        graph.add_node(i, label=(str(node.target), _described(node)))
    graph.add_edges_from((index[a], i) for node, i in index.items() for a in node.all_input_nodes if a in index)
    return graph


def _class_name(blocks: Sequence[str], taken: set[str]) -> str:
    """The common name with `*` for numbers, or the block's own name; `~2` for a second class of that name."""
    base = name = _masked(blocks[0].partition("#")[0]) if len(blocks) > 1 else blocks[0]
    count = 1
    while name in taken:
        count += 1
        name = f"{base}~{count}"
    taken.add(name)
    return name
