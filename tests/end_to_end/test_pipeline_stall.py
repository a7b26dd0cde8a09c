"""A rank that stops in mid-schedule: every rank raises in bounded time, and says what it waited for."""

import contextlib
import json
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.end_to_end import pipeline_stall


@pytest.mark.parametrize("how", ["sleeps", "raises"])
def test_every_rank_is_told(how: str, tmp_path: Path) -> None:
    payload = {"stall_s": 2.0, "how": how, "rank": 1, "folder": str(tmp_path)}
    with contextlib.suppress(AutoparError):  # of the ranks' last barrier
        run_ranks_local(f"{pipeline_stall.__name__}:stop", 2, payload, 120, preload=CAPTURE)
    (first, first_s), (second, second_s) = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first.startswith("RuntimeMismatchError: pipeline rank 0 waited at action 0B2 for gradients of micro-batch 2")
    assert "from stage 1 for stage 0" in first
    assert 1.0 < first_s < 10.0
    if how == "raises":
        assert second == "ValueError: the user's own error"
    else:
        assert second.startswith("RuntimeMismatchError: pipeline rank 1 waited at action"), second
    assert second_s < 15.0


@pytest.mark.slow
def test_a_rank_dies(tmp_path: Path) -> None:
    """Killed in mid-schedule: neighbours and the rank farther away raise one line each, and nobody hangs."""
    payload = {"stall_s": 1.0, "how": "dies", "rank": 2, "folder": str(tmp_path)}
    with pytest.raises(AutoparError, match="rank 2: ended by SIGKILL"):
        run_ranks_local(f"{pipeline_stall.__name__}:stop", 4, payload, 240, preload=CAPTURE)
    assert not (tmp_path / "2").exists()
    for rank in "013":
        said, seconds = json.loads((tmp_path / rank).read_text())
        assert said.startswith(f"RuntimeMismatchError: pipeline rank {rank} waited at action"), said
        assert "its rank is gone" in said
        assert "\n" not in said
        assert seconds < 10.0
