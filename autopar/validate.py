"""Predict published training runs and compare: `autopar validate`.

Enters: files of published runs. Leaves: the report as data and as a table: each row's step time, memory and outcome,
measured and predicted; errors and rank correlation by source and in all; rows left out, counted by reason.
Refused, with an error of ours: files and figures that `validate_rows` refuses. A row that cannot be expressed is
listed.

Errors are fractions of the measured value. Memory is what tensors use, or what the device shows where the
row says that nvidia-smi was read. A row fits when every stage does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost.fitted import FITTED, Fitted
from autopar.cost.training import step_time
from autopar.cost.training_memory import peak_memory
from autopar.errors import PlanError
from autopar.validate_ranks import NEAR, RANKS, groups_of, spearman
from autopar.validate_rows import Published, Read, read
from autopar.validate_run import run_of

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row with its prediction; seconds and bytes are None where there are none, `reason` says why."""

    row: Published
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    predicted_outcome: str | None = None
    reason: str | None = None
    assumed: tuple[str, ...] = ()

    @property
    def measured_bytes(self) -> float | None:
        return None if self.row.peak_memory_gb is None else self.row.peak_memory_gb * 1e9

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.row.id,
            "source": self.row.source,
            "measured_s": self.row.step_time_s,
            "predicted_s": self.predicted_s,
            "measured_bytes": self.measured_bytes,
            "predicted_bytes": self.predicted_bytes,
            "outcome": self.row.outcome or None,
            "predicted_outcome": self.predicted_outcome,
            "reason": self.reason,
            "assumed": list(self.assumed),
        }


def predict(found: Read, fitted: Fitted = FITTED) -> list[Predicted]:
    """Predict every row that was read, in order."""
    return [_predict(row, found.rows, fitted) for row in found.rows]


def _predict(row: Published, rows: Sequence[Published], fitted: Fitted) -> Predicted:
    try:
        expressed = run_of(row, rows)
        if isinstance(expressed, str):
            return Predicted(row, reason=expressed)
        run, assumed = expressed
        time_s = step_time(run, fitted).total_s
    except PlanError as error:
        return Predicted(row, reason=str(error))
    peak = peak_memory(run)
    size = peak.total if "nvidia-smi" in row.note else peak.allocated
    outcome = "fit" if peak.needed <= run.profile.memory_bytes else "oom"
    return Predicted(row, time_s, size, outcome, None, assumed)


def report(paths: Sequence[str | Path]) -> dict[str, Any]:
    """The report of files, as `validate --json` prints it. Raises: PlanError: see `validate_rows`."""
    found = read(paths)
    return summary(predict(found), found.skipped)


def summary(rows: Sequence[Predicted], skipped: Iterable[tuple[str, str, str]] = ()) -> dict[str, Any]:
    """The report of predicted rows and of rows that were not even read."""
    skipped = list(skipped)
    judged = [r for r in rows if r.predicted_outcome and r.row.outcome]
    reasons = Counter([*(r.reason for r in rows if r.reason), *(reason for _, _, reason in skipped)])
    return {
        "rows": [
            *(r.to_dict() for r in rows),
            *(
                {**dict.fromkeys(_ROW_KEYS), "id": name, "source": source, "reason": reason, "assumed": []}
                for name, source, reason in skipped
            ),
        ],
        "time": _by_source(rows, lambda r: (r.row.step_time_s, r.predicted_s)),
        "memory": _by_source(rows, lambda r: (r.measured_bytes, r.predicted_bytes)),
        "outcome": {"n": len(judged), "right": sum(r.predicted_outcome == r.row.outcome for r in judged)},
        "groups": groups_of((row.row, row.predicted_s) for row in rows),
        "skipped": dict(reasons.most_common()),
    }


_ROW_KEYS = tuple(Predicted(Published("", "")).to_dict())

Pair = tuple[float | None, float | None]


def _by_source(rows: Sequence[Predicted], pair: Callable[[Predicted], Pair]) -> dict[str, dict[str, Any]]:
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured, predicted = pair(row)
        if measured and predicted:
            pairs[row.row.source].append((measured, predicted))
            pairs["all"].append((measured, predicted))
    return {name: _errors(pairs[name]) for name in sorted(pairs, key=lambda n: (n == "all", n))}


def _errors(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    measured, predicted = np.array(pairs, dtype=np.float64).T
    error = np.abs(predicted / measured - 1)
    return {
        "n": len(pairs),
        "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9)),
        "spearman": spearman(measured, predicted),
    }


def table(data: dict[str, Any], rows: bool = True) -> RenderableType:
    """The report for people. rows: with a line for each row."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    if rows:
        lines = Table(box=box.SIMPLE_HEAD)
        for name in ("id", "measured s", "predicted", "error", "GB", "predicted", "outcome", "predicted"):
            if name == "id":
                lines.add_column(name, overflow="fold")  # ids are longer than a line has room for
            else:
                lines.add_column(name, justify="right", no_wrap=True)
        for row in data["rows"]:
            if row["reason"]:
                lines.add_row(Text(f"{row['id']}: {row['reason']}", style="dim"))
                continue
            measured, predicted = row["measured_s"], row["predicted_s"]
            error = f"{predicted / measured - 1:+.1%}" if measured else ""
            shown = (_shown(measured), _shown(predicted), error)
            memory = (_shown(row[key] and row[key] / 1e9) for key in ("measured_bytes", "predicted_bytes"))
            lines.add_row(Text(row["id"]), *shown, *memory, row["outcome"] or "", row["predicted_outcome"])
        parts.append(lines)
    for what in ("time", "memory"):
        errors = Table(title=f"error of {what}", box=box.SIMPLE_HEAD, title_justify="left")
        for name in ("source", "rows", "median", "90th percentile", "Spearman"):
            errors.add_column(name, justify="left" if name == "source" else "right")
        for source, e in data[what].items():
            rank = "" if e["spearman"] is None else f"{e['spearman']:.3f}"
            errors.add_row(source, str(e["n"]), f"{e['median']:.1%}", f"{e['p90']:.1%}", rank)
        parts.append(errors)
    outcome, groups = data["outcome"], data["groups"]
    if outcome["n"]:
        parts.append(Text(f"fits or runs out of memory: {outcome['right']} of {outcome['n']} right"))
    if groups["n"]:
        if rows:
            parts.append(_group_lines(groups["by_group"]))
        said = ", ".join(f"{words} {groups[key]:.3f}" for key, words in RANKS.items() if groups[key] is not None)
        parts.append(Text(f"rank correlation of step time in {groups['n']} groups: {said}"))
        n, right = groups["pairs"]["n"], groups["pairs"]["right"]
        parts.append(Text(f"pairs in a group that differ by {NEAR:.0%} and more: {right} of {n} in the right order"))
        right, over, anyhow = (groups["chosen"][key] for key in ("right", "over", "any"))
        parts.append(
            Text(
                f"the run predicted to be its group's fastest is it in {right} of {groups['n']} groups and takes "
                f"{over:.1%} more than it in the mean (a run at random: {anyhow:.1%})"
            )
        )
    parts += [Text(f"left out: {reason}: {n}") for reason, n in data["skipped"].items()]
    return Group(*parts)


def _group_lines(by_group: dict[str, Any]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = Table(title="rank correlation by group", box=box.SIMPLE_HEAD, title_justify="left")
    lines.add_column("group", overflow="fold")
    for name in ("rows", "Spearman"):
        lines.add_column(name, justify="right")
    for name, (n, rank) in by_group.items():
        lines.add_row(Text(name), str(n), f"{rank:.2f}")
    return lines


def _shown(value: float | None) -> str:
    return "" if not value else f"{value:.4g}"
