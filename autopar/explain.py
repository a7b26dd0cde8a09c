"""`autopar explain`: each decision of a plan with its runner-up, and what the difference costs.

Enters: a `Plan`, maybe a pattern of names. Leaves: `Explained`: rows as data and as a table, the dearest to change
first. Refused, with a `PlanError`: a plan without runners-up, a pattern that names nothing.

A decision of equal blocks is one; a pattern may name it by any of them.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.plan_table import masked

if TYPE_CHECKING:
    from rich.console import RenderableType

KINDS = {"ops": "op", "params": "parameter", "reads": "read"}


@dataclass(frozen=True, slots=True)
class Explained:
    """rows: decision (its kind), name, count (of equal ones), chosen, instead, costs_s, bytes."""

    plan: Plan
    rows: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"step_time_s": self.plan.predicted["step_time_s"], "decisions": [dict(row) for row in self.rows]}

    def table(self) -> RenderableType:
        """For people."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        from autopar.console import seconds, size

        axes = ", ".join(axis["name"] for axis in self.plan.axes if axis["role"] != "pp") or "one device"
        title = f"decisions and their runners-up, all else as it is (op: what is cut, and its output; axes {axes})"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
        table.add_column("decision", overflow="fold", min_width=44)
        for name in ("chosen", "instead"):
            table.add_column(name, overflow="fold")
        for name in ("costs a step", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            name = f"{row['decision']} {row['name']}".strip() + (f"  x{row['count']}" if row["count"] > 1 else "")
            more = "" if row["bytes"] is None else f"{'-' if row['bytes'] < 0 else '+'}{size(abs(row['bytes']))}"
            sign = "-" if row["costs_s"] < 0 else "+"
            cells = (name, row["chosen"], row["instead"], f"{sign}{seconds(abs(row['costs_s']))}", more)
            table.add_row(*(Text(str(cell)) for cell in cells))
        return table


def explain(plan: Plan, pattern: str | None = None) -> Explained:
    """Rows of the decisions whose names fit `pattern` (with `*`, or a part of the name); None: of all.

    Raises:  PlanError: the plan has no runners-up, or no decision has such a name.
    """
    found = plan.solver.get("runners_up")
    if found is None:
        raise PlanError("solver.runners_up: this plan has none; plan the model again, with this version of autopar")
    rows = [*_shapes(plan)]
    for kind, entries in found.items():
        every = plan.params if kind == "params" else plan.ops if kind == "ops" else entries
        equal = Counter(_mask(name) for name in every)
        for name, entry in entries.items():
            rows.append(
                {
                    "decision": KINDS[kind], "name": name, "count": max(1, equal[_mask(name)]),
                    "chosen": _text(entry["chosen"]), "instead": _text(entry["instead"]),
                    "costs_s": entry["costs_s"], "bytes": entry["bytes"],
                }
            )  # fmt: skip
    rows.sort(key=lambda row: (row["decision"] != "shape", -row["costs_s"]))
    if pattern is not None:
        masks = {_mask(n) for n in (*plan.params, *plan.ops, *found["reads"]) if _fits(n, pattern)}
        rows = [row for row in rows if _mask(row["name"]) in masks or (row["decision"] == "shape" == pattern)]
        if not rows:
            near = difflib.get_close_matches(pattern, [*plan.params, *plan.ops], n=1, cutoff=0.3)
            known = "has a runner-up" if masks else f"has such a name; the plan has {near[0] if near else 'none'}"
            raise PlanError(f"{pattern!r}: no decision {known}")
    return Explained(plan, tuple(rows))


def _shapes(plan: Plan) -> list[dict[str, Any]]:
    """The chosen shape beside the best of another number of pipeline ranks or micro-batches, or ZeRO level."""
    tried = [t for t in plan.solver.get("tried", ()) if t["step_time_s"] is not None]
    chosen = {"pp": plan.degrees["pp"], "microbatches": plan.microbatches}
    step_s = plan.predicted["step_time_s"]
    rows = []
    for key in ("pp", "microbatches"):
        others = [t for t in tried if t[key] != chosen[key]]
        if others:
            best = min(others, key=lambda t: t["step_time_s"])
            more = {"decision": "shape", "name": "", "count": 1, "bytes": None}
            now = _shape_text({**chosen, "schedule": plan.schedule if plan.degrees["pp"] > 1 else ""})
            row = {"chosen": now, "instead": _shape_text(best), "costs_s": best["step_time_s"] - step_s, **more}
            if row not in rows:
                rows.append(row)
    return rows


def _shape_text(shape: Mapping[str, Any]) -> str:
    schedule = f", {shape['schedule']}" if shape.get("schedule") and shape["pp"] > 1 else ""
    return f"pp {shape['pp']}, {shape['microbatches']} micro-batches{schedule}"


def _mask(name: str) -> str:
    """The same of equal blocks."""
    return masked(name)[0]


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or pattern in name


def _text(layout: Sequence[str]) -> str:
    return ", ".join(layout) or "whole"
