"""The lowered graphs as text: what is saved for the backward, where each node comes from, what is made again.

Enters: `Graphs` and the local program they were made of. Leaves: a text for each graph, in the form of `dump`. A node
shows the layout of the value that the user's op made; what an op is made of inside (a transposed weight) and gradients
show none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Node

from autopar.codegen.cluster import why_alone
from autopar.codegen.views import SPLITS, packet, view_of
from autopar.dump import call_text, layout_text, node_text
from autopar.passes.lower import Graphs
from autopar.program import Program, record


def kernels_text(graphs: Graphs) -> str:
    """Every generated kernel, equal ones once, below the groups that it runs, then what is in no kernel, and why; empty
    when there are none."""
    found: dict[str, list[str]] = {}
    for which, module in (("forward", graphs.forward), ("backward", graphs.backward)):
        for node in module.graph.nodes:
            if node.op == "call_module":
                group = module.get_submodule(str(node.target))
                outputs = ", ".join(f"%{n.name}" for n in sorted(node.users, key=lambda n: str(n.args[1])))
                text = f"# {which} %{node.name} in {record(node).block or 'no block'}: {outputs}"
                found.setdefault(group.code.printed.text, []).append(text)  # type: ignore[union-attr]
    if not found:
        return ""
    return "\n\n".join((*("\n".join((*groups, text)) for text, groups in found.items()), _left_out(graphs)))


def _left_out(graphs: Graphs) -> str:
    """The ops that run by themselves, a line for each kind and reason."""
    found: Counter[tuple[str, str, str]] = Counter()
    for which, module in (("forward", graphs.forward), ("backward", graphs.backward)):
        for node in module.graph.nodes:
            name = packet(node)
            if node.op == "call_function" and view_of(node) is None and name not in ("", "getitem", *SPLITS):
                found[which, name, why_alone(node)] += 1
    lines = (f"# in no kernel, {which}: {name}, {n} times: {why}" for (which, name, why), n in sorted(found.items()))
    return "\n".join(lines)


def forward_text(graphs: Graphs, program: Program, axes: Sequence[str]) -> str:
    """The forward graph; below it what it saves, the largest first."""
    return "\n".join(_forward(graphs, program, axes))


def backward_text(graphs: Graphs, program: Program, axes: Sequence[str]) -> str:
    """The backward graph; nodes of the forward that run again say so."""
    return "\n".join(_backward(graphs, program, axes))


def _forward(graphs: Graphs, program: Program, axes: Sequence[str]) -> Iterator[str]:
    yield f"forward of {program.name}: {_calls(graphs.forward.graph.nodes)} calls, saves {graphs.saved_bytes:,} bytes"
    paths = [f"{s.kind} {s.path}" for s in program.sources]
    yield from _nodes(graphs.forward.graph.nodes, program, axes, paths)
    where = {n.name: n for n in graphs.forward.graph.nodes}
    for name, size_bytes in sorted(graphs.saved.items(), key=lambda item: -item[1]):
        known = record(where[name])
        yield f"  saves %{name}: {size_bytes:,} bytes  # {known.block}, {known.op.rpartition('/')[0] or known.op}"


def _backward(graphs: Graphs, program: Program, axes: Sequence[str]) -> Iterator[str]:
    yield f"backward of {program.name}: {_calls(graphs.backward.graph.nodes)} calls"
    yield from _nodes(graphs.backward.graph.nodes, program, axes, ())
    results = next(iter(reversed(graphs.backward.graph.nodes))).args[0]
    assert isinstance(results, tuple)
    for source, grad in zip(program.sources, results, strict=False):
        if isinstance(grad, Node):
            yield f"  gradient of {source.path}: %{grad.name}"


def _calls(nodes: Iterator[Node]) -> int:
    return sum(n.op == "call_function" for n in nodes)


def _nodes(nodes: Iterator[Node], program: Program, axes: Sequence[str], paths: Sequence[str]) -> Iterator[str]:
    known_layout = of_user_value(program)
    names, block = iter(paths), ""
    for node in nodes:
        known = record(node)
        if node.op == "output":
            continue
        if node.op == "placeholder":
            tangent = "gradient of an output" if "tangents" in node.name else "saved"
            yield node_text(node, next(names, tangent))
            continue
        if known.block != block:
            block = known.block
            yield f"block {block or 'of no op'}:"
        late, shown = is_late(node), known_layout(node)
        again = "made again" if not late and not paths else ""
        yield node_text(node, call_text(node), layout_text(known, axes) if shown else "", again)


def of_user_value(program: Program) -> Callable[[Node], bool]:
    """Is a node's layout that of the node itself? Steps inside the user's op, and gradients, only inherit one."""
    made = {(record(n).op, record(n).layout, _shape(n)) for n in program.graph.nodes}
    return lambda node: not is_late(node) and (record(node).op, record(node).layout, _shape(node)) in made


def is_late(node: Node) -> bool:
    """Does this node belong to the backward by itself, not as something made again?"""
    return node.meta.get("partitioner_tag") == "is_backward"


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))
