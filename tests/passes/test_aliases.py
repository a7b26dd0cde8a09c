"""Gradients have memory of their own: `.grad` takes one over, and the next one is added to it in place."""

import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import autopar
from autopar.passes.aliases import is_view, own_gradients, shares

aten = torch.ops.aten


def test_what_shows_the_memory_of_others() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    part, parts = graph.call_function(aten.slice.Tensor, (x, 0, 0, 1)), graph.call_function(aten.split.Tensor, (x, 1))
    first = graph.call_function(operator.getitem, (parts, 0))
    total = graph.call_function(aten.add.Tensor, (x, x))
    assert [is_view(n) for n in (part, first, total)] == [True, False, False]
    assert [shares(n) for n in (part, first, total)] == [True, True, False]


def test_a_gradient_that_shows_another_one_or_an_operand_is_copied() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.mul.Tensor, (x, 2.0))
    part = graph.call_function(aten.slice.Tensor, (made, 0, 0, 1))
    other = graph.call_function(aten.add.Tensor, (x, x))
    graph.output((made, part, other, None, x, made))
    run = own_gradients(GraphModule(nn.Module(), graph))
    x_value = torch.ones(3)
    found = run(x_value)
    assert [None if f is None else f.tolist() for f in found] == [[2, 2, 2], [2], [2, 2, 2], None, [1, 1, 1], [2, 2, 2]]
    held = [x_value, *(f for f in found if f is not None)]
    assert len({f.untyped_storage().data_ptr() for f in held}) == len(held)
    assert sum(n.target is aten.clone.default for n in run.graph.nodes) == 3


class Token(nn.Module):
    """A class token before the patches and positions on both, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.out(torch.tanh(y)).square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_gradients_that_are_added_up_do_not_share_memory(backend: str) -> None:
    """Of one row, the gradient of the token is a part of that of the positions, and `.grad` is added to in place."""
    torch.manual_seed(0)
    model, x = Token().double(), torch.randn(3, 4, 8, dtype=torch.float64)
    one = Token().double()
    one.load_state_dict(model.state_dict())
    m = autopar.parallelize(model, autopar.Mesh("1", device="cpu"), example_args=(x[:1],), backend=backend)
    for row in x.split(1):
        m(row).backward()
        one(row).backward()
    for (name, mine), (_, theirs) in zip(m.named_parameters(), one.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)
