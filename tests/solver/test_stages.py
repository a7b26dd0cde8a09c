"""Blocks over stages: the balance equals brute force, memory is kept, impossible cuts are refused with numbers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.collective import collective_s
from autopar.cost.hardware import load_profile
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.mesh import Axis, with_pipeline
from autopar.models import GPT, GPTConfig
from autopar.solver.cut import Cell, Shared, States, balance, min_peak
from autopar.solver.report import mesh_of


class Read(NamedTuple):
    cells: list[Cell]
    parameters: list[set[int]]
    """Of each cell."""
    sizes: list[int]


def cells(seed: int, n: int) -> Read:
    """Cells that each read a parameter of their own and some that others read, too."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(n + 2)]
    parameters = [{i} | {s for s in (n, n + 1) if draw.random() < 0.3} for i in range(n)]
    found: list[Cell] = []
    for i, mine in enumerate(parameters):
        last = {p: max((j for j in range(i) if p in parameters[j]), default=None) for p in mine}
        own = States(float(sum(sizes[p] for p, j in last.items() if j is None)))
        again = tuple(Shared(j, States(float(sizes[p]))) for p, j in last.items() if j is not None)
        found.append(Cell(str(i), (), draw.random(), draw.randint(0, 9), own, again))
    return Read(found, parameters, sizes)


def brute(read: Read, stages: int, memory: float, share: list[float]) -> float | None:
    best, n = None, len(read.cells)
    for cuts in itertools.combinations(range(1, n), stages - 1):
        parts = [range(a, b) for a, b in itertools.pairwise((0, *cuts, n))]
        peak = [
            sum(read.sizes[p] for p in set().union(*(read.parameters[i] for i in part)))
            + s * sum(read.cells[i].activation_bytes for i in part)
            for part, s in zip(parts, share, strict=True)
        ]
        if max(peak) <= memory:
            worst = max(sum(read.cells[i].time_s for i in part) for part in parts)
            best = worst if best is None else min(best, worst)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_balance_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    read, stages = cells(seed, draw.randint(4, 9)), draw.randint(1, 4)
    share = [draw.random() for _ in range(stages)]
    memory, found = draw.uniform(10, 60), read.cells
    expected = brute(read, stages, memory, share)
    if expected is None:
        with pytest.raises(InfeasibleError, match=f"{len(found)} blocks into {stages} stages"):
            balance(found, stages, memory, share)
        assert min_peak(found, stages, share) > memory
        return
    sizes = balance(found, stages, memory, share)
    at = list(itertools.accumulate(sizes, initial=0))
    assert max(sum(c.time_s for c in found[a:b]) for a, b in itertools.pairwise(at)) == pytest.approx(expected)
    assert min_peak(found, stages, share) <= memory


def gpt(layers: int = 4) -> GPT:
    return GPT(GPTConfig(vocab=64, context=16, layers=layers, heads=4, width=32, ff_width=64), batch=8, seq=8)


def planned(mesh: str = "4", layers: int = 4, **pin: object) -> autopar.Plan:
    return autopar.plan(gpt(layers), autopar.Mesh(mesh), pin=pin)


def test_each_micro_batch_has_its_own_launches_and_waits() -> None:
    """Inside the stages, four micro-batches take what four calls with as many rows take."""
    sizes = GPTConfig(vocab=64, context=16, layers=4, heads=4, width=32, ff_width=64)
    pin = {"pp": 2, "tp": 2, "sp": False, "stages": [3, 3]}
    whole, part = (
        autopar.plan(GPT(sizes, batch=rows, seq=8), autopar.Mesh("4"), pin={**pin, "microbatches": count}).predicted
        for rows, count in ((16, 4), (4, 1))
    )
    for name in ("compute", "exposed_communication"):
        assert whole["breakdown_s"][name] == pytest.approx(4 * part["breakdown_s"][name], rel=0.02), name
    once = autopar.plan(GPT(sizes, batch=16, seq=8), autopar.Mesh("4"), pin={**pin, "microbatches": 1}).predicted
    assert once["breakdown_s"]["exposed_communication"] < 0.5 * whole["breakdown_s"]["exposed_communication"]


def test_a_plan_says_its_stages() -> None:
    plan = planned(pp=2, tp=2, microbatches=4, schedule="1f1b")
    assert plan.degrees == {"pp": 2, "dp": 1, "tp": 2, "cp": 1, "ep": 1}
    assert [s["devices"] for s in plan.stages] == [(0, 1), (2, 3)]  # the slowest-varying devices
    assert [b for s in plan.stages for b in s["blocks"]] == [
        "before:layers.0", *(f"layers.{i}" for i in range(4)), "after:layers.3"
    ]  # fmt: skip
    assert (plan.microbatches, plan.schedule, plan.virtual_stages) == (4, "1f1b", 1)
    assert plan.axes[-1]["role"] == "pp"
    assert len(plan.predicted["peak_memory_bytes"]) == 2
    by_stage = plan.predicted["memory"]
    assert [sum(stage) for stage in zip(*by_stage.values(), strict=True)] == list(plan.predicted["peak_memory_bytes"])
    assert sum(plan.predicted["breakdown_s"].values()) == pytest.approx(plan.predicted["step_time_s"])
    assert autopar.Plan.from_dict(plan.to_dict()).digest == plan.digest


def test_a_pipeline_across_nodes_says_its_slowest_link() -> None:
    mesh = autopar.Mesh("2x2", device="h100-sxm")
    plan = autopar.plan(gpt(4), mesh, pin={"pp": 2, "tp": 2})
    assert [axis["link"] for axis in plan.axes] == ["nvlink4", "infiniband-ndr"]


def test_micro_batches_are_chosen_to_divide_the_batch() -> None:
    assert planned(pp=2).microbatches in (4, 8)
    assert planned(pp=2, dp=2).microbatches == 4


def test_stages_are_pinned_by_counts_or_names() -> None:
    assert [len(s["blocks"]) for s in planned(pp=2, stages=[4, 2], tp=2).stages] == [4, 2]
    names = [["before:layers.0", "layers.0"], ["layers.1", "layers.2", "layers.3", "after:layers.3"]]
    assert [list(s["blocks"]) for s in planned(pp=2, stages=names, tp=2).stages] == names


def test_interleaved_stages_go_round_the_ranks() -> None:
    plan = planned("2", pp=2, virtual_stages=3)
    assert (plan.schedule, len(plan.stages)) == ("interleaved-1f1b", 6)
    assert [s["devices"] for s in plan.stages] == [(0,), (1,)] * 3
    assert [s["devices"] for s in planned("2", pp=2, schedule="zb-v").stages] == [(0,), (1,), (1,), (0,)]


def test_both_replicas_of_a_bidirectional_pipeline_have_the_same_stages() -> None:
    plan = planned(pp=4, schedule="chimera", microbatches=4)
    assert [s["devices"] for s in plan.stages] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [len(s["blocks"]) for s in plan.stages] == [2, 1, 1, 2]
    assert len(plan.predicted["peak_memory_bytes"]) == 4
    assert sum(plan.predicted["breakdown_s"].values()) == pytest.approx(plan.predicted["step_time_s"])
    with pytest.raises(PlanError, match="even number"):
        planned("3", pp=3, schedule="chimera")


def test_an_asynchronous_pipeline_says_how_stale_it_is_and_keeps_room_for_its_versions() -> None:
    plan = planned(pp=4, schedule="async-1f1b", microbatches=2)
    assert (plan.predicted["staleness"], plan.predicted["weight_versions"]) == ((2, 1, 1, 0), (3, 2, 2, 1))
    copies = plan.predicted["memory"]["weight_versions"]
    block = 4 * (4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32)
    assert copies[1:] == (block, block, 0.0)
    assert copies[0] == 2 * (block + 4 * 32 * (64 + 16))
    assert plan.predicted["peak_memory_bytes"][1] == sum(v[1] for v in plan.predicted["memory"].values())
    with pytest.raises(InfeasibleError):
        autopar.plan(
            gpt(), autopar.Mesh("4"), pin=dict(plan.pins), memory=int(max(plan.predicted["peak_memory_bytes"]) / 2)
        )


def test_sends_between_stages_are_priced() -> None:
    plan = planned(pp=2, tp=2, microbatches=4, schedule="1f1b")
    (send,) = plan.predicted["sends"]
    size_bytes = 8 // 4 * 8 * 32 * 4  # rows of a micro-batch, tokens, width, float32; whole on both ranks of tp
    assert (send["source"], send["reader"]) == (0, 1)
    assert (send["size_bytes"], send["back_bytes"]) == (size_bytes, size_bytes)
    assert send["time_s"] == pytest.approx(collective_s("send", size_bytes, pipeline_axis(plan), load_profile("cpu")))
    assert plan.predicted["breakdown_s"]["stage_sends"] > 0


def pipeline_axis(plan: autopar.Plan) -> Axis:
    return with_pipeline(mesh_of(plan), autopar.Mesh(plan.mesh["shape"]), plan.degrees["pp"]).axes[-1]


def test_more_stages_than_blocks_cut_between_ops() -> None:
    plan = planned("2", pp=2, virtual_stages=4)
    assert len(plan.stages) == 8
    assert all("first_op" in b for s in plan.stages for b in s["blocks"])


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"pp": 2, "stages": [4, 4], "tp": 2}, r"takes 8 blocks of 6"),
        ({"pp": 2, "stages": [6], "tp": 2}, r"has 2 stages, the pin 1"),
        ({"pp": 2, "virtual_stages": 200}, r"400 stages, but the model has \d+ ops"),
        ({"pp": 2, "schedule": "zb-v", "virtual_stages": 3}, "zb-v"),
        ({"pp": 4, "schedule": "2bw", "microbatches": 2}, "2 micro-batches for 4 ranks"),
        ({"pp": 1, "schedule": "2bw"}, "needs stages on several ranks; pin pp=2"),
    ],
)
def test_cuts_that_are_none_are_refused(pin: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(**pin)


def test_a_degree_that_does_not_divide_the_mesh() -> None:
    with pytest.raises(MeshError, match="pp=3 does not divide the 4 devices"):
        planned(pp=3)


class Normed(torch.nn.Module):
    """Batch statistics in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def test_batch_statistics_leave_one_micro_batch_and_say_so() -> None:
    example = (torch.randn(8, 8),)
    plan = autopar.plan(Normed(), autopar.Mesh("2"), example_args=example, pin={"pp": 2})
    assert plan.microbatches == 1
    assert any("norm" in note and "needs the whole batch" in note for note in plan.notes)
    with pytest.raises(PlanError, match=r"norm.*needs the whole batch.*pin microbatches to 1"):
        autopar.plan(Normed(), autopar.Mesh("2"), example_args=example, pin={"pp": 2, "microbatches": 4})


def test_the_stages_together_hold_what_the_model_does() -> None:
    whole = planned("1").predicted["peak_memory_bytes"][0]
    stages = planned("2", pp=2, schedule="gpipe", microbatches=1).predicted["peak_memory_bytes"]
    tied = 16 * 64 * 32  # the token embedding, once more in the stage of the head
    assert sum(stages) == pytest.approx(whole + tied, rel=1e-3)


class _Late(nn.Module):
    """Parameters at the front, most of the time behind them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(12):
            x = torch.sin(x @ x.transpose(-1, -2) @ x)
        return x.mean()


def test_every_rank_has_a_parameter_for_its_optimizer() -> None:
    example = (torch.zeros(8, 64, 8),)
    plan = autopar.plan(_Late(2), autopar.Mesh("2"), example_args=example, pin={"pp": 2})
    assert [len(s["blocks"]) for s in plan.stages] == [1, 2]  # by time alone the second stage would be the end
    with pytest.raises(PlanError, match=r"pp=4: stage 2 of the cut .* holds no parameter"):
        autopar.plan(_Late(2), autopar.Mesh("4"), example_args=example, pin={"pp": 4})
    with pytest.raises(PlanError, match=r"stage 1 of the cut .* holds no parameter"):
        autopar.plan(_Late(2), autopar.Mesh("2"), example_args=example, pin={"pp": 2, "stages": [2, 1]})


def test_a_tied_weight_is_held_by_every_stage_that_reads_it() -> None:
    config = GPTConfig(vocab=512, context=16, layers=2, heads=4, width=32, ff_width=64)
    held = [
        autopar.plan(GPT(replace(config, tied=tied), batch=8, seq=8), autopar.Mesh("2"), pin={"pp": 2})
        for tied in (True, False)
    ]
    tied, apart = (plan.predicted["memory"]["parameters_gradients_optimizer"] for plan in held)
    assert [len(s["blocks"]) for plan in held for s in plan.stages] == [2, 2, 2, 2]
    assert tied == apart


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "vit-tiny", "t5-tiny", "unet-tiny"])
def test_seconds_of_the_stages_are_parts_of_the_step(name: str) -> None:
    with torch.device("meta"):
        model = autopar.models.build(name, batch=8, seq=16, device="meta")
    for schedule in ("1f1b", "zb-h1", "dualpipe-v"):
        plan = autopar.plan(model, autopar.Mesh("2"), pin={"pp": 2, "schedule": schedule, "microbatches": 4})
        seconds, predicted = plan.predicted["stage_seconds"], plan.predicted
        assert all(x >= 0 for part in seconds.values() for x in part)
        assert {len(part) for part in seconds.values()} == {len(plan.stages)}
        assert sum(predicted["breakdown_s"].values()) == pytest.approx(predicted["step_time_s"])
