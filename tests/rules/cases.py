"""What a proof of one op looks like as data: a small function that calls it and the tensors it is called with.

`CASES` of each test file maps op names to such cases; test_table.py holds that every op of the rule table has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.rules.prove import Proof, prove


@dataclass(frozen=True)
class Case:
    fn: Callable
    tensors: tuple[torch.Tensor, ...]


def case(fn: Callable, *tensors: torch.Tensor) -> tuple[Case, ...]:
    return (Case(fn, tensors),)


def real(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """A float64 tensor without ties or zeros."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 7))
    return x.requires_grad_(grad)


def whole_numbers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Integers in [0, high)."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed + 11))


def prove_op(op: str, case: Case, mesh: str) -> Proof:
    """Prove a case, and that it is a proof of `op`: one of its strategies cuts a factor of a call of that op."""
    proof = prove(case.fn, *case.tensors, mesh=mesh, split=False)
    assert op in proof.ops, f"no strategy cuts {op} on {mesh}; cut: {sorted(proof.ops)}"
    return proof
