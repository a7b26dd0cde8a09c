"""A backward graph in two halves gives the gradients of the whole, and the first half leaves the weights alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from autopar.passes.lower import Graphs, Partition, boxed, lower_to_graphs
from autopar.passes.split_backward import SplitBackward
from autopar.runtime.backward_split import Later, inputs_only, splittable
from tests.golden_files import check_golden

WEIGHTS = (1, 2)


def mlp(x: torch.Tensor, w0: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(F.linear(x, w0)), w1)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (8, 6), (6, 8)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def lowered(made: list[GraphModule] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of the lowered function, whose backward can be split, and its inputs."""

    def late(backward: GraphModule) -> object:
        first, second, shape = SplitBackward(WEIGHTS).run(backward)
        if made is not None:
            made.extend([backward, first, second])
        return splittable(boxed(backward), boxed(first), boxed(second), shape)

    def told(graphs: Graphs) -> None:
        return None

    inputs = tensors()
    run = lower_to_graphs(mlp, Partition(frozenset(WEIGHTS)), (), told, False, late)  # type: ignore[arg-type]
    return run(*inputs), inputs


def expected() -> list[torch.Tensor]:
    inputs = tensors()
    mlp(*inputs).square().sum().backward()
    return [t.grad for t in inputs]  # type: ignore[misc]


def test_both_halves_give_all_gradients() -> None:
    out, inputs = lowered()
    with inputs_only() as later:
        (first,) = torch.autograd.grad(out.square().sum(), inputs[:1])
    rest = later[0].gradients()
    assert not any(g.requires_grad for g in rest.values()), "a gradient that holds its graph"
    torch.testing.assert_close([first, rest[1], rest[2]], expected(), rtol=1e-12, atol=1e-12)
    assert later[0].held == []


def test_outside_the_backward_is_whole() -> None:
    out, inputs = lowered()
    out.square().sum().backward()
    torch.testing.assert_close([t.grad for t in inputs], expected(), rtol=1e-12, atol=1e-12)


def test_nothing_is_computed_twice_and_the_first_half_has_no_weight_gradient(request: pytest.FixtureRequest) -> None:
    made: list[GraphModule] = []
    out, _ = lowered(made)
    out.sum().backward()
    whole, first, second = ([n for n in m.graph.nodes if n.op == "call_function"] for m in made)
    products = [sum("mm" in str(n.target) for n in part) for part in (whole, first, second)]
    assert products[0] == products[1] + products[2]
    assert products[2] == 2
    text = "\n".join(f"{name}: {_text(m)}" for name, m in zip(("whole", "first", "second"), made, strict=True))
    check_golden(request, "split_backward_mlp", text + "\n")


def _text(module: GraphModule) -> str:
    lines = []
    for node in module.graph.nodes:
        shown = ", ".join(f"%{a.name}" for a in node.all_input_nodes)
        lines.append(f"{node.op} {node.name} {getattr(node.target, '__name__', node.target)} ({shown})")
    return "\n  ".join(["", *lines])


def test_a_gradient_that_is_an_input_of_the_graph() -> None:
    graph = torch.fx.Graph()
    tangent = graph.placeholder("tangents_1")
    graph.output((graph.call_function(torch.neg, (tangent,)), tangent, None))
    first, second, shape = SplitBackward((1,)).run(GraphModule(torch.nn.Module(), graph))
    assert (shape.outputs, shape.inputs, shape.weights, shape.kept) == (3, (0,), (1,), (0,))
    assert next(n.name for n in second.graph.nodes) == "tangents_1"
    assert isinstance(Later(boxed(second), [torch.ones(2)], (1,)).gradients()[1], torch.Tensor)
    assert len(list(first.graph.nodes)) == 3
