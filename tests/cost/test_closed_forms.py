"""The closed forms of a step's bubble against the event simulator on the same schedule's table."""

from dataclasses import replace

import pytest

from autopar.cost.fitted import FITTED
from autopar.cost.hardware import load_profile
from autopar.cost.simulate import StageTimes, simulate
from autopar.cost.training import stages, step_time
from autopar.cost.training_run import Run
from autopar.cost.transformer import Transformer
from autopar.schedule.build import build

STILL = replace(FITTED, send_sync_s=0.0, straggler_fraction=0.0, step_s=0.0)
FAST = load_profile("a100-sxm-80gb")
FAST = replace(FAST, links=(replace(FAST.links[0], bandwidth_bytes_per_s=1e18), FAST.links[1]))
SMALL_VOCAB = Transformer(32, 2048, 16, 16, 8192, gated=False, vocab=64, seq=1024)


@pytest.mark.parametrize(
    ("schedule", "virtual", "layers", "bound"),
    [
        ("1f1b", 1, (4,) * 8, 0.01),
        ("1f1b", 1, (4, 4, 4, 8, 4, 4, 2, 2), 0.01),
        ("1f1b", 1, (2, 4, 4, 4, 4, 4, 4, 6), 0.01),
        ("gpipe", 1, (4,) * 8, 0.01),
        ("interleaved-1f1b", 2, (2,) * 16, 0.01),
        ("zb-h1", 1, (4,) * 8, 0.02),
        ("zb-2p", 1, (4,) * 8, 0.08),
        ("zb-v", 2, (2,) * 16, 0.04),
    ],
)
@pytest.mark.parametrize("microbatches", [16, 64])
def test_a_step_takes_what_the_simulator_says(schedule, virtual, layers, bound, microbatches):
    run = Run(SMALL_VOCAB, FAST, 1, 8, 2, microbatches, pp=8, schedule=schedule, virtual=virtual, stage_layers=layers)
    found = step_time(run, STILL)
    ranks = stages(run, STILL)
    table = build(schedule, 8, virtual, microbatches)
    each = [ranks[table.placement[i]] for i in range(len(table.placement))]
    times = StageTimes(
        forward_s=[s.forward_s / virtual for s in each],
        input_grad_s=[s.input_s / virtual for s in each],
        weight_grad_s=[s.weight_s / virtual for s in each],
    )
    expected = simulate(table, times).step_time_s
    assert found.compute_s + found.bubble_s == pytest.approx(expected, rel=bound)
