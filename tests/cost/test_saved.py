"""cost/saved.py: what the planner charges for activations is what the lowered forward keeps."""

import pytest
import torch
import torch.nn.functional as F

from autopar.cost.saved import saved_values
from autopar.rules.analyse import analyse
from tests.bench.saved_bytes import LEVELS, measure
from tests.rules.prove import program_of


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_predicted_is_real(model):
    """Within 10 % for each level of recomputation, and each level keeps clearly less."""
    rows = measure(model, "tiny")
    assert [row.level for row in rows] == list(LEVELS)
    for row in rows:
        assert abs(row.error) < 0.1, f"{model}, {row.level}: {row.predicted_bytes:,} for {row.real_bytes:,}"
    none, selective, full = (row.real_bytes for row in rows)
    assert none > 1.2 * selective > 1.2 * 1.2 * full


def chain(x, w):
    """Block 1: linear, gelu, exp; block 2: tanh, sum."""
    return F.gelu(F.linear(x, w)).exp().tanh().sum()


def saved(again):
    tensors = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    analysis = analyse(program_of(chain, tensors))
    blocks = dict.fromkeys(("linear", "gelu", "exp"), "1") | dict.fromkeys(("tanh", "sum_1"), "2")
    return dict(saved_values(analysis, frozenset({"args_1"}), frozenset(again), blocks))


def test_without_recomputing():
    assert saved(()) == {"args_0": False, "linear": False, "exp": False, "tanh": False}


def test_made_again_from_what_is_saved():
    """The linear's result lives in its block only; exp's is read by the next block, so it is saved all the same."""
    assert saved(("linear", "gelu", "exp")) == {"args_0": False, "linear": True, "exp": False, "tanh": False}


def test_what_is_run_again_needs_its_inputs():
    """tanh alone runs again: its result lives for the block, and what it reads is saved."""
    assert saved(("tanh",)) == {"args_0": False, "linear": False, "exp": False, "tanh": True}
