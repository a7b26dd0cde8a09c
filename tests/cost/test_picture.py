"""Pictures and traces of a timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost.picture import COLOURS, draw, summary, trace, write
from autopar.cost.simulate import StageTimes, simulate
from autopar.cost.timeline import KINDS, Timeline
from autopar.errors import PlanError
from autopar.schedule import build


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    times = {"forward_s": 0.01, "input_grad_s": 0.01, "weight_grad_s": 0.01, "send_s": 0.001}
    extra = {"reduce_s": 0.02, "buckets": 2, "optimizer_s": 0.005, "gather_s": 0.003}
    return simulate(build("zb-v", 2, 2, 4), StageTimes(**times, **extra))


def test_every_kind_has_its_own_colour() -> None:
    assert set(COLOURS) == {*KINDS, "idle"}
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_trace_holds_every_event(timeline: Timeline) -> None:
    found = trace(timeline, timeline.held_by_rank(8.0))["traceEvents"]
    spans = [e for e in found if e["ph"] == "X"]
    assert len(spans) == len(list(timeline.events()))
    assert {e["cat"] for e in spans} == {*KINDS} - {"backward"}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.step_time_s * 1e6)
    forward = next(e for e in spans if e["name"] == "3F1")
    assert (forward["pid"], forward["tid"], forward["args"]) == (0, 0, {"stage": 3, "micro-batch": 1})
    names = {(e["pid"], e["args"]["name"]) for e in found if e["ph"] == "M"}
    assert {(0, "rank 0 (stages 0, 3)"), (1, "rank 1 (stages 1, 2)"), (1, "compute"), (1, "reduce")} <= names
    counted = [e["args"]["bytes"] for e in found if e["ph"] == "C" and e["pid"] == 0]
    assert (max(counted), counted[-1]) == (8.0 * timeline.in_flight[0], 0.0)


def test_pictures(timeline: Timeline, tmp_path: Path) -> None:
    png = write(timeline, tmp_path / "out.png", title="zb-v")
    assert png.read_bytes().startswith(b"\x89PNG")
    draw(timeline, tmp_path / "out.svg")
    drawn = (tmp_path / "out.svg").read_text()
    for kind in ("forward", "input gradient", "weight gradient", "send", "reduce", "gather", "optimizer", "idle"):
        assert f"<!-- {kind} -->" in drawn  # the legend
    assert "<!-- time (ms); darker: a rank's later stage -->" in drawn
    assert all(COLOURS[kind] in drawn for kind in COLOURS if kind != "backward")


def test_endings_are_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"timeline 'out.gif': write a trace \(.json\) or a picture"):
        write(timeline, tmp_path / "out.gif")


def test_a_picture_of_nothing_but_zeros(tmp_path: Path) -> None:
    empty = simulate(build("1f1b", 1, 1, 1), StageTimes(forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0))
    assert write(empty, tmp_path / "zero.png").exists()
    assert empty.bubble.tolist() == [0.0]


def test_figures(timeline: Timeline) -> None:
    found = summary(timeline)
    assert found["step_time_s"] == timeline.step_time_s
    assert [rank["stages"] for rank in found["ranks"]] == [[0, 3], [1, 2]]
    assert found["ranks"][1]["busy_s"] == pytest.approx(2 * 4 * 0.03)
