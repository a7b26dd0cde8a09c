"""Prove a rule by running it: every strategy of every op, on simulated ranks, against the whole function.

`prove(fn, *tensors, mesh="2")` captures `fn`, gives one op after another each of its strategies (its neighbours get
whatever transitions that needs), runs all ranks in step and compares outputs and input gradients with the plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.capture.functions import keep_functions
from autopar.cost.hardware import load_profile
from autopar.layout import I, shard_of
from autopar.mesh import LogicalMesh, Mesh, factor_axes
from autopar.passes.normalize import Normalize
from autopar.passes.shard import Shard
from autopar.program import Program, Record, Sink, Source, set_record
from autopar.rules.analyse import Analysis, analyse
from autopar.rules.call import Call
from autopar.rules.decisions import Decisions
from autopar.rules.pointwise import packet
from autopar.rules.strategy import Strategy, strategies
from autopar.runtime.simulate import run_ranks

CPU = load_profile("cpu")


class _Function(nn.Module):
    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: torch.Tensor) -> object:
        return self.fn(*args)


def program_of(fn: Callable, tensors: tuple[torch.Tensor, ...]) -> Program:
    """A function of tensors as a Program whose differentiable inputs are parameters."""
    examples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
    with keep_functions():
        exported = torch.export.export(_Function(fn), examples, strict=False)
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert_tensor_metadata" in str(node.target):
            graph.erase_node(node)
    places = [n for n in graph.nodes if n.op == "placeholder"]
    lifted = dict(exported.graph_signature.inputs_to_lifted_tensor_constants)
    assert not lifted, f"constants {lifted} in a function to prove"
    sources = tuple(
        Source(n.name, "parameter" if t.requires_grad else "input", n.name, trainable=t.requires_grad)
        for n, t in zip(places, tensors, strict=True)
    )
    for node in graph.nodes:
        set_record(node, Record(op=node.name, block="all"))
    outputs = pytree.tree_leaves(next(iter(reversed(graph.nodes))).args[0])
    spec = pytree.tree_flatten(())[1]
    program = Program(graph, sources, tuple(Sink("user") for _ in outputs), {}, {}, spec, (), (), spec, ())
    return Normalize().run(program)


def run_simulated(
    analysis: Analysis, decisions: Decisions, mesh: LogicalMesh, tensors: tuple[torch.Tensor, ...]
) -> tuple[list, list]:
    """(outputs on rank 0, gradients of the inputs) of the program on simulated ranks; checks that outputs agree on all
    ranks.
    """
    program = analysis.program
    leaves: list[list[torch.Tensor]] = []
    graphs = []
    names = [n.name for n in program.placeholders]
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        graphs.append(Shard(analysis, decisions, mesh, CPU, at).run(program).graph)
        mine = []
        for name, tensor in zip(names, tensors, strict=True):
            layout = decisions.sources.get(name, (I,) * len(mesh.axes))
            part = shard_of(tensor.detach(), analysis.parts[name], layout, mesh.sizes, at)
            mine.append(part.clone().requires_grad_(tensor.requires_grad))
        leaves.append(mine)
    results = run_ranks(graphs, leaves, mesh)
    differentiable = [i for i, out in enumerate(results[0]) if isinstance(out, torch.Tensor) and out.requires_grad]
    for rank in range(1, mesh.size):
        for a, b in zip(results[0], results[rank], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
    roots = [results[r][i] for r in range(mesh.size) for i in differentiable]
    seeds = [seed_of(results[r][i]) for r in range(mesh.size) for i in differentiable]
    if roots:
        torch.autograd.backward(roots, seeds)
    grads: list[torch.Tensor | None] = []
    for position, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        layout = decisions.sources.get(name, (I,) * len(mesh.axes))
        per_rank = [leaves[r][position].grad for r in range(mesh.size)]
        if not tensor.requires_grad or all(g is None for g in per_rank):
            grads.append(None)
            continue
        full = torch.zeros_like(tensor)
        for rank, grad in enumerate(per_rank):
            at = mesh.coordinate(rank)
            index = torch.arange(tensor.numel()).reshape(tensor.shape)
            where = shard_of(index, analysis.parts[name], layout, mesh.sizes, at).reshape(-1)
            flat = full.reshape(-1)
            assert grad is not None
            flat[where] = grad.reshape(-1)
        for rank, grad in enumerate(per_rank):  # copies must agree
            expected = shard_of(full, analysis.parts[name], layout, mesh.sizes, mesh.coordinate(rank))
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
        grads.append(full)
    return list(results[0]), grads


def seed_of(out: torch.Tensor) -> torch.Tensor:
    """A gradient that differs from element to element, the same on every rank."""
    return torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)


def whole_result(fn: Callable, tensors: tuple[torch.Tensor, ...]) -> tuple[list, list]:
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    outs = pytree.tree_leaves(fn(*leaves))
    roots = [o for o in outs if isinstance(o, torch.Tensor) and o.requires_grad]
    if roots:
        torch.autograd.backward(roots, [seed_of(o) for o in roots])
    return outs, [leaf.grad for leaf in leaves]


@dataclass
class Proof:
    """What was run."""

    strategies: int = 0
    split: int = 0
    factors: set[str] = field(default_factory=set)
    ops: set[str] = field(default_factory=set)
    """Names of the ops of which a factor was cut."""


def op_strategies(analysis: Analysis, mesh: LogicalMesh) -> dict[str, list[Strategy]]:
    return {
        name: strategies(op.rule, op.factors, mesh.sizes, in_grads=op.in_grads, out_grads=op.out_grads)
        for name, op in analysis.ops.items()
    }


def assignments(choices: dict[str, list[Strategy]]) -> Iterator[dict[str, Strategy]]:
    """Each op takes each of its strategies once while the others stay whole; then all ops move on together."""
    first = {name: options[0] for name, options in choices.items()}
    for name, options in choices.items():
        for strategy in options:
            yield {**first, name: strategy}
    for k in range(max(map(len, choices.values())) if len(choices) > 1 else 0):
        yield {name: options[k % len(options)] for name, options in choices.items()}


def prove(
    fn: Callable, *tensors: torch.Tensor, mesh: str | tuple[int, ...] = "2", split: bool = True, tolerance: float = 1e-9
) -> Proof:
    """Run every strategy; raise on the first that differs. split: at least one factor must have been cut."""
    analysis = analyse(program_of(fn, tensors))
    logical = factor_axes(Mesh(mesh), {})
    expected_outs, expected_grads = whole_result(fn, tensors)
    proof = Proof()
    choices = op_strategies(analysis, logical)
    for assigned in assignments(choices):
        decisions = Decisions(assigned, {})
        label = {name: s.options for name, s in assigned.items() if set(s.options) != {"I"}}
        try:
            outs, grads = run_simulated(analysis, decisions, logical, tensors)
            for a, b in zip(outs, expected_outs, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
            for name, a, b in zip([n.name for n in analysis.program.placeholders], grads, expected_grads, strict=True):
                assert (a is None) == (b is None) or not (a if a is not None else b).any(), f"gradient of {name}"
                if a is not None and b is not None:
                    torch.testing.assert_close(
                        a,
                        b,
                        rtol=tolerance,
                        atol=tolerance,
                        equal_nan=True,
                        msg=lambda m, name=name: f"gradient of {name}: {m}",
                    )
        except Exception as error:
            raise AssertionError(f"{label} on mesh {mesh}: {error}") from error
        proof.strategies += 1
        cut = {f"{name}:{o}" for name, s in assigned.items() for o in s.options if o in analysis.ops[name].by_name}
        proof.split += bool(cut)
        proof.factors |= cut
        proof.ops |= {packet(Call(analysis.ops[c.partition(":")[0]].node)) for c in cut}
    assert proof.split or not split, "no strategy cuts a factor: the rule proves nothing"
    return proof


def op_node(analysis: Analysis, packet: str) -> Node:
    return next(op.node for op in analysis.ops.values() if packet in str(op.node.target))
