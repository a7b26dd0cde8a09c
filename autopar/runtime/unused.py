"""Which gradients a backward leaves out: a parameter that only unused results depend on gets none, as under autograd.

AOTAutograd fills in zeros for the results that a loss does not read, and every input gets a gradient. An optimizer
takes a zero for a gradient: it decays the weight, and its moments.

Enters: the joint graph; then the results of a call. Leaves: for each input the incoming gradients that its own is made
of, as bits; a hook on the results' node of the autograd graph. Refused: nothing; where results are made outside that
node (a view of an input), zeros stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node


def gradients_read(joint: Graph, results: int) -> tuple[int, ...]:
    """For each input: bit k stands for the k-th gradient that comes in. results: how many outputs are the forward's."""
    bits: dict[Node, int] = {}
    incoming = 0
    for node in joint.nodes:
        if node.op == "placeholder" and "tangents" in str(node.target):
            bits[node], incoming = 1 << incoming, incoming + 1
        else:
            bits[node] = 0
            for read in node.all_input_nodes:
                bits[node] |= bits[read]
    gradients = next(iter(reversed(joint.nodes))).args[0][results:]
    return tuple(bits[g] if isinstance(g, Node) else 0 for g in gradients)


def leave_unused(results: Sequence[Any], read: Sequence[int]) -> None:
    """Let the backward of these results give no gradient to an input that none of those it is called for depends on."""
    differentiable = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    makers = {r.grad_fn for r in differentiable}
    places = sorted(r.output_nr for r in differentiable)
    every = (1 << len(places)) - 1
    if len(places) < 2 or len(makers) > 1 or max(read, default=0) > every:
        return

    def without(gradients: tuple[Any, ...], incoming: tuple[Any, ...]) -> tuple[Any, ...] | None:
        given = sum(1 << k for k, place in enumerate(places) if incoming[place] is not None)
        if given == every or len(gradients) != len(read):
            return None
        return tuple(g if bits & given else None for g, bits in zip(gradients, read, strict=True))

    (maker,) = makers
    assert maker is not None
    maker.register_hook(without)
