"""The plan: every decision that makes a distributed program of a model, as data.

Enters: what the planner decided, or a JSON file. Leaves: JSON, a digest that ranks compare, a table for people.
Refused: a field that is missing, unknown, of the wrong type or at odds with another one: `PlanError` that names it.
A file is only ever parsed; nothing in it is run.

The program is a function of (model, plan). A plan is keyed by names and layouts, not by sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar import schema
from autopar.errors import PlanError
from autopar.schema import Check, listing, mapping, nullable, pair, record, text

if TYPE_CHECKING:
    from rich.console import RenderableType

VERSION = 1
ROLES = ("pp", "dp", "tp", "cp", "ep")
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zb",
    "zb-h1",
    "zb-2p",
    "zb-v",
    "dualpipe-v",
    "async-1f1b",
    "2bw",
    "chimera",
)
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters")

_count, _positive, _figure, _any_figure = (
    schema.integer(),
    schema.integer(1),
    schema.number(),
    schema.number(-math.inf),
)
_zero = schema.integer(0, 3)
_placement = schema.matching(r"[IRP]|S\([0-9]{1,9}(,[0-9]{1,9})?\)", "a layout: I, R, P, S(dim) or S(dim,blocks)")
_layout = listing(_placement)

_OP = record(
    {
        "strategy": listing(text),
        "inputs": listing(_layout),
        "outputs": listing(_layout),
        "class": text,
        "flop": _figure,
        "bytes": _figure,
        "time_s": _figure,
        "communication_s": _figure,
    },
    {"read": mapping(_layout)},
)

_TRIED = record(
    {"pp": _positive, "microbatches": _positive, "zero": nullable(_zero), "step_time_s": nullable(_figure)},
    {"schedule": text, "recompute": text, "refused": text},
)

_RUNNER_UP = record({"chosen": listing(text), "instead": listing(text), "costs_s": _any_figure, "bytes": _any_figure})

_cut = record({"first_op": text, "last_op": text})


def _block_or_cut(value: Any, path: str) -> Any:
    """A block's name, or a run of ops inside one."""
    return _cut(value, path) if isinstance(value, Mapping) else text(value, path)


def _version(value: Any, path: str) -> int:
    if value != VERSION or isinstance(value, bool):
        schema.refuse(path, f"{schema.shown(value)} is not a version this autopar reads; it reads {VERSION}")
    return VERSION


_FIELDS: dict[str, Check] = {
    "version": _version,
    "model": record(
        {"name": text, "parameters": _count, "digest": text, "batch": _positive, "training": schema.flag},
        {"seq": nullable(_positive)},
    ),
    "mesh": record({"shape": listing(_positive), "device": text}),
    "degrees": record(dict.fromkeys(ROLES, _positive)),
    "axes": listing(
        record({"name": text, "size": _positive, "link": text}, {"role": nullable(schema.one_of(ROLES))}),
    ),
    "zero": _zero,
    "offload": schema.one_of(OFFLOAD),
    "recompute": mapping(schema.one_of(RECOMPUTE)),
    "microbatches": _positive,
    "schedule": schema.one_of(SCHEDULES),
    "virtual_stages": _positive,
    "loss_chunks": _positive,
    "stages": listing(record({"blocks": listing(_block_or_cut), "devices": listing(_count)})),
    "params": mapping(
        record({"layout": listing(pair(text, _placement)), "zero": _zero}, {"shape": listing(_count)}),
    ),
    "ops": mapping(_OP),
    "predicted": record(
        {
            "step_time_s": _figure,
            "tokens_per_s": _figure,
            "tflops_per_device": _figure,
            "mfu": _figure,
            "peak_memory_bytes": listing(_figure),
            "memory": schema.figures,
            "breakdown_s": schema.figures,
        },
        {
            "sends": listing(
                record(
                    {"source": _count, "reader": _count, "size_bytes": _figure, "back_bytes": _figure}
                    | {"time_s": _figure, "back_time_s": _figure}
                )
            ),
            "stage_seconds": schema.mapping(listing(_figure)),
            "weight_versions": listing(_positive),
            "staleness": listing(_count),
        },
    ),
    # A solve that was cut short may have no bound; JSON has no infinity, so it is null then.
    "solver": record(
        {"name": text}
        | dict.fromkeys(("objective", "bound", "gap"), nullable(_any_figure))
        | dict.fromkeys(("capture_s", "price_s", "solve_s", "total_s"), _figure),
        {"tried": listing(_TRIED), "runners_up": mapping(mapping(_RUNNER_UP))},
    ),
    "notes": listing(text),
    "pins": mapping(schema.anything),
}
_OPTIONAL = ("notes", "pins", "loss_chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision for one model on one mesh.

    Fields:  model: name, parameters (a count), digest (hex, of names and shapes), batch, seq when known, training.
             mesh: shape (slowest level first), device. degrees: the effective pp, dp, tp, cp, ep.
             axes: name, size, link, role (pinned, else None), fastest-varying first.
             zero: 0 to 3. offload, recompute (by block class), microbatches, schedule, virtual_stages.
             stages: blocks (names, or {"first_op", "last_op"}) and devices (ranks) of each.
             params: by name: layout, (axis, placement) pairs in the order in which they cut; zero; maybe shape.
             ops: by stable name: strategy (an option an axis), inputs and outputs (a placement an axis for each
             tensor), read (the same for values it takes in another layout), class, flop, bytes, time_s,
             communication_s.
             predicted, solver: figures of the cost model and of the solve. Of a pipeline predicted has sends, too: what
             one stage gives another for a micro-batch; of an asynchronous one, weight_versions and staleness (the most
             updates that gradients are behind) of each stage. notes: lines for people. pins: what the
             user decided. loss_chunks: parts of the rows in which logits and their loss are made.
    Raises:  PlanError: a field is refused; the message starts with its path.
    """

    version: int = VERSION
    model: Mapping[str, Any]
    mesh: Mapping[str, Any]
    degrees: Mapping[str, int]
    axes: tuple[Mapping[str, Any], ...]
    zero: int
    offload: str
    recompute: Mapping[str, str]
    microbatches: int
    schedule: str
    virtual_stages: int
    stages: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Mapping[str, Any]]
    ops: Mapping[str, Mapping[str, Any]]
    predicted: Mapping[str, Any]
    solver: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    pins: Mapping[str, Any] = field(default_factory=dict)
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        for name, check in _FIELDS.items():
            object.__setattr__(self, name, check(getattr(self, name), name))
        for axis in self.axes:
            axis.setdefault("role", None)  # type: ignore[attr-defined]  # the fresh dict that `record` made
        _check_agreement(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data (fresh lists and dicts), in the order of the fields."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` gave. Raises: PlanError."""
        if not isinstance(data, Mapping):
            schema.refuse("", f"a plan is an object, not {schema.shown(data)}")
        if "version" in data:  # first: another version may well have other fields
            _version(data["version"], "version")
        schema.check_names(data, (name for name in _FIELDS if name not in _OPTIONAL), _FIELDS, "")
        return cls(**data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `plan.json`. Raises: OSError."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read `plan.json`; nothing in it is run. Raises: PlanError that names the file and the field."""
        try:
            return cls.from_dict(schema.read_json(Path(path).read_bytes()))
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)}: {error}") from None
        except RecursionError:
            raise PlanError(f"{os.fspath(path)}: lists or objects are nested too deeply") from None
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            reason = getattr(error, "strerror", None) or error
            raise PlanError(f"{os.fspath(path)}: cannot be read: {reason}") from None

    @property
    def digest(self) -> str:
        """sha256 (hex) of the decisions: equal for equal programs, whatever was predicted and however long it took."""
        decisions = {k: v for k, v in self.to_dict().items() if k not in ("predicted", "solver", "notes")}
        return hashlib.sha256(json.dumps(decisions, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def table(self, ops: bool = False) -> RenderableType:
        """The plan as something rich prints. ops: with every op, its layouts, bytes and seconds."""
        from autopar.plan_table import plan_table  # not at the top: ranks compare plans without printing any

        return plan_table(self, ops=ops)

    def __str__(self) -> str:
        from autopar.plan_table import plain_text

        return plain_text(self.table())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _check_agreement(plan: Plan) -> None:
    """What no field says alone: axes against mesh, layouts and stages against axes and ranks."""
    names = [axis["name"] for axis in plan.axes]
    _refuse_repeats(names, "axes")
    devices, ranks = math.prod(plan.mesh["shape"]), math.prod(axis["size"] for axis in plan.axes)
    if not plan.mesh["shape"]:
        schema.refuse("mesh.shape", "is empty")
    if devices != ranks:
        schema.refuse("axes", f"sizes multiply to {ranks}, but mesh.shape has {devices} devices")
    for name, param in plan.params.items():
        path = schema.key_path("params", name) + ".layout"
        for i, (axis, _) in enumerate(param["layout"]):
            if axis not in names:
                schema.refuse(f"{path}[{i}][0]", f"no axis {schema.shown(axis)}; the axes are {', '.join(names)}")
        _refuse_repeats([axis for axis, _ in param["layout"]], path)
    for name, op in plan.ops.items():
        path = schema.key_path("ops", name)
        rows = [("strategy", op["strategy"])]
        rows += [(f"{side}[{i}]", row) for side in ("inputs", "outputs") for i, row in enumerate(op[side])]
        rows += [(schema.key_path("read", value), row) for value, row in op.get("read", {}).items()]
        for part, row in rows:
            if len(row) != len(names):
                schema.refuse(f"{path}.{part}", f"has {len(row)} entries for {len(names)} axes")
    for i, stage in enumerate(plan.stages):
        for j, rank in enumerate(stage["devices"]):
            if rank >= devices:
                schema.refuse(f"stages[{i}].devices[{j}]", f"rank {rank} is not in a mesh of {devices} devices")
        _refuse_repeats(stage["devices"], f"stages[{i}].devices")


def _refuse_repeats(values: Any, path: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            schema.refuse(path, f"{schema.shown(value)} stands twice")
        seen.add(value)
