"""The tables of the named schedules: torch's own where it has them, and what the papers promise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as reference

from autopar.errors import PlanError
from autopar.plan import SCHEDULES
from autopar.schedule import build
from autopar.schedule.build import KINDS

TORCH = {
    "gpipe": reference.ScheduleGPipe,
    "1f1b": reference.Schedule1F1B,
    "interleaved-1f1b": reference.ScheduleInterleaved1F1B,
    "looped-bfs": reference.ScheduleLoopedBFS,
    "interleaved-zb": reference.ScheduleInterleavedZeroBubble,
    "zb-v": reference.ScheduleZBVZeroBubble,
    "dualpipe-v": reference.ScheduleDualPipeV,
}


def torch_rows(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    """torch's table, its overlapped pairs laid one after the other, idle slots and reductions left out."""
    cls = TORCH[name]
    made = cls.__new__(cls)  # only its table is wanted: no stages, no process group
    made.__dict__ |= {
        "pp_group_size": ranks,
        "_n_microbatches": microbatches,
        "_num_stages": ranks * virtual,
        "num_stages": ranks * virtual,
        "n_local_stages": virtual,
        "_stages": [SimpleNamespace()] * virtual,
        "number_of_rounds": max(1, microbatches // ranks),
        "microbatches_per_round": microbatches // max(1, microbatches // ranks),
    }
    if virtual == 1 and name in ("gpipe", "1f1b"):
        order: dict[int, list[Any]] = made._get_pipeline_order()
    else:
        order = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    flat = {
        rank: [part for a in row if a is not None for part in (a.sub_actions or (a,))] for rank, row in order.items()
    }
    return [[str(a) for a in flat[rank] if a.computation_type.value in "FBIW"] for rank in range(ranks)]


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_tables_equal_torch(name: str, ranks: int) -> None:
    for virtual in [1, 2, 3] if KINDS[name].virtual is None else [KINDS[name].virtual]:
        compared = 0
        for microbatches in (1, 2, 4, 5, 8, 10, 16, 21):
            if name == "1f1b" and microbatches < ranks:
                continue  # torch's table then names micro-batches that do not exist
            if name == "dualpipe-v" and microbatches < 2 * ranks:
                continue  # torch refuses
            if name.startswith("interleaved") and microbatches % max(1, microbatches // ranks):
                continue  # torch refuses
            ours = build(name, ranks, virtual, microbatches)
            rows, wanted = [[str(a) for a in row] for row in ours.rows], torch_rows(name, ranks, virtual, microbatches)
            if name == "1f1b":  # torch prints forwards 1 to m, not 0 to m - 1, on the last rank; it runs them right
                last, stage = wanted.pop(), ranks - 1
                assert rows.pop() == [f"{stage}{work}{j}" for j in range(microbatches) for work in "FB"]
                assert len(last) == 2 * microbatches
            assert rows == wanted
            compared += 1
        assert compared


def test_gpipe_and_1f1b_by_hand() -> None:
    assert str(build("gpipe", 2, 1, 2)) == "rank 0  0F0 0F1 0B0 0B1\nrank 1  1F0 1F1 1B0 1B1"
    assert str(build("1f1b", 2, 1, 3)) == "rank 0  0F0 0F1 0B0 0F2 0B1 0B2\nrank 1  1F0 1B0 1F1 1B1 1F2 1B2"


def test_one_object_for_one_question() -> None:
    assert build("1f1b", 4, 1, 8) is build("1f1b", 4, 1, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 1, 2), "'2f2b' is none of gpipe, 1f1b"),
        (("1f1b", 0, 1, 2), "ranks=0 must be an integer of at least 1"),
        (("1f1b", 2, 1, 0), "microbatches=0 must be"),
        (("1f1b", 2, 3, 2), "virtual_stages=3, but it is made for 1 stage a rank"),
        (("zb-v", 2, 1, 2), "virtual_stages=1, but it is made for 2 stages a rank"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build(*arguments)


def test_names_are_the_plans() -> None:
    assert tuple(KINDS) == SCHEDULES
