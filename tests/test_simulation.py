"""`autopar simulate`: a plan's step by stage, from the plan's own figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autopar.cli import main
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.simulation import simulate_plan, stage_of_ops
from tests.example_plan import plan_data


def plan(**changed: Any) -> Plan:
    """Four equal layers; compute 0.2 s, exposed communication 0.05 s."""
    return Plan.from_dict(plan_data() | changed)


def pipeline(**changed: Any) -> Plan:
    """The same on four pipeline ranks, a layer each; the figures are then those of a stage."""
    data = plan_data()
    data["ops"] = {name: op for name, op in data["ops"].items() if name != "/arange/1"}
    figures = data["predicted"] | {"breakdown_s": {"compute": 0.05, "exposed_communication": 0.0125, "optimizer": 0.01}}
    figures["peak_memory_bytes"] = [400.0, 300.0, 200.0, 100.0]
    figures["memory"] = {"parameters": 160.0, "activations": 320.0}
    stages = [{"blocks": [f"layers.{i}"], "devices": [2 * i, 2 * i + 1]} for i in range(4)]
    return Plan.from_dict(
        data
        | {"degrees": data["degrees"] | {"pp": 4}, "stages": stages, "microbatches": 8, "predicted": figures}
        | changed
    )


def test_one_stage_takes_what_the_plan_says() -> None:
    found = simulate_plan(plan(microbatches=1))
    assert found.timeline.step_time_s == pytest.approx(0.25)
    assert found.to_dict()["stages"][0]["peak_memory_bytes"] == 2**36
    assert found.forward_s[0] == pytest.approx(found.weight_grad_s[0]) == pytest.approx(0.25 / 3)


def test_accumulation_inside_the_call_takes_no_longer() -> None:
    assert simulate_plan(plan(microbatches=8)).timeline.step_time_s == pytest.approx(0.25)


def test_a_pipeline_waits_as_its_schedule_does() -> None:
    found = simulate_plan(pipeline())
    assert found.timeline.step_time_s == pytest.approx(0.0625 * 11 / 8 + 0.01)  # (m + p - 1) / m, and the optimizer
    data = found.to_dict()
    assert [row["rank"] for row in data["stages"]] == [0, 1, 2, 3]
    assert [row["peak_memory_bytes"] for row in data["stages"]] == pytest.approx([400, 300, 200, 100])
    assert [rank["in_flight"] for rank in data["ranks"]] == [4, 3, 2, 1]
    assert [rank["bubble"] for rank in data["ranks"]] == pytest.approx([3 / 11] * 4)


def test_sends_take_what_the_plan_says() -> None:
    figures = pipeline().to_dict()["predicted"]
    send = {"size_bytes": 1.0, "back_bytes": 1.0, "time_s": 0.001, "back_time_s": 0.002}
    figures["sends"] = [{"source": s, "reader": s + 1, **send} for s in range(3)]
    found = simulate_plan(pipeline(predicted=figures))
    slower = found.timeline.step_time_s - simulate_plan(pipeline()).timeline.step_time_s
    assert slower >= 3 * (0.001 + 0.002) - 1e-12  # of the first micro-batch, and of the last one's gradient
    figures["sends"] = [{"source": 0, "reader": 3, **send, "time_s": 0.05}]  # past two stages, longer than through them
    assert simulate_plan(pipeline(predicted=figures)).timeline.step_time_s > found.timeline.step_time_s + 0.02


def test_recomputation_and_evaluation() -> None:
    again = simulate_plan(pipeline(recompute={"Layer": "full"}))
    assert again.input_grad_s == pytest.approx(2 * again.forward_s)
    evaluated = simulate_plan(pipeline(model=plan_data()["model"] | {"training": False}))
    assert {event.kind for event in evaluated.timeline.events()} == {"forward", "send", "optimizer"}
    assert evaluated.timeline.step_time_s == pytest.approx(0.0625 * 11 / 8)


def test_asynchronous_schedules_say_how_stale_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    found = simulate_plan(pipeline(schedule="async-1f1b", microbatches=2))
    assert found.timeline.step_time_s == pytest.approx(0.0625 + 0.01)  # nothing waits between calls
    assert [row["staleness"] for row in found.to_dict()["stages"]] == [2, 1, 1, 0]
    assert [row["peak_memory_bytes"] for row in found.to_dict()["stages"]] == pytest.approx([400, 300, 200, 100])
    pipeline(schedule="2bw").save(tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json")]) == 0
    assert "updates behind" in capsys.readouterr().out
    assert [row["staleness"] for row in simulate_plan(pipeline()).to_dict()["stages"]] == [0, 0, 0, 0]


def test_ops_go_to_the_stage_of_their_block() -> None:
    op = next(iter(plan_data()["ops"].values()))
    names = [
        "embed/embedding/1",
        "layers.0.a/linear/1",
        "/add/1",
        "layers.1.a/linear/1",
        "layers.1/add/1",
        "head/linear/1",
    ]
    blocks = ["before:layers.0", "layers.0", "before:layers.1", "layers.1", "after:layers.1"]
    data = plan_data() | {"ops": {name: op for name in names}}

    def stages(*cuts: list[Any]) -> list[int]:
        made = [{"blocks": list(cut), "devices": [i]} for i, cut in enumerate(cuts)]
        return list(stage_of_ops(Plan.from_dict(data | {"stages": made})).values())

    assert stages(blocks[:2], blocks[2:]) == [0, 0, 1, 1, 1, 1]
    assert stages(blocks[:3], blocks[3:4], blocks[4:]) == [0, 0, 0, 1, 1, 2]
    cut = {"first_op": names[0], "last_op": names[2]}, {"first_op": names[3], "last_op": names[5]}
    assert stages([cut[0]], [cut[1]]) == [0, 0, 0, 1, 1, 1]
    # Ten layers: layers.1 is no prefix of layers.10.
    data["ops"] = {f"layers.{i}.a/linear/1": op for i in range(12)}
    assert stages([f"layers.{i}" for i in range(2)], [f"layers.{i}" for i in range(2, 12)]) == [0, 0] + [1] * 10


def test_stages_that_do_not_fit_the_schedule_are_refused() -> None:
    with pytest.raises(PlanError, match="stages: 4, but zb-v on pp=4 with virtual_stages=2 has 8"):
        simulate_plan(pipeline(schedule="zb-v", virtual_stages=2))


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    pipeline().save(path)
    assert main(["simulate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "step 95.9 ms (250 ms in the plan); 1f1b, 8 micro-batches" in shown
    assert "idle by rank: 27.3 %, 27.3 %, 27.3 %, 27.3 %" in shown

    assert main(["simulate", str(path), "--json", "--timeline", str(tmp_path / "out.json")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step_time_s"] == pytest.approx(0.0959375)
    assert data["timeline"] == str(tmp_path / "out.json")
    trace = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in trace if e["ph"] == "X") == pytest.approx(95937.5)

    assert main(["simulate", str(path), "--timeline", str(tmp_path / "out.txt")]) == 1
    assert "write a trace (.json) or a picture (.png, .svg, .pdf)" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "none.json")]) == 1
