"""autopar/runtime/launch.py: results by rank; one error for any failure; nothing left running."""

import os
import signal
import time

import pytest

from autopar.errors import AutoparError, PlanError
from autopar.runtime import launch
from autopar.runtime.launch import report, run_ranks_local

HERE = "tests.runtime.test_launch"
COLD = launch.start_launcher  # before the session's fixture


@pytest.fixture
def _cold(monkeypatch):
    """A launcher of its own, as users have it."""
    monkeypatch.setattr(launch, "start_launcher", COLD)


def add_ranks(payload):
    import torch
    from torch import distributed as dist

    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    for i in range(payload["events"]):
        report({"rank": dist.get_rank(), "event": i})
    print("not a result")
    return {"sum": value.item(), "world": dist.get_world_size(), "threads": torch.get_num_threads()}


def fail_on_one(payload):
    from torch import distributed as dist

    if dist.get_rank() == 0:
        with open(payload["pids"], "a") as file:
            file.write(f"{os.getpid()}\n")
    dist.barrier()  # a rank that fails at once ends the other before it has told its number
    if dist.get_rank() == 1:
        if payload["how"] == "ours":
            raise PlanError("params.x: two\nlines")
        if payload["how"] == "signal":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        raise ValueError("not ours")
    dist.barrier()  # never met by rank 1


def sleep(payload):
    with open(payload["pids"], "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(60)


def _gone(pid):
    """Ended; a zombie, which only waits for its parent to ask, has ended too."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.usefixtures("_cold")
def test_every_rank_answers_and_events_arrive():
    seen = []
    results = run_ranks_local(f"{HERE}:add_ranks", 2, {"events": 2}, 60, on_event=seen.append)
    assert results == [{"sum": 1.0, "world": 2, "threads": 1}] * 2
    assert sorted((e["rank"], e["event"]) for e in seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("ours", PlanError, "rank 1: params.x: two lines"),
        ("other", AutoparError, "rank 1: ValueError: not ours"),
        ("signal", AutoparError, "rank 1: ended by SIGABRT; it printed: last words"),
    ],
)
def test_the_first_failure_is_the_error(tmp_path, how, kind, message):
    begin_s = time.monotonic()
    with pytest.raises(AutoparError) as caught:
        run_ranks_local(f"{HERE}:fail_on_one", 2, {"how": how, "pids": str(tmp_path / "pids")}, 60)
    assert type(caught.value) is kind
    assert str(caught.value) == message
    assert time.monotonic() - begin_s < 30
    said = "Traceback" if how != "signal" else "in fail_on_one"  # where each thread was when the signal came
    assert any(said in note for note in caught.value.__notes__)
    assert all(map(_gone, (tmp_path / "pids").read_text().split()))


@pytest.mark.usefixtures("_cold")
def test_the_time_limit_ends_the_ranks(tmp_path):
    with pytest.raises(AutoparError) as caught:
        run_ranks_local(f"{HERE}:sleep", 2, {"pids": str(tmp_path / "pids")}, 4)
    assert str(caught.value) == "ranks 0, 1 did not finish within 4 s"
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert all(map(_gone, pids))
    assert any("in sleep" in note for note in caught.value.__notes__), "the notes say where each rank was"


def test_a_function_that_does_not_exist_is_named():
    with pytest.raises(AutoparError, match=r"rank 0: AttributeError: .*nothing_here"):
        run_ranks_local(f"{HERE}:nothing_here", 2, {}, 60)
