"""The command line: `autopar plan|show|explain|simulate|verify|dump|export|demo|models|validate|calibrate`.

Enters: arguments. Leaves: a table, or with --json one JSON document and nothing else, on standard output; exit status
0 done, 1 an error of ours or a comparison that failed (one line on standard error, a traceback only with --debug),
2 bad usage. Refused: unknown commands, options, models and malformed pins, as bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import autopar
from autopar.cli_arguments import make_parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.load_model import LoadedModel
    from autopar.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command found: the same as data and for people."""

    data: Any
    text: RenderableType | None
    status: int = 0


class UsageError(Exception):
    """Bad usage that only shows once a command runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. argv: without the program's name; None takes `sys.argv`. Returns: the exit status."""
    try:
        args = make_parser(COMMANDS, autopar.__version__).parse_args(argv)
    except SystemExit as end:  # argparse has printed its line
        return int(end.code or 0)
    try:
        _check_writable(args)
        with _quiet(args):
            outcome: Outcome = args.run(args)
        _show(outcome, args)
        return outcome.status
    except UsageError as error:
        print(f"autopar {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `autopar ... | head`: nobody reads on, and Python's last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        else:
            print(f"autopar: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1


def command() -> NoReturn:
    """The process of `autopar ...`: ends at once, since taking a plan's million objects apart would take a second."""
    status = main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def plan(args: argparse.Namespace) -> Outcome:
    """`autopar plan MODEL`."""
    from autopar import api
    from autopar.console import progress

    mesh = _mesh(args)
    loaded = _load(args, mesh)
    with progress(f"planning {loaded.name}") as tell:
        found = api.plan(loaded.module, mesh, **_planning(args, loaded), progress=tell)
    return Outcome(found.to_dict(), found.table())


def show(args: argparse.Namespace) -> Outcome:
    """`autopar show plan.json`."""
    from autopar.plan import Plan

    found = Plan.load(args.plan)
    return Outcome(found.to_dict(), found.table(ops=args.ops))


def explain(args: argparse.Namespace) -> Outcome:
    """`autopar explain plan.json [PATTERN]`: each decision, its runner-up, and what the difference costs."""
    from autopar.explain import explain as explained
    from autopar.plan import Plan

    found = explained(Plan.load(args.plan), args.pattern)
    return Outcome(found.to_dict(), found.table())


def simulate(args: argparse.Namespace) -> Outcome:
    """`autopar simulate plan.json`: step time, memory by stage, and the timeline."""
    from pathlib import Path

    from autopar import simulation
    from autopar.cost import picture
    from autopar.plan import Plan

    found = simulation.simulate_plan(Plan.load(args.plan))
    data = found.to_dict()
    if args.timeline:
        title = f"{found.plan.model['name']}: {found.plan.schedule}, {found.plan.microbatches} micro-batches"
        data["timeline"] = str(picture.write(found.timeline, Path(args.timeline), found.held, title))
    return Outcome(data, found.table())


def verify(args: argparse.Namespace) -> Outcome:
    """`autopar verify MODEL`: ranks of this machine against one device."""
    from autopar.console import progress
    from autopar.runtime.launch import CAPTURE, run_ranks_local

    names = ("model", "mesh", "device", "batch", "seq", "precision", "memory", "pin", "optimizer", "dtype", "steps")
    payload, ranks = {name: getattr(args, name) for name in names}, _mesh(args).size
    with progress(f"verifying {args.model} on {ranks} ranks"):
        reports = run_ranks_local("autopar.cli:verify_rank", ranks, payload, args.timeout, preload=CAPTURE)
    usage = next((r["usage"] for r in reports if "usage" in r), None)
    if usage is not None:
        raise UsageError(usage)
    # Every rank compares what it holds: the first that differs speaks for all.
    report = next((r for r in reports if not r["equal"]), reports[0])
    return Outcome(report, _report_text(report), 0 if report["equal"] else 1)


def verify_rank(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One rank of `verify`. Returns: the report, or {"usage": message} when the model's name or sizes are no good."""
    import torch

    args = argparse.Namespace(**payload)
    mesh = _mesh(args)
    torch.manual_seed(0)  # the same weights on every rank
    try:
        loaded = _load(args, mesh, device="cpu")
    except UsageError as error:
        return {"usage": str(error)}
    report = autopar.verify(loaded.module, mesh, dtype=args.dtype, steps=args.steps, **_planning(args, loaded))
    found: dict[str, Any] = report.to_dict()
    return found


def dump(args: argparse.Namespace) -> Outcome:
    """`autopar dump MODEL --out DIR`."""
    from pathlib import Path

    from rich.text import Text

    from autopar import api
    from autopar.console import progress

    mesh = _mesh(args)
    loaded = _load(args, mesh)
    folder = Path(args.out)
    begun = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} if folder.is_dir() else {}
    with progress(f"dumping {loaded.name}") as tell:
        api.plan(loaded.module, mesh, **_planning(args, loaded), dump_dir=args.out, progress=tell)
    files = sorted(p for p in folder.iterdir() if p.is_file() and begun.get(p.name) != p.stat().st_mtime_ns)
    return Outcome({"files": [str(p) for p in files]}, Text("\n".join(map(str, files))))


def export(args: argparse.Namespace) -> Outcome:
    """`autopar export MODEL -o FILE.py`."""
    from rich.text import Text

    from autopar.console import progress
    from autopar.export import export_text

    if not args.output:
        raise UsageError("export writes a file: give -o FILE.py")
    mesh = _mesh(args)
    loaded = _load(args, mesh)
    with progress(f"exporting {loaded.name}") as tell:
        options = {"rank": args.rank, "backward": args.backward, "kernels": args.kernels}
        text = export_text(loaded.module, mesh, **options, **_planning(args, loaded), progress=tell)
    file, args.output = args.output, None  # what this command writes is the program, not its outcome
    with open(file, "w", encoding="utf-8") as out:
        out.write(text)
    return Outcome({"file": file, "rank": args.rank, "lines": text.count("\n")}, Text(file))


def demo(args: argparse.Namespace) -> Outcome:
    """`autopar demo`."""
    from autopar import demo as small
    from autopar.demo_table import DemoTable

    options = {"pin": args.pin, "steps": args.steps, "ranks": args.ranks, "timeout_s": args.timeout}
    if args.json:
        result = small.run(**options)
        return Outcome(result, None, 0 if result["equal"] else 1)
    with DemoTable(args.steps, args.ranks) as table:
        result = small.run(**options, on_event=table.on_event)
    return Outcome(result, table.verdict(result), 0 if result["equal"] else 1)


def models(args: argparse.Namespace) -> Outcome:
    """`autopar models`: the zoo."""
    from rich import box
    from rich.table import Table

    from autopar.console import count
    from autopar.models import SIZES, build

    table = Table(box=box.SIMPLE_HEAD)
    columns = ("name", "parameters", "layers", "width", "heads", "vocab", "context")
    for column in columns:
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    table.add_column("source", overflow="fold")
    rows = []
    for name, entry in SIZES.items():
        made = build(name, batch=1, seq=1)
        sizes = {key: getattr(entry.config, key, None) for key in columns[2:]}  # a ResNet has no heads
        rows.append(
            {"name": name, "parameters": sum(p.numel() for p in made.parameters()), **sizes, "source": entry.source}
        )
        paper = entry.source.partition(";")[0].partition(",")[0]
        shown = ("" if size is None else str(size) for size in sizes.values())
        table.add_row(name, count(rows[-1]["parameters"]), *shown, paper)
    return Outcome(rows, table)


def validate(args: argparse.Namespace) -> Outcome:
    """`autopar validate FILES`: published runs, predicted and compared."""
    from autopar import validate as published

    data = published.report(args.files)
    return Outcome(data, None if args.json else published.table(data, rows=not args.summary))


def calibrate(args: argparse.Namespace) -> Outcome:
    """`autopar calibrate`: this machine as a hardware profile."""
    from autopar import calibrate as machine
    from autopar.console import progress

    ranks = args.ranks or os.cpu_count() or 1
    with progress(f"measuring {ranks} ranks of this machine") as tell:
        measured = machine.measure(ranks, args.timeout, tell)
    data = machine.profile_data(measured, ranks)
    return Outcome(data, None if args.json else machine.table(measured, data, ranks))


COMMANDS = {
    "plan": plan,
    "show": show,
    "explain": explain,
    "simulate": simulate,
    "verify": verify,
    "dump": dump,
    "export": export,
    "demo": demo,
    "models": models,
    "validate": validate,
    "calibrate": calibrate,
}


def _check_writable(args: argparse.Namespace) -> None:
    """Before the work begins: can what the command will write be written? Raises: UsageError."""
    for option, of_folder in (("output", False), ("timeline", False), ("out", True)):
        path = getattr(args, option, None)
        wrong = _unwritable(path, of_folder) if path else None
        if wrong is not None:
            raise UsageError(f"cannot write {path}: {wrong}")


def _unwritable(given: str, of_folder: bool) -> str | None:
    """Why a file cannot be written, or files in a folder that is made when needed; None: they can."""
    from pathlib import Path

    path = Path(given).absolute()
    if path.exists() and not of_folder:
        return "it is a folder" if path.is_dir() else None if os.access(path, os.W_OK) else "it is not writable"
    folder = next(p for p in (path, *path.parents) if p.exists()) if of_folder else path.parent
    if not folder.is_dir():
        return f"{folder} is no folder"
    return None if os.access(folder, os.W_OK) else f"{folder} is not writable"


def _mesh(args: argparse.Namespace) -> Mesh:
    from autopar.mesh import Mesh

    return Mesh(args.mesh, device=args.device)


def _load(args: argparse.Namespace, mesh: Mesh, device: str = "meta") -> LoadedModel:
    from autopar.load_model import ModelNameError, load_model

    # One row a device at least, so that the zoo's models can be split over the whole mesh by default.
    in_zoo = ":" not in args.model
    batch = max(8, mesh.size) if args.batch is None and in_zoo else args.batch
    try:
        return load_model(args.model, batch=batch, seq=args.seq, device=device)
    except ModelNameError as error:
        raise UsageError(str(error)) from None


def _planning(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """The arguments that plan, verify and parallelize share."""
    return {
        "example_args": loaded.args,
        "example_kwargs": loaded.kwargs,
        "pin": args.pin or None,
        "memory": args.memory,
        "precision": args.precision,
        "optimizer": args.optimizer,
    }


def _report_text(report: Mapping[str, Any]) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "largest error"):
        table.add_column(name, justify="right" if name else "left")
    for name, error in report["max_error"].items():
        table.add_row(Text(name.replace("_", " ")), "-" if error is None else f"{error:.2e}")
    chosen = ", ".join(f"{key} {value}" for key, value in _flat(report.get("plan", {})))
    loss = report.get("loss")
    lines = [f"{report['world_size']} ranks, {report['dtype']}; {chosen}"]
    lines += [f"loss {loss[0]!r} on one device, {loss[1]!r} on the mesh"] if loss else []
    lines += [f"largest at {report['worst']}"] if report.get("worst") else []
    verdict = Text("equal", style="bold green") if report["equal"] else Text("NOT EQUAL", style="bold red")
    return Group(*(Text(line) for line in lines), table, verdict)


def _flat(chosen: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in chosen.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


@contextlib.contextmanager
def _quiet(args: argparse.Namespace) -> Iterator[None]:
    """Keep what libraries print off standard output when it must hold JSON alone, and their warnings off the screen."""
    with contextlib.ExitStack() as stack:
        if args.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not args.debug:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        if args.verbose:
            handler, logger = logging.StreamHandler(), logging.getLogger("autopar")
            level = logger.level
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            stack.callback(logger.setLevel, level)
            stack.callback(logger.removeHandler, handler)
        yield


def _show(outcome: Outcome, args: argparse.Namespace) -> None:
    data = json.dumps(_json(outcome.data), indent=1, allow_nan=False) if args.json or args.output else ""
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(data + "\n")
    if args.json:
        print(data)
    elif outcome.text is not None:
        from autopar.console import stdout_console

        stdout_console().print(outcome.text)
    sys.stdout.flush()


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, Mapping):
        return {key: _json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
