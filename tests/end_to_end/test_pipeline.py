"""Pipelines train like one device, in float64: losses, norms of clipped gradients, gradients, parameters after three
AdamW steps, whatever the cut, the schedule, the micro-batches and what lies inside the stages.
"""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.ahead import Ahead, scratch
from tests.end_to_end import pipeline_uses
from tests.end_to_end.pipeline import run_cases

pytestmark = pytest.mark.timeout(600)  # one start of ranks makes up several tests
BOUND = 1e-9
LOWER = {"hf-gpt2": 1e-6, "hf-llama": 1e-6}

TWO = [
    ["gpt", "2", 8, {"pin": {"pp": 2, "microbatches": 4}}],
    ["gpt-tied", "2", 8, {"pin": {"pp": 2, "microbatches": 3, "schedule": "gpipe"}}],
    ["mixed", "2", 8, {"pin": {"pp": 2, "microbatches": 8}}],
    ["gpt-tied", "2", 8, {"pin": {"pp": 2, "microbatches": 3, "schedule": "chimera"}}],
]
BOTH_WAYS = [
    ["mixed", "2", 8, {"pin": {"pp": 2, "microbatches": 3, "schedule": "chimera"}, "outputs": "gather"}],
    ["unet", "2", 8, {"pin": {"pp": 2, "microbatches": 4, "schedule": "chimera"}, "backend": "eager"}],
    ["t5", "2", 8, {"pin": {"pp": 2, "microbatches": 1, "schedule": "chimera"}}],
]
BOTH_WAYS_OF_FOUR = [
    ["gpt", "4", 8, {"pin": {"pp": 4, "microbatches": 4, "schedule": "chimera"}}],
    ["gpt-tied", "4", 8, {"pin": {"pp": 4, "microbatches": 8, "schedule": "chimera"}, "backend": "eager"}],
    ["gpt", "2x2", 8, {"pin": {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "chimera"}}],
    ["gpt", "4", 8, {"pin": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2, "schedule": "chimera"}}],
]
FOUR = [
    ["gpt", "4", 8, {"pin": {"pp": 4, "microbatches": 3}}],
    ["gpt", "2x2", 8, {"pin": {"pp": 2, "tp": 2, "microbatches": 2}}],
    ["gpt", "4", 8, {"pin": {"pp": 2, "dp": 2, "microbatches": 2}}],
    ["gpt-tied", "2x2", 8, {"pin": {"pp": 2, "zero": 3, "dp": 2, "microbatches": 3}}],
]

USES = ("unasked", "scaled", "another batch", "eval", "sharded batch", "loaded", "input gradient", "dropout", "scaler")

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-2p", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2)]
SCHEDULES += [("interleaved-zb", 2), ("zb-v", 2), ("dualpipe-v", 2)]
MODELS = ("gpt", "hf-llama", "hf-gpt2", "gpt-tied", "t5", "unet", "mixed")
INSIDE = ({"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "dp": 2, "zero": 3})


def _scheduled(pin, schedule, microbatches):
    name, virtual = schedule
    virtual = {} if name in ("zb-v", "dualpipe-v") else {"virtual_stages": virtual}
    return {**pin, **virtual, "schedule": name, "microbatches": microbatches}


def _pinned(model, mesh, pin, schedule, microbatches, backend):
    return [model, mesh, 8, {"pin": _scheduled(pin, schedule, microbatches), "backend": backend}]


MEMORY = [_scheduled({"pp": 2}, schedule, 4) for schedule in (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2))]
MORE_MEMORY = [_scheduled({"pp": 2}, schedule, 4) for schedule in (*SCHEDULES[2:], ("chimera", 1))]
MEMORY_OF_FOUR = [_scheduled({"pp": 4}, schedule, 8) for schedule in SCHEDULES if schedule[1] == 1]


# Pairs: every model with every schedule, and every inside with every model, micro-batches and backends in turn.
EVERY_TWO = [
    _pinned(model, "2", {"pp": 2}, schedule, (1, 2, 3, 4, 8)[(i + j) % 5], ("aot", "eager")[(i + j) % 2])
    for i, model in enumerate(MODELS)
    for j, schedule in enumerate(SCHEDULES)
]
EVERY_FOUR = [
    _pinned(model, "4", pin, SCHEDULES[(2 * i + j) % 6 if pin["pp"] == 4 else (2 * i + j) % 9], 2 + i % 3, "aot")
    for i, model in enumerate(MODELS)
    for j, pin in enumerate(INSIDE)
    if not (model == "unet" and "tp" in pin)
]


def check(case, found):
    model, _, _, options = case
    bound = LOWER.get(model, BOUND)
    for rank, result in enumerate(found):
        where = f"{case}, rank {rank}"
        assert "refused" not in result, f"{where}: {result['refused']}"
        assert max(*result["losses"], *result["norms"], result["eval"]) <= bound, f"{where}: {result}"
        for what in ("grads", "params"):
            worst = max(result[what], key=result[what].get)
            allowed = 1e-4 if model in LOWER and what == "params" else bound
            assert result[what][worst] <= allowed, f"{where}: {what} {worst}: {result[what][worst]:.2e}"
        assert result["degrees"]["pp"] == options["pin"]["pp"]
        everything = options["pin"].get("schedule") == "chimera" and options["pin"]["pp"] == 2
        assert (result["held"] < len(result["grads"])) != everything, f"{where}: holds {result['held']} parameters"


def check_all(cases, world, timeout_s):
    preload = (*CAPTURE, "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
    target = "tests.end_to_end.pipeline:run_cases"
    results = run_ranks_local(target, world, {"cases": cases}, timeout_s, preload=preload)
    for case, *found in zip(cases, *results, strict=True):
        check(case, found)


RUN = Ahead(
    f"{pipeline_uses.__name__}:everything",
    2,
    lambda items: {"cases": TWO, "pins": MEMORY, "path": f"{scratch()}/checkpoint"},
    800,
)
"""One start of two ranks serves most tests of this file."""


@pytest.mark.reads(RUN)
def test_two_ranks():
    for case, *found in zip(TWO, *(rank["parity"] for rank in RUN.results()), strict=True):
        check(case, found)


@pytest.mark.reads(RUN)
def test_bytes_kept_for_the_backward():
    """Within a tenth of the memory model by stage, and as many micro-batches as the schedule promises."""
    check_memory(MEMORY, [rank["memory"] for rank in RUN.results()])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pins", [MORE_MEMORY, MEMORY_OF_FOUR], ids=["two", "four"])
def test_bytes_kept_by_every_schedule(pins):
    target = "tests.end_to_end.pipeline_memory:run_cases"
    check_memory(pins, run_ranks_local(target, pins[0]["pp"], {"pins": pins}, 600, preload=CAPTURE))


def check_memory(pins, ranks):
    for rank in ranks:
        for pin, found in zip(pins, rank, strict=True):
            assert found["in_flight"] == found["promised"], pin
            assert found["left"] == 0, f"{pin}: kept after the call"
            held, expected = found["gradients"], found["predicted_gradients"]
            assert abs(held - expected) <= 0.05 * expected, f"{pin}: {held} bytes of gradients, {expected} predicted"
            for stage, measured in found["measured"].items():
                predicted = found["predicted"][stage]
                assert abs(predicted - measured) <= 0.1 * measured, f"{pin}, stage {stage}: {predicted}, {measured}"


@pytest.mark.reads(RUN)
def test_uses():
    """What training loops do with a pipeline: scaling, other batches, evaluation, gradients of inputs."""
    for found in (rank["uses"] for rank in RUN.results()):
        for use in USES:
            assert isinstance(found[use], float), f"{use}: {found[use]}"
            assert found[use] <= BOUND, f"{use}: {found[use]}"
        assert found["together"] == {"None": [True, None], "False": [False, False]}
        assert "handed over once" in found["twice"]
        assert "outputs='gather'" in found["another output"]
        done, of = found["handed over"].split(" of ")
        assert done == of


@pytest.mark.reads(RUN)
def test_a_checkpoint_goes_into_another_layout():
    assert [rank["checkpoint"] for rank in RUN.results()] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks():
    check_all(FOUR, 4, 280)


@pytest.mark.slow
def test_both_directions_on_two_ranks():
    check_all(BOTH_WAYS, 2, 250)


@pytest.mark.slow
def test_both_directions_on_four_ranks():
    check_all(BOTH_WAYS_OF_FOUR, 4, 280)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_schedule_on_two_ranks():
    check_all(EVERY_TWO, 2, 3500)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_inside_on_four_ranks():
    check_all(EVERY_FOUR, 4, 3500)


def test_micro_batches_on_one_device():
    """With one stage, micro-batches are accumulation inside the call."""
    (found,) = run_cases({"cases": [["gpt", "1", 8, {"pin": {"microbatches": 3}}]]})
    assert "refused" not in found, found
    assert max(found["losses"]) <= BOUND
    assert max(found["grads"].values()) <= BOUND
