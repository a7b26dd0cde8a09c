"""A plan as tables for people.

Enters: a `Plan`. Leaves: something rich prints: a summary, the stages, the parameters by layout, the ops.
Equal layers are folded: `layers.*.mlp.up_proj.weight  x32` is one row; `layers.{0-3}...` where only some agree.
Names are printed as they are (rich's markup is not read in them).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autopar.console import count, plain_text, seconds, size

if TYPE_CHECKING:
    from autopar.plan import Plan

__all__ = ["fold", "masked", "plain_text", "plan_table", "summary"]

SHAPES = 6
"""Rows of the shapes that were compared."""
# Numbers in the module path alone: in `layers.0.mlp/linear/2` the 2 tells two ops of one layer apart.
_INDEX = re.compile(r"(?:(?<=\.)|^)[0-9]+(?=\.|/|$)")


def plan_table(plan: Plan, ops: bool = False) -> RenderableType:
    """The whole plan. ops: with every op, its layouts, bytes and seconds."""
    parts: list[RenderableType] = [summary(plan)]
    if len(plan.stages) > 1:
        parts.append(_stages(plan))
    if plan.solver.get("tried"):
        parts.append(_tried(plan))
    parts.append(_params(plan))
    if ops:
        parts += [_classes(plan), _ops(plan)]
    parts += _whole(plan)
    if plan.notes:
        parts.append(_lines("notes", plan.notes))
    return Group(*parts)


def summary(plan: Plan) -> Panel:
    """Model, mesh, decisions, predictions and what the solve took."""
    model, predicted, solver = plan.model, plan.predicted, plan.solver
    batch = f"batch {model['batch']}" + (f" x {model['seq']} tokens" if model.get("seq") else "")
    axes = ", ".join(f"{a['name']} {a['size']} ({a['link']})" for a in plan.axes) or "one device"
    modes = _runs(plan.recompute.items())
    rows = {
        "model": f"{model['name']}, {count(model['parameters'])} parameters, {batch}, "
        + ("training" if model["training"] else "evaluation"),
        "mesh": f"{'x'.join(map(str, plan.mesh['shape']))} {plan.mesh['device']}; axes {axes}",
        "degrees": "  ".join(f"{role} {degree}" for role, degree in plan.degrees.items()),
        "zero": f"{plan.zero}  offload {plan.offload}  recompute {modes or 'none'}",
        "schedule": f"{plan.schedule}, {plan.microbatches} micro-batches, {plan.virtual_stages} virtual stages"
        + (f", loss in {plan.loss_chunks} chunks" if plan.loss_chunks > 1 else ""),
        "staleness": _versions(predicted),
        "step": f"{seconds(predicted['step_time_s'])} predicted, {predicted['tokens_per_s']:,.0f} tokens/s, "
        f"{predicted['tflops_per_device']:.4g} TFLOP/s a device, MFU {100 * predicted['mfu']:.3g} %",
        "time": _amounts(predicted["breakdown_s"], seconds),
        "peak memory": _peaks(predicted["peak_memory_bytes"]),
        "memory": _amounts(predicted["memory"], size),
        "solver": f"{solver['name']}, gap {_gap(solver['gap'])}; "
        + ", ".join(f"{k} {seconds(solver[k + '_s'])}" for k in ("capture", "price", "solve", "total")),
        "pins": ", ".join(f"{key}={_pin(value)}" for key, value in plan.pins.items()),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(value))
    return Panel(grid, title="plan", title_align="left")


def fold(entries: Iterable[tuple[str, Hashable]]) -> list[tuple[str, int, Any, tuple[str, ...]]]:
    """Join names that differ in layer numbers alone and stand for equal things.

    Returns: (label, how many, the thing, the names), in the order of first appearance.
    """
    groups: dict[tuple[str, Hashable], list[str]] = defaultdict(list)
    seen: dict[str, list[set[int]]] = {}
    for name, thing in entries:
        mask, numbers = masked(name)
        groups[mask, thing].append(name)
        sets = seen.setdefault(mask, [set() for _ in numbers])
        for position, value in zip(sets, numbers, strict=True):
            position.add(value)
    rows = []
    for (mask, thing), names in groups.items():
        label = names[0]
        if len(names) > 1:
            positions = [set(p) for p in zip(*(masked(name)[1] for name in names), strict=True)]
            texts = iter(
                "*" if p == every else f"{{{_ranges(p)}}}" for p, every in zip(positions, seen[mask], strict=True)
            )
            label = re.sub(r"\0", lambda _: next(texts), mask)  # noqa: B023 - called at once
        rows.append((label, len(names), thing, tuple(names)))
    return rows


def masked(name: str) -> tuple[str, list[int]]:
    """A name without the numbers of its layers, the same for equal layers; and those numbers."""
    path, slash, rest = name.partition("/")
    return _INDEX.sub("\0", path) + slash + rest, [int(number) for number in _INDEX.findall(path)]


def _ranges(numbers: set[int]) -> str:
    """`0-3,5` of {0, 1, 2, 3, 5}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _table(title: str, *columns: str) -> Table:
    """Columns that start with > are numbers, set to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", overflow="fold", no_wrap=number)
    return table


def _row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _lines(title: str, lines: Iterable[str]) -> Group:
    return Group(Text(title, style="bold"), *(Text(f"  {line}") for line in lines), Text(""))


def _stages(plan: Plan) -> Table:
    table = _table("stages", ">stage", "blocks", "devices")
    for index, stage in enumerate(plan.stages):
        named = [b if isinstance(b, str) else f"{b['first_op']} .. {b['last_op']}" for b in stage["blocks"]]
        blocks = [f"{label} x{n}" if n > 1 else label for label, n, _, _ in _fold_runs(named)]
        _row(table, index, ", ".join(blocks), _ranges(set(stage["devices"])))
    return table


def _tried(plan: Plan) -> Table:
    """The best of the shapes that were compared, each at its best schedule."""
    ended = sorted(
        (t for t in plan.solver["tried"] if t["step_time_s"] is not None), key=lambda tried: tried["step_time_s"]
    )
    refused = len(plan.solver["tried"]) - len(ended)
    title = f"shapes compared, quickly; {refused} more cannot be better or do not fit" if refused else "shapes compared"
    table = _table(title, ">pp", ">micro-batches", ">zero", "schedule", "recompute", ">step")
    for tried in ended[:SHAPES]:
        zero = "chosen" if tried["zero"] is None else tried["zero"]
        step = seconds(tried["step_time_s"])
        _row(table, tried["pp"], tried["microbatches"], zero, tried["schedule"] or "-", tried["recompute"], step)
    return table


def _fold_runs(names: Sequence[str]) -> list[tuple[str, int, Any, tuple[str, ...]]]:
    """`fold`, but `*` never stands for a part of the layers, since a stage has only some of them."""
    rows = []
    for _, n, thing, members in fold((name, None) for name in names):
        mask = masked(members[0])[0]
        sets = [set(p) for p in zip(*(masked(name)[1] for name in members), strict=True)]
        texts = iter(_ranges(p) if len(p) == 1 else f"{{{_ranges(p)}}}" for p in sets)
        rows.append((re.sub(r"\0", lambda _: next(texts), mask), n, thing, members))  # noqa: B023 - called at once
    return rows


def _params(plan: Plan) -> Table:
    shapes = any("shape" in param for param in plan.params.values())
    table = _table("parameters", "name", ">count", *(["shape"] if shapes else []), "layout", ">zero")
    things = ((name, (tuple(p.get("shape", ())), p["layout"], p["zero"])) for name, p in plan.params.items())
    for label, n, (shape, layout, zero), _ in fold(things):
        cut = " ".join(f"{placement}@{axis}" for axis, placement in layout if placement != "I")
        _row(table, label, f"x{n}" if n > 1 else "", *([str(shape)] if shapes else []), cut or "whole", zero)
    return table


def _layouts(rows: Sequence[Sequence[str]], axes: Sequence[str]) -> str:
    """One bracket a tensor, `[S(0)@tp P@dp]`; a tensor that is whole everywhere is `[I]`."""
    texts = (" ".join(f"{p}@{axis}" for p, axis in zip(row, axes, strict=True) if p != "I") or "I" for row in rows)
    return " ".join(f"[{t}]" for t in texts)


def _classes(plan: Plan) -> Table:
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0, 0.0])
    for op in plan.ops.values():
        row = (1, op["flop"], op["bytes"], op["time_s"], op["communication_s"])
        totals[op["class"]] = [a + b for a, b in zip(totals[op["class"]], row, strict=True)]
    table = _table("ops by class", "class", ">ops", ">flop", ">bytes", ">compute", ">communication")
    for name, (n, flop, size_bytes, time_s, sent_s) in sorted(totals.items(), key=lambda item: -sum(item[1][3:])):
        _row(table, name, int(n), f"{flop:.3g}", size(size_bytes), seconds(time_s), seconds(sent_s))
    return table


def _ops(plan: Plan) -> Table:
    axes = [axis["name"] for axis in plan.axes]
    table = _table("ops", "name", ">count", "layouts", ">bytes", ">compute", ">communication")

    def thing(op: Mapping[str, Any]) -> Hashable:
        reads = tuple(f"{value} read as {_layouts([row], axes)}" for value, row in op.get("read", {}).items())
        moves = f"{_layouts(op['inputs'], axes)} -> {_layouts(op['outputs'], axes)}".strip()
        return ("; ".join((moves, *reads)), size(op["bytes"]), seconds(op["time_s"]), seconds(op["communication_s"]))

    for label, n, cells, _ in fold((name, thing(op)) for name, op in plan.ops.items()):
        _row(table, label, f"x{n}" if n > 1 else "", *cells)
    return table


def _whole(plan: Plan) -> list[RenderableType]:
    """Ops that no axis splits."""
    wide = [i for i, axis in enumerate(plan.axes) if axis["size"] > 1 and axis["role"] != "pp"]
    if not wide:
        return []
    kept = ((name, all(op["strategy"][i] in ("I", "R") for i in wide)) for name, op in plan.ops.items())
    lines = [f"{label}  x{n}" if n > 1 else label for label, n, whole, _ in fold(kept) if whole]
    return [_lines("ops kept whole on every device", lines)] if lines else []


def _runs(items: Iterable[tuple[str, str]]) -> str:
    by_mode: dict[str, list[str]] = defaultdict(list)
    for block, mode in items:
        by_mode[mode].append(block)
    if set(by_mode) <= {"none"}:
        return ""
    return ", ".join(f"{mode} ({', '.join(blocks)})" for mode, blocks in by_mode.items())


def _amounts(value: Any, unit: Any) -> str:
    """Figures with their names, the largest first; lists (one a stage) by their largest entry."""
    if not isinstance(value, Mapping):
        return ""
    flat = {name: _largest(entry) for name, entry in value.items()}
    return ", ".join(
        f"{name.replace('_', ' ')} {unit(v)}" for name, v in sorted(flat.items(), key=lambda e: -e[1]) if v
    )


def _largest(value: Any) -> float:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return max(map(_largest, value), default=0) if isinstance(value, tuple) else value


def _peaks(peaks: Sequence[float]) -> str:
    if len(peaks) < 2:
        return f"{size(peaks[0])} a device" if peaks else ""
    return f"{size(max(peaks))} a device (stages: {', '.join(map(size, peaks))})"


def _versions(predicted: Mapping[str, Any]) -> str:
    if "staleness" not in predicted:
        return ""
    behind, kept = (", ".join(map(str, predicted[name])) for name in ("staleness", "weight_versions"))
    return f"gradients at most {behind} updates behind, {kept} versions of the weights (by stage)"


def _gap(gap: float | None) -> str:
    return "unknown" if gap is None else f"{100 * gap:.2g} %"


def _pin(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_pin(v)}" for k, v in value.items()) + "}"
    return (
        str(list(value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)
    )
