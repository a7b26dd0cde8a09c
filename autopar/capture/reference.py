"""Run a captured program on one device, op by op: what every rewritten program is compared with.

Enters: a program, its state, the leaves of `(args, kwargs)`. Leaves: the outputs and the new buffers, differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.program import OutputRef, Program


def run_program(
    program: Program, state: Mapping[str, Tensor], flat_inputs: Sequence[Any]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Evaluate the graph.

    Args:    state: parameters, buffers and constants as in `program.state`. flat_inputs: all leaves of `(args, kwargs)`
             in the order of `program.in_spec`; leaves that are no tensors are ignored.
    Returns: the flat user outputs, values that are no tensors included, and {buffer: its new value}.
    """
    tensors = iter([leaf for leaf, is_tensor in zip(flat_inputs, program.in_tensors, strict=True) if is_tensor])
    values: dict[Node, Any] = {}
    for node, source in zip(program.placeholders, program.sources, strict=True):
        values[node] = next(tensors) if source.kind == "input" else state[source.path]
    for node in program.calls:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    results = [values[n] for n in program.output.args[0]]
    outputs = [results[v.index] if isinstance(v, OutputRef) else v for v in program.out_values]
    buffers = {s.path: r for s, r in zip(program.sinks, results, strict=True) if s.kind == "state"}
    return outputs, buffers


def call_program(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Mapping[str, Tensor] | None = None
) -> Any:
    """Like `model(*args, **kwargs)`, with the program's own state unless another is given; buffers are not updated."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if spec != program.in_spec:
        raise TypeError(f"inputs {spec} are not those of the capture, {program.in_spec}")
    outputs, _ = run_program(program, program.state if state is None else state, leaves)
    return pytree.tree_unflatten(outputs, program.out_spec)
