"""Runs of ranks that go on beside the tests that need none: ranks keep two cores busy, the other tests one.

Enters: `Ahead`, a run of ranks as `run_ranks_local` takes it, and tests marked `reads(RUN)`. Leaves: the runs that the
chosen tests read, one after another from the moment all tests are collected, and those tests last of all; `results`
waits. Refused: nothing; a run that nobody announced starts when it is read, and one that failed raises there.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from autopar.runtime import launch

MOST_S = 1500.0
"""What a test may wait: for its own run and all before it, on a busy machine."""


class Ahead:
    """One run. payload: JSON data, or what makes it from the chosen tests when the run starts."""

    def __init__(
        self,
        function: str,
        world: int,
        payload: dict[str, Any] | Callable[[list[pytest.Item]], dict[str, Any]],
        timeout_s: float,
        preload: tuple[str, ...] = launch.CAPTURE,
    ) -> None:
        self.function, self.world, self.payload = function, world, payload
        self.timeout_s, self.preload = timeout_s, preload
        self.found: Future[list[Any]] | None = None

    def run(self, items: list[pytest.Item]) -> list[Any]:
        payload = self.payload(items) if callable(self.payload) else self.payload
        return launch.run_ranks_local(self.function, self.world, payload, self.timeout_s, preload=self.preload)

    def results(self) -> list[Any]:
        """What each rank returned."""
        if self.found is None:
            return self.run([])
        return self.found.result()


class Runs:
    """Of a test session."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, initializer=_remember)

    def start(self, items: list[pytest.Item]) -> None:
        for run in dict.fromkeys(run for item in items for run in read_by(item)):
            run.found = self.threads.submit(run.run, items)

    def end(self, stop: Callable[[], None]) -> None:
        """stop: ends ranks that still run, after a test session that was broken off."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        stop()
        self.threads.shutdown()
        for folder in _FOLDERS:
            shutil.rmtree(folder, ignore_errors=True)


_FOLDERS: list[str] = []
_THREAD = threading.local()


def _remember() -> None:
    """Tests change the environment while the runs of this thread start."""
    _THREAD.environment = launch.environment()


def environment() -> dict[str, str]:
    """For ranks: the process's own, in the thread of the runs as it was in the beginning."""
    found: dict[str, str] = getattr(_THREAD, "environment", None) or launch.environment()
    return found


def scratch() -> str:
    """A folder for a run, until the session ends."""
    _FOLDERS.append(tempfile.mkdtemp(prefix="autopar-test-"))
    return _FOLDERS[-1]


def read_by(item: pytest.Item) -> list[Ahead]:
    return [run for mark in item.iter_markers("reads") for run in mark.args]


def last(items: list[pytest.Item]) -> None:
    """Put the tests that read runs behind the others, and let them wait."""
    readers = [item for item in items if read_by(item)]
    for item in readers:
        item.add_marker(pytest.mark.timeout(MOST_S))
    items[:] = [*(item for item in items if not read_by(item)), *readers]
