"""What is priced between stages is what the stage pass sends."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.api import _plan_of, _prepare
from autopar.mesh import Mesh
from autopar.passes.microbatch import Microbatch, divide, with_microbatches
from autopar.passes.shard import Shard
from autopar.passes.stage import Stage, once_for_all
from autopar.pipeline import carry_out
from autopar.plan import Plan
from autopar.request import make_request
from autopar.solver.stages import stage_of_ops
from tests.end_to_end.pipeline_models import build, inputs


def planned_and_sent(
    model: str, mesh: str | Mesh, pin: dict[str, Any]
) -> tuple[Plan, dict[tuple[int, int], list[int]]]:
    """The plan, and bytes of the values and of their gradients that the first micro-batch sends, by both stages."""
    args, kwargs = inputs(model)
    request = make_request(mesh, pin, None, None, "adamw", "auto", None, "auto", False, False, None)
    prepared = _prepare(build(model), args, kwargs, request, lambda stage: None)
    plan = _plan_of(prepared, request, None, lambda stage: None)
    found, decisions = carry_out(prepared, plan, request.profile, request.settings)
    count = plan.microbatches
    divided = divide(prepared.analysis, decisions, found.mesh, found.built.roles.batch, count).decisions
    at = (0,) * (1 + len(found.mesh.axes))
    shard = Shard(prepared.analysis, divided, with_microbatches(found.mesh, count), request.profile, at)
    program, _ = once_for_all(Microbatch(count, 0).run(shard.run(prepared.program)))
    sent: dict[tuple[int, int], list[int]] = {}
    for stage in Stage(stage_of_ops(plan, prepared.program), len(plan.stages)).run(program):
        for source, value in stage.receives:
            size_bytes = value.dtype.itemsize
            for n in value.shape:
                size_bytes *= n
            total = sent.setdefault((source, stage.index), [0, 0])
            total[0] += size_bytes
            total[1] += size_bytes * value.grad
    return plan, sent


CASES = [
    pytest.param("mixed", "2", {"pp": 2, "microbatches": 2}, id="mixed"),
    pytest.param("gpt", "2x2", {"pp": 2, "tp": 2, "microbatches": 4}, id="gpt-tp"),
    pytest.param("gpt", "4", {"pp": 4, "microbatches": 3}, id="gpt-uneven", marks=pytest.mark.slow),
    pytest.param("unet", "4", {"pp": 4, "microbatches": 2}, id="unet", marks=pytest.mark.slow),
    pytest.param("t5", "4", {"pp": 2, "dp": 2, "microbatches": 2}, id="t5-dp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "mesh", "pin"), CASES)
def test_priced_is_what_is_sent(model: str, mesh: str, pin: dict[str, Any]) -> None:
    plan, sent = planned_and_sent(model, mesh, pin)
    assert sent
    priced = {(s["source"], s["reader"]): [s["size_bytes"], s["back_bytes"]] for s in plan.predicted["sends"]}
    assert priced == sent
    assert all(s["time_s"] > 0 for s in plan.predicted["sends"])


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_stages_of_one_node_send_over_its_links(schedule: str) -> None:
    """Of four stages on two nodes of two devices only the middle send crosses the network; 4 KiB each, on A100s."""
    pin = {"pp": 4, "microbatches": 4, "schedule": schedule}
    of = {}
    for mesh in ("2x2", "4"):
        plan, _ = planned_and_sent("gpt", Mesh(mesh, device="a100-sxm-80gb"), pin)
        of[mesh] = {(s["source"], s["reader"]): s["time_s"] for s in plan.predicted["sends"]}
    assert of["2x2"][0, 1] == of["2x2"][2, 3] == of["4"][1, 2]
    assert of["2x2"][1, 2] > 5 * of["4"][1, 2]
