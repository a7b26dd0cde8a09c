"""Staleness of the asynchronous pipelines: the formulas of the papers, found again by running the calls."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.schedule import Schedule, build, check
from autopar.schedule.asynchronous import in_sequence, staleness, versions_kept, weight_version


def observed(schedule: Schedule, call: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(stage, micro-batch) -> the calls that ran its forward and its backward, seen in calls run one after another."""
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    m = schedule.microbatches
    for now in range(call + schedule.ranks + 1):
        for row in schedule.rows:
            for action in row:
                begun, j = divmod(action.microbatch, m)
                if action.work == "B" and now + begun == call:
                    seen[action.stage, j] = (call, now)
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8])
def test_staleness_is_what_runs_show(ranks: int, microbatches: int) -> None:
    table = build("async-1f1b", ranks, 1, microbatches)
    seen = observed(table, 5)
    assert len(seen) == ranks * microbatches
    for (stage, j), (forward, backward) in seen.items():
        # The forward runs on the weights after `forward` updates; the call of the backward hands the gradient over.
        assert staleness(table, stage, j) == backward - forward
        assert weight_version(table, stage, j, update=backward) == forward


def test_pipedream_with_one_microbatch_a_call() -> None:
    table = build("async-1f1b", 4, 1, 1)
    assert [staleness(table, s, 0) for s in range(4)] == [3, 2, 1, 0]
    assert [versions_kept(table, s) for s in range(4)] == [4, 3, 2, 1]
    assert [weight_version(table, s, 0, 1) for s in range(4)] == [0, 0, 0, 1]


def test_two_buffers_are_one_update_behind_everywhere() -> None:
    table = build("2bw", 4, 1, 4)
    assert {staleness(table, s, j) for s in range(4) for j in range(4)} == {1}
    assert {versions_kept(table, s) for s in range(4)} == {2}
    for (_, _), (forward, backward) in observed(table, 5).items():
        assert backward - forward <= 1  # so that all gradients of a call are there one call later


def test_synchronous_tables_are_never_stale() -> None:
    assert staleness(build("1f1b", 4, 1, 4), 0, 0) == 0


def test_calls_in_sequence_are_one_legal_table() -> None:
    for ranks, microbatches in ((4, 1), (4, 2), (3, 5)):
        table = in_sequence(build("async-1f1b", ranks, 1, microbatches), 6)
        check(table)
        assert table.rows[0][0] == (0, "F", 0)
        assert table.rows[0][-1] == (0, "B", 6 * microbatches - ranks)


def test_refusals() -> None:
    with pytest.raises(PlanError, match="2 micro-batches for 4 ranks; two versions of the weights are enough from 3"):
        build("2bw", 4, 1, 2)
    with pytest.raises(PlanError, match="3 ranks; the two directions need an even number"):
        build("chimera", 3, 1, 4)
    with pytest.raises(PlanError, match="no stage 4 with micro-batch 0"):
        staleness(build("1f1b", 4, 1, 4), 4, 0)
