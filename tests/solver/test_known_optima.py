"""Optima that everybody knows, found without being told; and no plan above the cost of a layout written by hand.

Models are on meta, machines are H100 nodes. `collectives` counts what the local program sends.
"""

import math

import pytest
import torch
from torch import nn

import autopar
from autopar.layout import FREE, TRANSITIONS
from autopar.models import GPT, GPTConfig
from autopar.pipeline import carry_out, lower, prepare
from autopar.request import make_request
from autopar.runtime.moves import move
from autopar.solver import search

NODE = autopar.Mesh("8", device="h100-sxm")
NODES = autopar.Mesh("2x8", device="h100-sxm")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """How many factorings of the mesh are tried must not depend on how busy this machine is."""
    monkeypatch.setattr(search, "WORK", math.inf)


class Block(nn.Module):
    def __init__(self, width, ff_width):
        super().__init__()
        options = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
        self.up, self.down = nn.Linear(width, ff_width, **options), nn.Linear(ff_width, width, **options)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class MLP(nn.Module):
    def __init__(self, width, blocks, batch, seq):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4 * width) for _ in range(blocks))
        self.shape = (batch, seq, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()

    def example_inputs(self):
        return (torch.empty(self.shape, device="meta", dtype=torch.bfloat16),), {}


def gpt():
    config = GPTConfig(vocab=50304, context=2048, layers=4, heads=32, width=4096, ff_width=16384)
    return GPT(config, batch=8, seq=2048, device="meta", dtype=torch.bfloat16)


def plan(model, mesh, memory=None, **pin):
    return autopar.plan(model, mesh, memory=memory, pin={"recompute": "none", **pin})


def peak(found):
    return found.predicted["peak_memory_bytes"][0]


def collectives(model, mesh, found):
    """(forward, backward) primitives that send, each with the elements of the value moved, of rank 0's program."""
    args, kwargs = model.example_inputs()
    request = make_request(mesh, None, None, None, "adamw", "auto", None, "auto", False, False, None)
    prepared = prepare(model, args, kwargs, name="model", outputs="auto")
    solved, decisions = carry_out(prepared, found, request.profile, request.settings)
    at = solved.mesh.coordinate(0)
    program = lower(prepared, decisions, solved.mesh, request.profile, at, torch.device("cpu")).program
    forward, backward = [], []
    for node in program.graph.nodes:
        if node.target is move:
            source, _, _, before, after = (*node.args[:2], None, *node.args[2:4])
            row, elements = TRANSITIONS[before[0], after[0]], source.meta["val"].numel()
            forward += [(row.forward, elements)] if row.forward not in FREE else []
            backward += [(row.backward, elements)] if row.backward not in FREE else []
    return forward, backward


def test_an_mlp_is_column_then_row_parallel_with_one_reduction_each_way():
    blocks = 4
    model = MLP(16384, blocks, batch=1, seq=512)
    found = plan(model, NODE)
    assert found.degrees["tp"] == 8
    for i in range(blocks):
        assert set(found.ops[f"blocks.{i}.up/linear/1"]["strategy"]) == {"o"}
        assert set(found.ops[f"blocks.{i}.down/linear/1"]["strategy"]) == {"i"}
        assert {p for _, p in found.params[f"blocks.{i}.up.weight"]["layout"]} == {"S(0)"}
        assert {p for _, p in found.params[f"blocks.{i}.down.weight"]["layout"]} == {"S(1)"}
    forward, backward = collectives(model, NODE, found)
    axes = len(found.axes)
    large = [[name for name, elements in side if elements > 1] for side in (forward, backward)]
    # The last sum is scattered for the loss, whose backward gathers; the first block's input takes no gradient.
    assert large[0].count("all_reduce") + large[0].count("reduce_scatter") == len(large[0]) == blocks * axes
    assert large[1].count("all_reduce") == (blocks - 1) * axes
    assert len(large[1]) <= blocks * axes


def test_large_batch_and_small_weights_are_data_parallel():
    found = plan(MLP(512, 2, batch=1024, seq=512), NODE)
    assert (found.degrees["dp"], found.degrees["tp"], found.zero) == (8, 1, 0)
    assert all(not param["layout"] for param in found.params.values())


def test_parameters_that_exceed_memory_are_sharded():
    model = MLP(2048, 8, batch=64, seq=512)
    whole, sharded = plan(model, NODE, dp=8), plan(model, NODE, dp=8, zero=3)
    assert plan(model, NODE).zero == 0
    assert peak(sharded) < peak(whole)
    memory = int(peak(sharded) * 1.02)
    with pytest.raises(autopar.InfeasibleError):
        plan(model, NODE, memory=memory, dp=8, zero=0)
    found = plan(model, NODE, memory=memory, dp=8)
    assert found.zero == 3
    assert all(param["layout"] for param in found.params.values())
    assert peak(found) <= memory


def test_activations_are_cut_along_the_sequence_when_memory_binds():
    model = gpt()
    whole, cut = plan(model, NODE, tp=8, sp=False), plan(model, NODE, tp=8, sp=True)
    assert peak(cut) < peak(whole)
    assert not any("S(1)" in layout for layout in between_products(plan(model, NODE, tp=8)))
    found = plan(model, NODE, memory=int(peak(cut)), tp=8)
    assert peak(found) <= peak(cut)
    assert all("S(1)" in layout for layout in between_products(found))


def between_products(found):
    """Layouts of the norms and of the sums with the residual."""
    names = [n for n in found.ops if n.startswith("layers.") and ("layer_norm" in n or "/add/" in n)]
    assert len(names) == 16
    return [found.ops[name]["outputs"][0] for name in names]


@pytest.mark.parametrize("mesh", [NODE, NODES], ids=["8", "2x8"])
def test_no_plan_costs_more_than_one_written_by_hand(mesh):
    model, n = gpt(), mesh.size
    free = plan(model, mesh)
    by_hand = (
        {"tp": 8},
        {"tp": 8, "sp": True},
        {"dp": n, "zero": 3},
        {"dp": n, "zero": 0},
        {"tp": 2, "dp": n // 2},
        {"tp": 4, "dp": n // 4, "sp": True},
        {"tp": 4, "dp": n // 4, "zero": 3},
    )
    for pin in by_hand:
        pinned = plan(model, mesh, **pin)
        assert free.solver["objective"] <= pinned.solver["objective"] * (1 + 2 * search.GAP), pin
