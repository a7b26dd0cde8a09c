"""Local ranks: run one function on n gloo processes of this machine and collect what each returns.

Enters: `module:function`, the number of ranks, a JSON payload. The function is called as `function(payload)` on every
rank, with the default process group up, and returns JSON data.
Leaves: the results by rank. Refused: nothing; the first rank that fails makes one `AutoparError` of its own class and
ends the others; so does the time limit.

One child process imports what the ranks need and forks them, so that torch is imported once and not n times. It leads
a process group of its own, the one thing that is ever killed; it ends itself when its parent is gone.
Ranks find each other through a file and talk over the loopback interface. Payload, results, errors, events and
printed output are files in a temporary folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from autopar import errors
from autopar.errors import AutoparError

_POLL_S = 0.02
_GRACE_S = 2.0  # what the other ranks get to end, and to tell of their own errors, once one has failed
_OURS = {c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AutoparError)}
_IMPORT_S = 300.0  # the launcher's own limit starts after its imports, which a busy machine makes long
CAPTURE = ("autopar.api", "torch._dynamo", "torch.export._trace")
"""Modules that a rank imports when it plans or runs a model: seconds for each rank, unless they are preloaded."""
_LOST = re.compile(r"(closed|reset) by (remote )?peer|Broken pipe")  # gloo's words for it
_FOLDER = "AUTOPAR_LAUNCH_FOLDER"


def run_ranks_local(
    fn_path: str,
    world: int,
    payload: dict[str, Any],
    timeout_s: float,
    *,
    on_event: Callable[[Any], None] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run `function(payload)` on `world` local ranks.

    Args:    fn_path: `module:function`, importable from the caller's `sys.path`. payload: JSON data.
             timeout_s: for the ranks, from the moment they start (imports are not counted).
             on_event: called here with whatever a rank gives to `report`, soon after.
             preload: modules to import once, before the ranks part, such as `CAPTURE`.
    Returns: what each rank returned, as JSON data.
    Raises:  AutoparError: a rank raised (its own class, when it is one of ours), was ended by a signal or took
             too long; the message names the rank, the notes hold the tracebacks.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        job = {"function": fn_path, "world": world, "payload": payload, "timeout_s": timeout_s}
        job["preload"] = list(preload)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        child = start_launcher(folder)
        try:
            _follow(child, folder, timeout_s, on_event)
        finally:
            if child.poll() != 0:  # a launcher that ends well has waited for every rank
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody of its group is left
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return _results(folder, world, timeout_s)


def start_launcher(folder: Path) -> subprocess.Popen[bytes]:
    """The process that imports and forks, in a session of its own; what it prints goes to `launcher.txt`."""
    with open(folder / "launcher.txt", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "autopar.runtime.launch", str(folder)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def report(event: Any) -> None:
    """On a rank: hand JSON data to the caller's `on_event`."""
    line = json.dumps(event) + "\n"
    with open(Path(os.environ[_FOLDER]) / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(line)  # one write of one line: ranks do not mix theirs


def environment() -> dict[str, str]:
    """The child's: one thread a rank, the caller's import path, the loopback interface."""
    path = [entry or os.getcwd() for entry in sys.path]
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}
    # gloo would look the host's name up, which fails or takes seconds where it has no address.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return found


def _follow(
    child: subprocess.Popen[bytes], folder: Path, timeout_s: float, on_event: Callable[[Any], None] | None
) -> None:
    """Wait for the child, handing events on; returns when it has ended or is out of time."""
    end_s, read = time.monotonic() + _IMPORT_S + timeout_s + 2 * _GRACE_S, 0
    running = True
    while running and time.monotonic() < end_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
        running = child.poll() is None
        if on_event is not None:
            with contextlib.suppress(FileNotFoundError), open(folder / "events.jsonl", "rb") as file:
                file.seek(read)
                whole, newline, _ = file.read().rpartition(b"\n")
                read += len(whole) + len(newline)
                for line in whole.splitlines():
                    on_event(json.loads(line))


def _results(folder: Path, world: int, timeout_s: float) -> list[Any]:
    paths = [folder / f"result.{rank}.json" for rank in range(world)]
    told = (json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("error.*.json"))
    # What failed first is the cause. A rank that lost a neighbour is none, and may be faster to say so than we are to
    # see a neighbour that a signal ended.
    failures = sorted(told, key=lambda f: (bool(_LOST.search(f["message"])), f["at_s"]))
    if not failures and all(p.exists() for p in paths):
        return [json.loads(p.read_text(encoding="utf-8")) for p in paths]
    if failures:
        first = failures[0]
        kind = _OURS.get(first["kind"])
        prefix = f"{first['kind']}: " if kind is None else ""
        error = (kind or AutoparError)(f"rank {first['rank']}: {prefix}{first['message']}")
    else:
        late = [str(rank) for rank, p in enumerate(paths) if not p.exists()]
        named = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(late)}"
        error = AutoparError(f"{named} did not finish within {timeout_s:g} s{_said(folder / 'launcher.txt')}")
    for failure in failures:
        error.add_note(f"rank {failure['rank']}:\n{failure['traceback']}")
    for path in sorted((*folder.glob("output.*.txt"), *folder.glob("stacks.*.txt"))):
        error.add_note(f"{path.name}: {path.read_text(errors='replace')[-4000:]}")
    raise error


def _said(path: Path) -> str:
    """The last line a process printed."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.exists() else []
    return f"; it printed: {lines[-1].strip()}" if lines else ""


def launch(folder: Path) -> int:
    """The child: import, fork the ranks, wait. Returns its exit status."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    os.environ[_FOLDER] = str(folder)
    parent = os.getppid()
    try:
        function = _resolve(job["function"])
        for module in ("torch.distributed", *job["preload"]):
            importlib.import_module(module)
    except Exception as error:
        _write_error(folder, 0, error)
        return 1
    ranks = {_fork(folder, rank, job, function): rank for rank in range(job["world"])}
    end_s, status = time.monotonic() + job["timeout_s"], 0
    while ranks and time.monotonic() < end_s and os.getppid() == parent:
        for pid, code in _ended(ranks):
            rank = ranks.pop(pid)
            if code and not status:
                status, end_s = 1, min(end_s, time.monotonic() + _GRACE_S)
            if code < 0 and not (folder / f"error.{rank}.json").exists():
                said = _said(folder / f"output.{rank}.txt")
                _write_error(folder, rank, AutoparError(f"ended by {signal.Signals(-code).name}{said}"))
        time.sleep(_POLL_S)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 1 if ranks else status


def _ended(ranks: dict[int, int]) -> Iterator[tuple[int, int]]:
    for pid in list(ranks):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            yield pid, os.waitstatus_to_exitcode(status)


def _fork(folder: Path, rank: int, job: dict[str, Any], function: Callable[[Any], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(folder / f"output.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _rank(folder, rank, job, function)
        code = 0
    except BaseException as error:
        _write_error(folder, rank, error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: the launcher's own clean-up must not run in a copy of it.
        os._exit(code)
    return pid


def _rank(folder: Path, rank: int, job: dict[str, Any], function: Callable[[Any], Any]) -> None:
    import torch
    from torch import distributed

    world, timeout_s = job["world"], job["timeout_s"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    stacks = open(folder / f"stacks.{rank}.txt", "w")  # until the rank ends, also by a signal
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(max(timeout_s - 1.0, timeout_s / 2))  # into the rank's output: where it hangs
    store = distributed.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]  # not in its __all__
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=max(1.0, timeout_s))
    )
    result = json.dumps(function(job["payload"]))
    # Nobody leaves while another still talks to it.
    distributed.barrier()
    distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    _write(folder / f"result.{rank}.json", result)


def _write_error(folder: Path, rank: int, error: BaseException) -> None:
    told = {
        "rank": rank,
        "kind": type(error).__name__,
        "message": " ".join(str(error).split()),
        "traceback": "".join(traceback.format_exception(error)),
        "at_s": time.time(),
    }
    _write(folder / f"error.{rank}.json", json.dumps(told))


def _write(path: Path, content: str) -> None:
    """At once: a reader sees all of it or no file."""
    part = path.with_suffix(".part")
    part.write_text(content, encoding="utf-8")
    part.replace(path)


def _resolve(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return found


def _main() -> NoReturn:
    sys.exit(launch(Path(sys.argv[1])))


if __name__ == "__main__":
    _main()
