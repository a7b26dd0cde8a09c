"""Runners-up: what a decision would be instead, and what that costs, against the whole problem evaluated again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import main
from autopar.errors import PlanError
from autopar.explain import explain
from autopar.models import GPT, GPTConfig
from autopar.pipeline import prepare
from autopar.request import make_request
from autopar.solver.problem import evaluate, fits, uncovered
from autopar.solver.runner_up import _second_best
from autopar.solver.search import search

MESH = autopar.Mesh("2x2", device="h100-sxm")


def gpt() -> GPT:
    sizes = GPTConfig(vocab=256, context=64, layers=3, heads=4, width=64, ff_width=256)
    with torch.device("meta"):
        return GPT(sizes, batch=8, seq=64)


@pytest.mark.parametrize("pin", [{}, {"tp": 2}, {"dp": 4, "zero": 3}])
def test_costs_are_those_of_the_problem_with_one_option_changed(pin: dict[str, int]) -> None:
    model = gpt()
    args, kwargs = model.example_inputs()
    prepared = prepare(model, args, kwargs, name="gpt", outputs="auto")
    request = make_request(MESH, pin, None, None, "adamw", "auto", None, "aot", False, False, None)
    found = search(prepared.analysis, MESH, request.profile, request.settings, prepared.sinks)
    problem, options = found.built.problem, list(found.solution.options)
    cost_s, size_bytes = evaluate(problem, options)
    seconds = dict(_second_best(problem, options))
    assert len(seconds) > 10
    for choice, (at, more_s, more_bytes) in seconds.items():
        changed = [*options[:choice], at, *options[choice + 1 :]]
        there_s, there_bytes = evaluate(problem, changed)
        assert there_s - cost_s == pytest.approx(more_s, rel=1e-6, abs=1e-12)
        assert there_bytes - size_bytes == pytest.approx(more_bytes, rel=1e-6, abs=1.0)
        assert fits(problem, there_bytes)
        assert not uncovered(problem, changed)
        for other in range(problem.choices[choice].cost_s.size):
            if other not in (at, options[choice]):
                again = [*options[:choice], other, *options[choice + 1 :]]
                least_s, least_bytes = evaluate(problem, again)
                allowed = fits(problem, least_bytes) and not uncovered(problem, again)
                assert not allowed or least_s >= there_s - 1e-12


def test_equal_blocks_are_one_decision_and_any_of_them_names_it() -> None:
    plan = autopar.plan(gpt(), MESH)
    rows = explain(plan).rows
    counts = {row["name"]: row["count"] for row in rows if row["decision"] == "parameter"}
    assert counts["layers.0.norm1.weight"] == 3
    assert counts["token_embedding.weight"] == 1
    mine = explain(plan, "layers.2.mlp.up_proj.weight").rows
    assert [row["name"] for row in mine] == ["layers.0.mlp.up_proj.weight"]
    assert {row["decision"] for row in explain(plan, "layers.*.mlp.*").rows} == {"op", "parameter"}


def test_a_pipeline_is_explained_by_other_shapes() -> None:
    plan = autopar.plan(gpt(), autopar.Mesh("2x2", device="rtx-4090"), pin={"pp": 2})
    shapes = [row for row in explain(plan).rows if row["decision"] == "shape"]
    assert shapes
    assert all(row["chosen"].startswith("pp 2, ") for row in shapes)
    assert autopar.Plan.from_dict(plan.to_dict()) == plan


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plan = autopar.plan(gpt(), MESH)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["explain", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step_time_s"] == plan.predicted["step_time_s"]
    assert {"decision", "name", "count", "chosen", "instead", "costs_s", "bytes"} == set(data["decisions"][0])
    assert main(["explain", str(path), "lm_head"]) == 0
    assert "lm_head" in capsys.readouterr().out
    assert main(["explain", str(path), "layer.0"]) == 1
    assert "no decision has such a name; the plan has " in capsys.readouterr().err


def test_a_plan_without_runners_up_says_so() -> None:
    data = autopar.plan(gpt(), MESH).to_dict()
    del data["solver"]["runners_up"]
    with pytest.raises(PlanError, match="plan the model again"):
        explain(autopar.Plan.from_dict(data))
