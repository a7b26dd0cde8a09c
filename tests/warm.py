"""A launcher of ranks that has its imports behind it: one process a test session, which forks one for each run.

Enters: folders of jobs, as `autopar.runtime.launch` writes them. Leaves: launchers that differ from its own in nothing
but that torch and our modules are there already, seconds of every start. Refused: nothing. It ends when its input
does, so with the tests; the launchers that it forked see that and end, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.runtime import launch
from tests.ahead import environment

IMPORTS = (
    *launch.CAPTURE,
    "functorch.compile",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
POLL_S = 0.02
ENDED = "ended"
"""File with the exit status of a forked launcher."""


class Forked:
    """Of a launcher that another process forked, what `run_ranks_local` asks of a `subprocess.Popen`."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.folder = pid, folder

    def poll(self) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder / ENDED).read_text())
        return None

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (timeout if timeout is not None else 60.0)
        while (status := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("launcher", timeout or 60.0)
            time.sleep(POLL_S / 4)
        return status


class Warm:
    """Starts launchers; its process is there from the first one on."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.one = threading.Lock()
        self.forked: list[Forked] = []

    def __call__(self, folder: Path) -> Forked:
        with self.one:
            return self.fork(folder)

    def fork(self, folder: Path) -> Forked:
        if self.server is None or self.server.poll() is not None:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm"],
                env=launch.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps({"folder": str(folder), "environment": environment()}), file=self.server.stdin, flush=True)
        self.forked.append(Forked(int(self.server.stdout.readline()), folder))
        return self.forked[-1]

    def stop(self) -> None:
        for launcher in self.forked:
            if launcher.folder.exists() and launcher.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)

    def end(self) -> None:
        if self.server is not None:
            self.server.communicate(timeout=60)


@contextlib.contextmanager
def warm_launchers() -> Iterator[Warm]:
    """While `run_ranks_local` forks its launchers instead of starting them."""
    warm = Warm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_launcher", warm)
        try:
            yield warm
        finally:
            warm.end()


def serve() -> None:
    """The process: import, then fork a launcher for each line of standard input."""
    for module in ("torch.distributed", *IMPORTS):
        importlib.import_module(module)
    folders: dict[int, Path] = {}
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            job = json.loads(line)
            folder = Path(job["folder"])
            pid = os.fork()
            if not pid:
                become_launcher(folder, job["environment"])
            folders[pid] = folder
            print(pid, flush=True)
        while folders and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            part = folders[pid] / "ended.part"
            with contextlib.suppress(FileNotFoundError):  # nobody waits any more
                part.write_text(str(os.waitstatus_to_exitcode(status)))
                part.replace(folders.pop(pid) / ENDED)


def become_launcher(folder: Path, environment: dict[str, str]) -> None:
    """In the fork: what `python -m autopar.runtime.launch` would be."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(folder / "launcher.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if entry not in sys.path]
        code = launch.launch(folder)
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
    os._exit(0)  # taking all modules apart would take seconds
