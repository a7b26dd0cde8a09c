"""Micro-batches as an axis: the programs of all micro-batches, joined, are the whole one; what needs the whole batch is
refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autopar.cost.hardware import load_profile
from autopar.dump import program_text
from autopar.errors import PlanError
from autopar.layout import I, P, R, S
from autopar.mesh import Mesh, factor_axes
from autopar.passes.microbatch import AXIS, Divided, Microbatch, divide, with_microbatches
from autopar.passes.normalize import Normalize
from autopar.passes.shard import Shard
from autopar.pins import Pins
from autopar.program import Program
from autopar.rules.analyse import Analysis, analyse
from autopar.rules.decisions import Decisions
from autopar.rules.strategy import named
from autopar.solver.roles import Roles
from tests.golden_files import check_golden
from tests.rules.prove import program_of

ONE = factor_axes(Mesh("1"), {})
CPU = load_profile("cpu")


def made(fn: Callable, tensors: tuple[torch.Tensor, ...], count: int) -> tuple[Analysis, Divided, list[Program]]:
    """The program of each micro-batch, on one device."""
    program = Normalize().run(program_of(fn, tensors))
    analysis = analyse(program)
    strategies = {n: named(op.rule, op.factors, (), op.in_grads, op.out_grads) for n, op in analysis.ops.items()}
    batch = Roles(analysis, ONE, Pins(), {}).batch
    divided = divide(analysis, Decisions(strategies, {}), ONE, batch, count)  # type: ignore[arg-type]
    mesh = with_microbatches(ONE, count)
    locals_ = [Shard(analysis, divided.decisions, mesh, CPU, (k,)).run(program) for k in range(count)]
    return analysis, divided, [Microbatch(count, k).run(p) for k, p in enumerate(locals_)]


def summed(fn: Callable, tensors: tuple[torch.Tensor, ...], count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A scalar over all micro-batches, and the gradients of its parameters."""
    _, divided, programs = made(fn, tensors, count)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    assert divided.sinks == {0: P}
    values = [torch.fx.GraphModule(torch.nn.Module(), p.graph)(*leaves)[0] for p in programs]
    total = torch.stack(values).sum()
    for value in values:
        value.backward()
    return total.detach(), [t.grad for t in leaves if t.requires_grad]  # type: ignore[misc]


def expected(fn: Callable, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    value = fn(*leaves)
    value.backward()
    return value.detach(), [t.grad for t in leaves if t.requires_grad]  # type: ignore[misc]


def random(*shape: int, grad: bool = False, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def tokens(ids: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((table[ids] @ table.T).flatten(0, 1), labels.flatten())


def language() -> tuple[torch.Tensor, ...]:
    labels = torch.arange(24).reshape(6, 4) % 5
    labels[3:] = -100
    labels[4, 0] = 1
    return torch.arange(24).reshape(6, 4) % 5, random(5, 8, grad=True), labels


def weighted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A mean, and a term that depends on the weights alone."""
    return (x @ w).square().mean() + 0.1 * w.square().sum()


CASES = {"tokens": (tokens, language()), "weighted": (weighted, (random(6, 4), random(4, 3, grad=True)))}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_sum_over_micro_batches_is_the_whole(name: str, count: int) -> None:
    fn, tensors = CASES[name]
    if count == 4 and name == "tokens":
        count = 5 - 2  # 6 rows in 4 micro-batches leave the last one empty
    elif count == 4:
        count = 3
    torch.testing.assert_close(summed(fn, tensors, count), expected(fn, tensors), rtol=1e-12, atol=1e-12)


def test_an_uneven_last_micro_batch() -> None:
    tensors = tuple(t[:5] if i != 1 else t for i, t in enumerate(language()))
    tensors = (tensors[0], language()[1], tensors[2])
    torch.testing.assert_close(summed(tokens, tensors, 3), expected(tokens, tensors), rtol=1e-12, atol=1e-12)


def test_golden(request: pytest.FixtureRequest) -> None:
    _, _, programs = made(tokens, language(), 2)
    check_golden(request, "microbatch_tokens", program_text(programs[1], ()))


def test_the_count_of_a_mean_is_that_of_the_whole_batch() -> None:
    analysis, divided, _ = made(tokens, language(), 3)
    count = next(n for n in analysis.ops if n.startswith("sum"))
    assert divided.decisions.strategies[count].outs[0] == (I,)
    rows = next(n for n in analysis.ops if n.startswith("index") or n.startswith("embedding"))
    assert divided.decisions.strategies[rows].outs[0][0].kind == "S"


def test_parameters_alone_are_replicated_and_their_gradient_counts_once() -> None:
    analysis, divided, _ = made(weighted, CASES["weighted"][1], 2)
    square = [n for n, op in analysis.ops.items() if op.ins and op.ins[0] == analysis.program.placeholders[1].name]
    assert any(divided.decisions.strategies[n].outs[0] == (R,) for n in square)


def test_a_table_of_the_batchs_size_is_not_cut() -> None:
    def looked_up(x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w) @ table.T).square().sum()

    tensors = (random(6, 4), random(6, 3, seed=1), random(4, 3, grad=True))
    analysis, divided, _ = made(looked_up, tensors, 3)
    product = list(analysis.ops)[-3]
    assert [p for p in divided.decisions.strategies[product].ins] == [(S(0),), (I,)]
    torch.testing.assert_close(summed(looked_up, tensors, 3), expected(looked_up, tensors))


REFUSED = {
    "statistics": lambda x, w: ((x @ w) / (x @ w).std(0)).sum(),
    "product of means": lambda x, w: (x @ w).mean() * (x * 2 @ w).mean(),
    "batch norm": lambda x, w: F.batch_norm(x @ w, None, None, training=True).square().sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_batch_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"needs the whole batch.*pin microbatches to 1"):
        made(REFUSED[name], (random(6, 4), random(4, 3, grad=True)), 2)


def test_an_empty_micro_batch_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"a batch of 6 in 4 micro-batches of 2 leaves .* pin microbatches to 3"):
        made(*CASES["weighted"], 4)


def test_no_move_between_micro_batches_is_left() -> None:
    for fn, tensors in CASES.values():
        for program in made(fn, tensors, 2)[2]:
            assert not [n for n in program.graph.nodes if AXIS in n.args]
