"""The arguments of the command line.

Enters: strings. Leaves: a namespace with pins as a dict and `run`, the command's function.
Refused: malformed meshes, pins and numbers, with argparse's own line and exit status 2.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")
PRECISIONS = ("fp32", "bf16", "fp16")
KERNELS = ("auto", "on", "off")


def parse_pins(text: str) -> dict[str, Any]:
    """`tp=8,sp=true,*.up_proj.weight=tp:S(0)` as a `pin` dict.

    Integers, true and false are read as such, `axis:placement` (several joined by +) as a layout, all else as text.
    Raises: argparse.ArgumentTypeError.
    """
    found: dict[str, Any] = {}
    for item in re.split(r",(?![^(]*\))", text):  # commas inside S(0,3) part nothing
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise argparse.ArgumentTypeError(f"{item!r} is not of the form name=value, as in tp=8,pp=2")
        if key in found:
            raise argparse.ArgumentTypeError(f"{key!r} is pinned twice")
        found[key] = _pin_value(value)
    return found


def _pin_value(value: str) -> Any:
    if value in ("true", "false"):
        return value == "true"
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if ":" in value:
        pairs = (entry.partition(":") for entry in value.split("+"))
        return {axis.strip(): placement.strip() for axis, _, placement in pairs}
    return value


class _AddPins(argparse.Action):
    """`--pin tp=8 --pin pp=2` is `--pin tp=8,pp=2`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest) or {}
        twice = sorted(before.keys() & values.keys())
        if twice:
            parser.error(f"argument {option_string}: {twice[0]!r} is pinned twice")
        setattr(namespace, self.dest, {**before, **values})


def _mesh_shape(text: str) -> str:
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}(x0*[1-9][0-9]{0,8})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 4, 2x8 or 4x2x8 (slowest level first)")
    return text


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _optimizer(text: str) -> str | int:
    if text in ("adamw", "sgd", "none"):
        return text
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is none of adamw, sgd, none, or bytes a parameter")


def make_parser(commands: Mapping[str, Callable[[argparse.Namespace], Any]], version: str) -> argparse.ArgumentParser:
    """The parser; `run` of a namespace is what `commands` has under the command's name."""
    as_json = _group()
    as_json.add_argument("--json", action="store_true", help="print JSON, and nothing else on standard output")
    as_json.add_argument("-o", "--output", metavar="FILE", help="write the JSON to a file, too")
    pins, note = _group(), "decisions to keep; the planner makes the others"
    pins.add_argument("--pin", action=_AddPins, type=parse_pins, metavar="tp=8,pp=2", help=note)

    parser = argparse.ArgumentParser(
        "autopar",
        description="Turn a single-GPU PyTorch model into a distributed program.",
        usage="autopar [-h] [--version] command ...",
    )
    parser.add_argument("--version", action="version", version=f"autopar {version}")
    known = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="command ...",  # sets the column's width: argparse forgets that the commands stand further in
        prog="autopar",
    )

    def add(name: str, about: str, *parents: argparse.ArgumentParser) -> Callable[..., Any]:
        title = f"{about[0].upper()}{about[1:]}."
        made = known.add_parser(name, help=about, description=title, parents=[*parents, as_json, _diagnostics()])
        made.set_defaults(run=commands[name])
        return made.add_argument

    add("plan", "plan a model and print the plan", _model("8", "h100-sxm"), pins)

    option = add("show", "print a plan again")
    option("plan", metavar="plan.json")
    option("--ops", action="store_true", help="with every op, its layouts, bytes and seconds")

    option = add("explain", "each decision of a plan, its runner-up, and what the difference costs")
    option("plan", metavar="plan.json")
    option("pattern", metavar="PATTERN", nargs="?", help="of names: `*` stands for anything; or a part of a name")

    option = add("simulate", "step time, idle time and memory of a plan, by stage")
    option("plan", metavar="plan.json")
    option("--timeline", metavar="FILE", help="write a picture (.png, .svg, .pdf) or a Perfetto / Chrome trace (.json)")

    option = add("verify", "compare local ranks with one device", _model("4", "cpu"), pins)
    option("--dtype", choices=DTYPES, default="float64", help="(default: %(default)s)")
    option("--steps", type=_count, default=1, help="optimizer steps to compare after (default: 1)")
    option("--timeout", type=_positive, default=900, metavar="SECONDS", help="(default: %(default)s)")

    option = add("dump", "write the graph after every pass", _model("8", "h100-sxm"), pins)
    option("--out", required=True, metavar="DIR", help="folder of the NN_after_<pass>.txt files")

    option = add("export", "write the program of a rank as readable Python (-o FILE.py)", _model("8", "h100-sxm"), pins)
    option("--rank", type=int, default=0, help="whose program (default: 0)")
    option("--backward", action="store_true", help="both lowered graphs, not the forward alone under autograd")
    option("--kernels", choices=KERNELS, default="auto", help="print kernels, with --backward (default: for GPUs)")

    option = add("demo", "train a small GPT on local ranks beside one device", pins)
    option("--steps", type=_positive, default=20, help="(default: %(default)s)")
    option("--ranks", type=_positive, default=4, help="(default: %(default)s)")
    option("--timeout", type=_positive, default=600, metavar="SECONDS", help="(default: %(default)s)")

    add("models", "list the zoo with its sizes")

    option = add("validate", "predict published training runs and print the errors")
    option("files", nargs="+", metavar="FILE", help="published runs, .yaml or .csv")
    option("--summary", action="store_true", help="only the tables of errors, no line for each run")

    option = add("calibrate", "measure this machine into a hardware profile (-o machine.json)")
    option("--ranks", type=_positive, help="local ranks, of one thread each (default: the processors)")
    option("--timeout", type=_positive, default=600, metavar="SECONDS", help="(default: %(default)s)")
    return parser


def _group() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(add_help=False)


def _diagnostics() -> argparse.ArgumentParser:
    group = _group()
    group.add_argument("--debug", action="store_true", help="show tracebacks and warnings")
    group.add_argument("-v", "--verbose", action="store_true", help="log a line a stage on standard error")
    return group


def _model(mesh: str, device: str) -> argparse.ArgumentParser:
    """What every command that plans a MODEL takes."""
    options = _group()
    add = options.add_argument
    add("model", metavar="MODEL", help="a name of the zoo, package.module:factory, or hf:PATH (a config.json)")
    add("--mesh", type=_mesh_shape, default=mesh, metavar="2x8", help="nodes x devices (default: %(default)s)")
    add("--device", default=device, metavar=device, help="hardware profile (default: %(default)s)")
    add("--batch", type=_positive, metavar="GLOBAL", help="sequences in the global batch")
    add("--seq", type=_positive, metavar="N", help="tokens a sequence")
    add("--precision", choices=PRECISIONS, help="compute in it, with fp32 master weights")
    add("--memory", metavar="70GiB", help="usable bytes a device (default: the device's, less a reserve)")
    add("--optimizer", type=_optimizer, default="adamw", help="adamw, sgd, none, or bytes a parameter (default: adamw)")
    return options
