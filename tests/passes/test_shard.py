"""The shard pass: what it inserts, what it shares, what it makes local. That its programs are right is proved by
running.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autopar.cost.hardware import load_profile
from autopar.dump import program_text
from autopar.mesh import LogicalMesh, Mesh, factor_axes
from autopar.passes.shard import Shard
from autopar.program import Program
from autopar.rules.analyse import Analysis, analyse
from autopar.rules.decisions import Decisions
from autopar.rules.strategy import Strategy, named
from autopar.runtime.moves import move
from tests.golden_files import check_golden
from tests.rules.prove import program_of, run_simulated, whole_result

CPU = load_profile("cpu")
Made = tuple[Analysis, Decisions, Program]
MESH = factor_axes(Mesh("4"), {"tp": 2, "dp": 2})


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(F.linear(x, up)), down) + x


def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (8, 6), (6, 8)]
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)


def chosen(analysis: Analysis, options: dict[str, tuple[str, ...]]) -> dict[str, Strategy]:
    """Strategies by op name; ops that are not named stay whole."""
    out = {}
    for name, op in analysis.ops.items():
        strategy = named(op.rule, op.factors, options.get(name, ("I", "I")), op.in_grads, op.out_grads)
        assert strategy is not None, f"{name} has no {options.get(name)}; it has {list(op.by_name)}"
        out[name] = strategy
    return out


MEGATRON = {"linear": ("o", "e0"), "relu": ("e1", "e0"), "linear_1": ("i", "e0"), "add": ("I", "e0")}


def sharded(
    mesh: LogicalMesh, options: dict[str, tuple[str, ...]], rank: int = 0
) -> tuple[Analysis, Decisions, Program]:
    analysis = analyse(program_of(mlp, tensors()))
    decisions = Decisions(chosen(analysis, options), {})
    local = Shard(analysis, decisions, mesh, CPU, mesh.coordinate(rank)).run(analysis.program)
    return analysis, decisions, local


def test_golden_column_then_row(request: pytest.FixtureRequest) -> None:
    _, _, local = sharded(MESH, MEGATRON)
    check_golden(request, "shard_column_row", program_text(local, ("tp", "dp")))


def test_column_then_row_pays_one_reduction_each_way() -> None:
    _, _, local = sharded(MESH, MEGATRON)
    moves = [n.args[1:4] for n in local.graph.nodes if n.target is move]
    assert moves.count(("tp", "P", "I")) == 1  # forward, after the row-parallel product
    assert moves.count(("tp", "I", "R")) == 1  # backward, before the column-parallel one


def test_the_numbers_are_those_of_one_device() -> None:
    analysis, decisions, _ = sharded(MESH, MEGATRON)
    outs, grads = run_simulated(analysis, decisions, MESH, tensors())
    expected_outs, expected_grads = whole_result(mlp, tensors())
    torch.testing.assert_close(outs, expected_outs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)


def test_a_value_read_twice_in_one_layout_is_moved_once() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        return F.relu(y) + torch.tanh(y)

    mesh = factor_axes(Mesh("2"), {})
    analysis = analyse(program_of(twice, tensors()[:2]))
    decisions = Decisions(
        {
            n: named(op.rule, op.factors, ("i",) if n == "linear" else ("I",), op.in_grads, op.out_grads)
            for n, op in analysis.ops.items()
        },  # type: ignore[arg-type]
        {},
    )
    local = Shard(analysis, decisions, mesh, CPU, (0,)).run(analysis.program)
    assert sum(n.target is move and n.args[2:4] == ("P", "I") for n in local.graph.nodes) == 1


def test_sizes_are_local_and_ranks_run_the_same_nodes() -> None:
    def heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).view(4, 4, 2) * 1.5

    mesh = factor_axes(Mesh("3"), {})
    analysis = analyse(program_of(heads, tensors()[:2]))
    options = {"linear": ("o.0",), "view": ("f1",), "mul": ("e1",)}
    strategies = {
        n: named(op.rule, op.factors, options[n], op.in_grads, op.out_grads) for n, op in analysis.ops.items()
    }
    locals_ = [Shard(analysis, Decisions(strategies, {}), mesh, CPU, (r,)).run(analysis.program) for r in range(3)]  # type: ignore[arg-type]
    shapes = [next(n.args[1] for n in p.graph.nodes if "reshape" in str(n.target)) for p in locals_]
    assert shapes == [[4, 2, 2], [4, 2, 2], [4, 0, 2]]  # 4 heads over 3 ranks: 2, 2 and none
    assert len({tuple((n.op, str(n.target)) for n in p.graph.nodes) for p in locals_}) == 1


def test_refuses_the_analysis_of_another_program() -> None:
    analysis, decisions, local = sharded(MESH, MEGATRON)
    with pytest.raises(AssertionError, match="another program"):
        Shard(analysis, decisions, MESH, CPU, (0, 0)).run(local)
