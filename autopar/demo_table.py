"""The demo on a terminal: the plan, then a line a step while it trains.

Enters: the events of `demo.run`. Leaves: a table and a bar, live on a terminal, printed once at the end elsewhere.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from autopar.console import stdout_console


class DemoTable:
    """Shows steps as they come; a context manager."""

    def __init__(self, steps: int, ranks: int) -> None:
        self._console = stdout_console()
        self._table = Table(box=box.SIMPLE_HEAD)
        for name in ("step", "loss on one device", f"loss on {ranks} ranks", "relative difference"):
            self._table.add_column(name, justify="right")
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("planning", total=steps)
        self._live = Live(Group(self._table, self._bar), console=self._console, refresh_per_second=8)

    def __enter__(self) -> DemoTable:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if not self._console.is_terminal:
            self._console.print()  # rich ends the line only where it can move the cursor

    def on_event(self, event: dict[str, Any]) -> None:
        """{"plan": ...} or a step, as `demo.run` gives them."""
        if "plan" in event:
            from autopar.plan import Plan
            from autopar.plan_table import summary

            self._console.print(summary(Plan.from_dict(event["plan"])))
            self._bar.update(self._task, description="training")
            return
        losses = (f"{event['single']:.12f}", f"{event['parallel']:.12f}")
        self._table.add_row(str(event["step"]), *losses, f"{event['error']:.1e}")
        self._bar.update(self._task, completed=event["step"])

    def verdict(self, result: dict[str, Any]) -> Text:
        """The last line."""
        found = ", ".join(f"{name} {error:.1e}" for name, error in result["max_error"].items())
        if result["equal"]:
            return Text(f"equal to {result['bound']:g} (largest relative difference: {found})", style="bold green")
        return Text(f"NOT equal to {result['bound']:g} (largest relative difference: {found})", style="bold red")
