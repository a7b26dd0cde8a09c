"""Bytes that the fused graphs of a step move, beside Inductor's: `python -m tests.bench.step_bytes`.

A kernel, ours or a library's, counts each of its inputs and each of its outputs once (a gather what it gathers);
Inductor's figure is its own, for the same graphs after its passes, from its scheduler after fusion. Nothing is run.
Embeddings take no gradient here: Inductor adds theirs up in float32, which is another choice and not fusion.
Writes tests/bench/step_bytes.md.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.codegen.cluster import clusters
from autopar.codegen.views import SPLITS, packet, view_of
from tests.bench.kernels import CASES, lowered


def ours_bytes(module: GraphModule) -> int:
    """Of all groups, and of the ops that are in none."""
    groups = clusters(module.graph)
    inside = {n for g in groups for n in g.members}
    single = [n for n in module.graph.nodes if n.op == "call_function" and n not in inside and not _free(n)]
    return sum(g.bytes for g in groups) + sum(map(_op_bytes, single))


def _free(node: Node) -> bool:
    return view_of(node) is not None or packet(node) in SPLITS or node.target is operator.getitem


def _op_bytes(node: Node) -> int:
    reads = node.all_input_nodes
    if packet(node) == "nll_loss_forward":  # it gathers a number for each row
        reads = reads[1:]
    return _bytes(node) + sum(map(_bytes, reads))


def _bytes(node: Node) -> int:
    return sum(
        v.numel() * v.element_size()
        for v in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        if hasattr(v, "numel")
    )


def inductor_bytes(module: GraphModule) -> int:
    """By Inductor's own count."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with inputs[0].fake_mode as mode:
        made = make_fx(lambda *a: module(*a), decomposition_table=select_decomp_table())(*inputs)
        with V.set_fake_mode(mode):
            made = joint_graph_passes(made) or made
            post_grad_passes(made, False)
        made.graph.eliminate_dead_code()
        made.recompile()
        graph = GraphLowering(made, example_inputs=inputs)
        with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            graph._update_scheduler()
            return graph.count_bytes()[0]


def table() -> Iterator[str]:
    yield "# Bytes of a step"
    yield ""
    yield f"Made by `python -m tests.bench.step_bytes`, torch {torch.__version__}. Two layers of each model, real"
    yield "width, embeddings frozen (Inductor adds their gradients up in float32). Inputs and outputs of a kernel count"
    yield "once; Inductor's figure is its own count for the same graph on a CPU. Not measured: a library softmax"
    yield "over a whole vocabulary reads its input more than once."
    yield ""
    yield "| model | dtype | batch x sequence | graph | ours, GB | Inductor, GB | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for name, dtype, batch, seq in CASES:
        graphs = lowered(name, dtype, batch, seq, freeze="embed")
        for which in ("forward", "backward"):
            ours, theirs = (count(getattr(graphs, which)) for count in (ours_bytes, inductor_bytes))
            what = f"{name} | {str(dtype).removeprefix('torch.')} | {batch} x {seq} | {which}"
            yield f"| {what} | {ours / 1e9:.3f} | {theirs / 1e9:.3f} | {ours / theirs:.2f} |"


CHUNKED = (1, 8)


def chunked() -> Iterator[str]:
    """What chunks of the loss save, and what they cost."""
    yield "\n## Logits in chunks\n"
    yield "`saved`: by the forward for the backward. `largest`: of one value in either graph, before ops are joined."
    yield "`moved`: by both; the gradient of a half-precision head is added up in float32, once a chunk.\n"
    yield "| model | dtype | batch x sequence | chunks | saved, GB | largest, GB | moved, GB |"
    yield "|---|---|---|---|---|---|---|"
    for name, dtype, batch, seq in (CASES[0], CASES[2]):
        for chunks in CHUNKED:
            graphs = lowered(name, dtype, batch, seq, freeze="embed", chunks=chunks)
            both = (graphs.forward, graphs.backward)
            largest = max(_bytes(n) for m in both for n in m.graph.nodes if n.op == "call_function" and not _free(n))
            figures = graphs.saved_bytes, largest, sum(map(ours_bytes, both))
            what = f"{name} | {str(dtype).removeprefix('torch.')} | {batch} x {seq} | {chunks}"
            yield f"| {what} | {' | '.join(f'{f / 1e9:.3f}' for f in figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    text = "\n".join((*table(), *chunked())) + "\n"
    print(text)
    given.out.write_text(text)


if __name__ == "__main__":
    main()
