"""A step's seconds: closed forms, and what each decision must change."""

from dataclasses import replace

import pytest

from autopar.cost.fitted import FITTED
from autopar.cost.hardware import load_profile
from autopar.cost.op_time import felt_s
from autopar.cost.training import stages, step_time
from autopar.cost.training_run import Run
from autopar.cost.training_wire import Sends
from autopar.cost.transformer import Transformer
from autopar.errors import PlanError

A100, H100 = load_profile("a100-sxm-80gb"), load_profile("h100-sxm")
GPT = Transformer(32, 4096, 32, 32, 16384, gated=False, vocab=51200, seq=2048)


def run(**changes):
    return replace(Run(GPT, A100, 1, 8, 2, 16, tp=8, attention="plain", fused=True), **changes)


PIPELINE = {"tp": 1, "pp": 8, "schedule": "1f1b", "stage_layers": (4,) * 8}


def test_parts_add_up():
    found = step_time(run())
    assert found.total_s == pytest.approx(
        found.compute_s + found.exposed_s + found.bubble_s + found.reduce_s + found.update_s
    )
    assert found.bubble_s == found.reduce_s == 0
    assert found.exposed_s > 0


def test_1f1b_is_the_slowest_stage_m_times_and_the_others_once():
    pipeline = run(**PIPELINE)
    each = [s.total_s for s in stages(pipeline)]
    found = step_time(pipeline)
    assert found.bubble_s == pytest.approx(sum(each) - max(each))
    assert found.compute_s + found.exposed_s == pytest.approx(16 * max(each))


def test_schedules_shorten_the_bubble_in_order():
    bubbles = [step_time(run(**{**PIPELINE, "schedule": s})).bubble_s for s in ("1f1b", "zb-h1", "zb-2p")]
    chunks = run(**{**PIPELINE, "schedule": "interleaved-1f1b", "virtual": 2, "stage_layers": (2,) * 16})
    assert bubbles[0] > bubbles[1] > bubbles[2]
    assert bubbles[0] > step_time(chunks).bubble_s
    assert step_time(run(**{**PIPELINE, "microbatches": 32})).bubble_s == pytest.approx(bubbles[0], rel=1e-6)


def test_the_ring_of_chunks_closes_inside_a_node():
    inside = Sends.of(run(**PIPELINE), FITTED)
    assert inside.into_s(0) == inside.into_s(1) == inside.near_s
    across = Sends.of(run(**{**PIPELINE, "nodes": 2, "pp": 16, "stage_layers": (2,) * 16}), FITTED)
    assert across.into_s(1) == inside.near_s
    assert across.into_s(0) == across.into_s(8) == across.far_s > inside.near_s


def test_recompute_runs_the_forward_again():
    none, selective, full = (step_time(run(recompute=r)).compute_s for r in ("none", "selective", "full"))
    forward = stages(run())[0].forward_s
    assert none < selective < full < none + 16 * forward


def test_overlap_hides_but_not_all():
    data = {"tp": 1, "dp": 8, "zero": 1}
    shown, hidden = (step_time(run(**data, overlap=o)).reduce_s for o in (False, True))
    assert 0 < hidden < shown
    assert hidden >= FITTED.overlap_slowdown * shown * 0.5
    assert felt_s(1.0, 3.0, FITTED) == pytest.approx(2 + FITTED.overlap_slowdown)


def test_zero_3_gathers_in_every_micro_batch():
    one, many = (step_time(run(tp=1, dp=8, zero=3, microbatches=m)).reduce_s for m in (1, 4))
    assert many > 3 * one
    assert step_time(run(tp=1, dp=8, zero=2)).reduce_s < step_time(run(tp=1, dp=8, zero=3)).reduce_s


def test_without_prefetch_everything_is_felt_and_flat_rings_are_slow():
    wide = {"nodes": 4, "tp": 1, "dp": 32, "zero": 3}
    hidden, shown, flat = (
        step_time(run(**wide, **kind)).reduce_s
        for kind in ({}, {"prefetch": False}, {"prefetch": False, "flat_ring": True})
    )
    assert hidden < shown < flat / 3


def test_slower_networks_and_more_nodes_cost():
    wide = {"nodes": 4, "tp": 8, "dp": 4, "zero": 1}
    slow = replace(A100, links=(A100.links[0], replace(A100.links[1], bandwidth_bytes_per_s=1e9)))
    assert step_time(run(**wide, profile=slow)).reduce_s > 5 * step_time(run(**wide)).reduce_s
    assert step_time(run(**wide)).compute_s > step_time(run()).compute_s


def test_sends_share_what_a_node_has():
    shared = Sends.of(run(nodes=2, tp=8, pp=2, schedule="1f1b"), FITTED)
    lone = Sends.of(run(nodes=2, tp=1, pp=16, schedule="1f1b"), FITTED)
    assert shared.into_s(1) == shared.into_s(0) == shared.far_s
    assert lone.into_s(8) == lone.far_s > lone.into_s(1) == lone.near_s


def test_a_mixture_pays_its_all_to_all_and_less_per_parameter():
    mixture = Transformer(32, 4096, 32, 8, 14336, True, 32000, 2048, experts=8, top_k=2)
    dense = replace(mixture, ffn=8 * 14336, experts=1, top_k=1)
    base = {"tp": 1, "dp": 8, "ep": 8, "zero": 1, "model": mixture, "profile": H100}
    assert step_time(run(**base)).exposed_s > step_time(run(**{**base, "ep": 1})).exposed_s
    assert step_time(run(**base)).compute_s < step_time(run(**{**base, "ep": 1, "model": dense})).compute_s / 2


def test_racks_are_a_level_of_their_own():
    gb200 = load_profile("gb200")
    near = Run(GPT, gb200, 16, 4, 2, 4, dp=64, zero=1)
    far = replace(near, nodes=32, dp=128, racks=2)
    assert near.axes["dp"].spans == ((0, 4), (1, 16))
    assert far.axes["dp"].spans == ((0, 4), (1, 16), (2, 2))
    assert step_time(far).reduce_s > step_time(near).reduce_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 4}, "tp x pp x cp x dp = 4 x 1 x 1 x 1 is 4, not the 8 devices of 1 nodes"),
        ({"schedule": "1F1B"}, "schedule '1F1B' is none of none, gpipe"),
        ({"recompute": "half"}, "recompute 'half' is none of none, selective, full"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        run(**changes)


def test_an_expert_degree_that_does_not_fit_is_refused():
    mixture = replace(GPT, experts=8, top_k=2)
    with pytest.raises(PlanError, match="ep=3 does not divide the 8 ranks of a stage"):
        step_time(run(model=mixture, tp=1, dp=8, ep=3))
