"""The shape of a run: what is chosen unasked, what is kept, and that no shape within reach is better."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.models import GPT, GPTConfig
from autopar.pipeline import prepare
from autopar.request import make_request
from autopar.solver import search as search_module
from autopar.solver.optimise import Beaten
from autopar.solver.search import search
from autopar.solver.settings import Shape
from autopar.solver.shapes import MARGIN, UNASKED

NODES = autopar.Mesh("2x2", device="rtx-4090")
"""Slow links: parameters are better not sent over them."""


def gpt(batch: int = 32) -> GPT:
    sizes = GPTConfig(vocab=8192, context=1024, layers=6, heads=16, width=1024, ff_width=4096)
    return GPT(sizes, batch=batch, seq=1024)


def planned(mesh: autopar.Mesh = NODES, model: nn.Module | None = None, **options: object) -> autopar.Plan:
    with torch.device("meta"):
        model = model or gpt()
    return autopar.plan(model, mesh, **options)


def shape_of(plan: autopar.Plan) -> dict[str, object]:
    return {
        "pp": plan.degrees["pp"], "microbatches": plan.microbatches, "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
    }  # fmt: skip


def test_a_pipeline_is_chosen_where_it_is_faster_and_no_other_shape_is_faster_still() -> None:
    chosen = planned()
    assert chosen.degrees["pp"] > 1
    assert chosen.pins == {}
    step = chosen.predicted["step_time_s"]
    assert step < (1 - MARGIN) * planned(pin={"pp": 1, "microbatches": 1}).predicted["step_time_s"]
    for pp, count, (schedule, virtual), zero in itertools.product((2, 4), (4, 8, 16), UNASKED, (None, 1)):
        pin = {"pp": pp, "microbatches": count, "schedule": schedule, "virtual_stages": virtual}
        if zero is not None and pp == 4:
            continue  # no ranks are left to shard over
        other = planned(pin=pin if zero is None else {**pin, "zero": zero})
        assert step <= other.predicted["step_time_s"] * (1 + MARGIN), other.pins


def test_what_is_chosen_costs_what_it_costs_when_pinned() -> None:
    chosen = planned()
    zero = {"zero": chosen.zero} if chosen.zero in (1, 2) else {}
    again = planned(pin={**shape_of(chosen), **zero})
    assert again.predicted["step_time_s"] == pytest.approx(chosen.predicted["step_time_s"], rel=0.01)
    assert shape_of(again) == shape_of(chosen)


def test_shapes_that_were_compared_stand_in_the_plan() -> None:
    chosen = planned()
    tried = chosen.solver["tried"]
    assert {t["pp"] for t in tried} >= {1, 2}
    best = min(t["step_time_s"] for t in tried if t["step_time_s"] is not None)
    assert chosen.predicted["step_time_s"] <= best * (1 + MARGIN)
    assert all(t["step_time_s"] is not None or t["refused"] for t in tried)
    assert autopar.Plan.from_dict(chosen.to_dict()) == chosen
    assert "shapes compared" in str(chosen)


@pytest.mark.parametrize("case", ["gather", "evaluation"])
def test_no_pipeline_unasked_without_a_loss_to_differentiate(case: str) -> None:
    model = gpt().eval() if case == "evaluation" else gpt()
    plan = planned(model=model, outputs="gather" if case == "gather" else "auto")
    assert (plan.degrees["pp"], plan.microbatches) == (1, 1)


def test_fewer_rows_at_once_where_a_batch_takes_too_much_memory() -> None:
    one = autopar.Mesh("1", device="rtx-4090")
    whole = planned(one).predicted["peak_memory_bytes"][0]
    states = planned(one).predicted["memory"]["parameters_gradients_optimizer"]
    limit = int(states + 0.3 * (whole - states))
    with pytest.raises(InfeasibleError):
        planned(one, memory=limit, pin={"microbatches": 1, "recompute": "none", "loss_chunks": 1})
    plan = planned(one, memory=limit, pin={"recompute": "none", "loss_chunks": 1})
    assert plan.microbatches > 1
    assert max(plan.predicted["peak_memory_bytes"]) <= limit


@pytest.mark.parametrize(
    "pin", [{"microbatches": 4}, {"schedule": "1f1b"}, {"zero": 3}, {"dp": 2}, {"recompute": "full"}]
)
def test_pins_are_kept_while_the_rest_is_chosen(pin: dict[str, object]) -> None:
    plan = planned(pin=pin)
    kept = {"microbatches": plan.microbatches, "schedule": plan.schedule, "zero": plan.zero, "dp": plan.degrees["dp"]}
    kept["recompute"] = next((level for level in plan.recompute.values() if level != "none"), "none")
    assert {key: kept[key] for key in pin} == pin
    assert plan.pins == pin


def test_parameters_gathered_for_each_micro_batch_cost_as_many_gathers() -> None:
    """ZeRO 3 sends the weights again for each of them, ZeRO 1 once a step."""
    pin = {"pp": 2, "dp": 2, "schedule": "1f1b"}
    waits = {
        (zero, count): planned(pin={**pin, "zero": zero, "microbatches": count}).predicted["breakdown_s"]
        for zero in (1, 3)
        for count in (2, 8)
    }
    sent = {key: parts["exposed_communication"] for key, parts in waits.items()}
    assert sent[3, 8] > 2.5 * sent[3, 2]
    assert sent[1, 8] < 1.2 * sent[1, 2]


def test_a_model_that_needs_its_whole_batch_is_not_divided() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x))).square().mean()

    plan = autopar.plan(Normed(), NODES, example_args=(torch.randn(8, 8),))
    assert plan.microbatches == 1
    with pytest.raises(PlanError, match="needs the whole batch"):
        autopar.plan(Normed(), NODES, example_args=(torch.randn(8, 8),), pin={"microbatches": 4})


def test_a_level_of_recomputation_is_not_lost_when_the_next_one_is_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    args, kwargs = model.example_inputs()
    prepared = prepare(model, args, kwargs, name="gpt", outputs="auto")
    request = make_request(NODES, None, None, None, "adamw", "auto", None, "aot", False, False, None)
    inner = request.settings.shaped(Shape(1, 1)).inside_stage()
    solved = search_module._solve

    def later_levels_beaten(*args: object) -> object:
        settings = args[3]
        if settings.recompute == "full":  # type: ignore[attr-defined]
            raise Beaten
        found = solved(*args)  # type: ignore[arg-type]
        return replace(found, solution=replace(found.solution, solver="highs-mip"))  # as if memory had bound

    monkeypatch.setattr(search_module, "_solve", later_levels_beaten)
    found = search(
        prepared.analysis, NODES, request.profile, inner, prepared.sinks, levels=("none", "selective", "full"), most=1
    )
    assert found.recompute in ("none", "selective")


@pytest.mark.parametrize("batch", [9, 7])
def test_batches_that_are_no_power_of_two_are_divided_where_memory_is_short(batch: int) -> None:
    one = autopar.Mesh("1", device="rtx-4090")
    whole = planned(one, gpt(batch)).predicted
    states = whole["memory"]["parameters_gradients_optimizer"]
    limit = int(states + 0.35 * (whole["peak_memory_bytes"][0] - states))
    plan = planned(one, gpt(batch), memory=limit, pin={"recompute": "none", "loss_chunks": 1})
    assert plan.microbatches > 1
    assert max(plan.predicted["peak_memory_bytes"]) <= limit


@pytest.mark.parametrize("pin", [{"schedule": "zb-v"}, {"virtual_stages": 2}, {"schedule": "gpipe"}])
def test_a_pin_that_only_a_pipeline_has_asks_for_one(pin: dict[str, object]) -> None:
    plan = planned(pin=pin)
    assert plan.degrees["pp"] > 1
    assert {"schedule": plan.schedule, "virtual_stages": plan.virtual_stages}.items() >= pin.items()
    with pytest.raises(PlanError, match="only a pipeline has it; pin pp=2 or more"):
        planned(autopar.Mesh("1", device="rtx-4090"), pin=pin)


@pytest.mark.parametrize(
    "pin",
    [{"pp": 2, "zero": 3}, {"pp": 2, "zero": 2}, {"pp": 1, "microbatches": 16, "zero": 3}, {"zero": 1}, {"dp": 1}],
)
def test_degrees_and_levels_that_are_pinned_are_those_of_the_plan(pin: dict[str, int]) -> None:
    plan = planned(pin=pin)
    assert {**plan.degrees, "zero": plan.zero, "microbatches": plan.microbatches}.items() >= pin.items()


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b"])
def test_a_rank_of_two_stages_has_room_for_both_together(schedule: str) -> None:
    pin = {"pp": 2, "schedule": schedule, "microbatches": 4, "recompute": "none", "zero": 0, "loss_chunks": 1}
    mesh = autopar.Mesh("2", device="rtx-4090")

    def by_rank(plan: autopar.Plan) -> list[float]:
        held = zip(plan.stages, plan.predicted["peak_memory_bytes"], strict=True)
        rank = [(stage["devices"][0], bytes_) for stage, bytes_ in held]
        return [sum(b for r, b in rank if r == at) for at in range(2)]

    fullest = max(by_rank(planned(mesh, pin=pin)))
    short = planned(mesh, pin=pin, memory=int(1.001 * fullest))
    assert max(by_rank(short)) <= 1.001 * fullest


def test_uneven_micro_batches_hold_what_the_largest_does() -> None:
    """Of 9 rows in 5 parts the largest has 2, of 10 rows all have 2."""
    pin = {"pp": 1, "microbatches": 5, "recompute": "none", "zero": 0}
    one = autopar.Mesh("1", device="rtx-4090")
    uneven, even = (planned(one, gpt(rows), pin=pin).predicted["memory"]["activations"] for rows in (9, 10))
    assert sum(uneven) == pytest.approx(sum(even), rel=0.02)


def test_what_does_not_fit_is_told_by_the_shape_that_lacks_least() -> None:
    one = autopar.Mesh("1", device="rtx-4090")
    states = planned(one).predicted["memory"]["parameters_gradients_optimizer"]
    with pytest.raises(InfeasibleError) as alone:
        planned(one, memory=int(states / 2), pin={"microbatches": 1})
    with pytest.raises(InfeasibleError) as free:
        planned(one, memory=int(states / 2))
    assert 0 < free.value.missing_bytes < alone.value.missing_bytes  # type: ignore[attr-defined]
