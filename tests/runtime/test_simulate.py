"""Ranks in one process: every row of the table moves values and gradients as its layouts say."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx import Graph

from autopar.layout import TRANSITIONS, whole
from autopar.mesh import Mesh, factor_axes
from autopar.runtime.moves import move
from autopar.runtime.simulate import run_ranks, transfer_all
from autopar.runtime.transfer import gradient_of

RANKS = 3
FULL = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)


def shards(kind: str, full: torch.Tensor = FULL) -> list[torch.Tensor]:
    """A tensor as it lies under a placement on three ranks; P in unequal parts."""
    if kind[0] == "S":
        pieces = list(full.split(-(-full.shape[int(kind[1])] // RANKS), int(kind[1])))
        return pieces + [pieces[0].narrow(int(kind[1]), 0, 0)] * (RANKS - len(pieces))
    if kind == "P":
        return [full * 0.5, full * 2, full * -1.5]
    return [full.clone() for _ in range(RANKS)]


def whole_of(kind: str, xs: list[torch.Tensor]) -> torch.Tensor:
    """The full tensor that the ranks hold; copies must agree."""
    if kind[0] == "S":
        return torch.cat(xs, int(kind[1]))
    if kind == "P":
        return torch.stack(xs).sum(0)
    assert all(torch.equal(x, xs[0]) for x in xs)
    return xs[0]


def placements(kind: str) -> list[str]:
    return ["S0", "S1"] if kind == "S" else [kind]


MOVES = [
    (a, b) for kinds in TRANSITIONS for a, b in itertools.product(*map(placements, kinds)) if a != b
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_move_keeps_the_whole_value(source: str, target: str) -> None:
    moved = transfer_all(shards(source), source, target, whole(FULL.shape).dims)
    assert torch.equal(whole_of(target, moved), FULL)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_backward_of_a_move_is_the_move_of_gradients(source: str, target: str) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(move, (x, "x0", source, target, whole(FULL.shape).dims)),))
    leaves = [s.clone().requires_grad_() for s in shards(source)]
    mesh = factor_axes(Mesh(str(RANKS)), {})
    outs = run_ranks([graph] * RANKS, [[x] for x in leaves], mesh)
    seeds = shards(gradient_of(target))
    torch.autograd.backward([out[0] for out in outs], seeds)
    assert torch.equal(whole_of(gradient_of(source), [x.grad for x in leaves]), FULL)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_sums_keep_their_type(dtype: torch.dtype) -> None:
    full = (FULL % 2).to(dtype)
    parts = [full, torch.zeros_like(full), torch.zeros_like(full)]
    for target in ("I", "S0"):
        moved = transfer_all(parts, "P", target, whole(full.shape).dims)
        assert all(x.dtype == dtype for x in moved)
        assert torch.equal(whole_of(target, moved), full)


def test_a_gradient_that_comes_back_on_some_ranks_only_is_an_error() -> None:
    """Real ranks would wait for ever for the rank that has nothing to send."""

    def passed(x: torch.Tensor, differentiable: bool) -> torch.Tensor:
        return x * 1.0 if differentiable else x.detach()

    graphs = []
    for rank in range(RANKS):
        graph = Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        moved = graph.call_function(move, (x, "x0", "P", "R"))
        kept = graph.call_function(passed, (moved, rank != 2))
        graph.output((graph.call_function(torch.mul, (kept, y)),))
        graphs.append(graph)
    leaves = [[x.clone().requires_grad_(), FULL.clone().requires_grad_()] for x in shards("P")]
    outs = run_ranks(graphs, leaves, factor_axes(Mesh(str(RANKS)), {}))
    with pytest.raises(RuntimeError, match=r"P -> R on ranks \[2\]"):
        torch.autograd.backward([out[0] for out in outs], shards("I"))
