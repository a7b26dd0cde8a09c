"""A timeline as a picture, and as a trace for Chrome's tracing page or Perfetto.

Enters: a `Timeline`. Leaves: a matplotlib figure in a file, or JSON data.
Refused: an ending that is neither .json nor a picture's, as a `PlanError`; a picture without matplotlib installed.

A row a rank. In its broad band what it computes, and idle time in between; in the narrow band below what it sends,
reduces and gathers meanwhile. Stages of one rank differ in shade: the later, the darker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost.timeline import KINDS, STREAMS, Event, Held, Timeline
from autopar.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#e68613",
    "input gradient": "#f2b866",
    "weight gradient": "#4f9d69",
    "send": "#b279a2",
    "reduce": "#c44e52",
    "gather": "#76b7b2",
    "optimizer": "#565656",
    "idle": "#ececec",
}
PICTURES = (".png", ".svg", ".pdf")
_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))


def write(timeline: Timeline, path: str | Path, held: Sequence[Held] = (), title: str = "") -> Path:
    """Write a picture or a trace, whichever the ending says.

    Args:    held: bytes over time of each rank, for the trace. title: of the picture.
    Raises:  PlanError: another ending; matplotlib is not installed. OSError: the file can't be written.
    """
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(timeline, held)) + "\n", encoding="utf-8")
    elif path.suffix in PICTURES:
        draw(timeline, path, title)
    else:
        raise PlanError(f"timeline {path.name!r}: write a trace (.json) or a picture ({', '.join(PICTURES)})")
    return path


def trace(timeline: Timeline, held: Sequence[Held] = ()) -> dict[str, Any]:
    """Trace Event Format: a process a rank, a thread a stream, microseconds; counters for the bytes held."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.schedule.ranks):
        stages = ", ".join(map(str, timeline.schedule.held(rank)))
        events.append(_name("process_name", rank, f"rank {rank} (stages {stages})"))
        events += [_name("thread_name", rank, stream, tid) for tid, stream in enumerate(STREAMS)]
    for event in timeline.events():
        shown = {"stage": event.stage, "micro-batch": event.microbatch, "to rank": event.target}
        events.append(
            {
                "name": event.label,
                "cat": event.kind,
                "ph": "X",
                "pid": event.rank,
                "tid": STREAMS.index(event.stream),
                "ts": event.start_s * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
                "args": {key: value for key, value in shown.items() if value >= 0},
            }
        )
    for rank, bytes_held in enumerate(held):
        for time_s, size in zip(bytes_held.time_s.tolist(), bytes_held.size_bytes.tolist(), strict=True):
            events.append({"name": "memory", "ph": "C", "pid": rank, "ts": time_s * 1e6, "args": {"bytes": size}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(what: str, rank: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}


def draw(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Draw into a file. Raises: PlanError: matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("a timeline picture needs matplotlib: pip install 'autopar[plot]'") from None

    ranks = timeline.schedule.ranks
    events = [event for event in timeline.events() if event.end_s > event.start_s]
    end_s = max([timeline.pipeline_s, *(event.end_s for event in events)], default=0.0)
    unit, scale = next(((u, s) for u, s in _UNITS if end_s * s >= 1), _UNITS[-1])
    height = min(24.0, 1.5 + ranks * (0.6 if ranks <= 16 else 0.3))
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    aside = any(event.stream != "compute" for event in events)
    top, broad = (0.36, 0.52) if aside else (0.4, 0.8)  # of a row: upper edge above its middle, height of the band
    axes.broken_barh([(0, end_s * scale)], (0, 0), facecolors=COLOURS["idle"])
    for rank in range(ranks):
        axes.broken_barh([(0, end_s * scale)], (rank - top, broad), facecolors=COLOURS["idle"], zorder=0)
    _bars(axes, timeline, [e for e in events if e.stream == "compute"], scale, -top, broad)
    lanes = {stream: i for i, stream in enumerate(s for s in STREAMS[1:] if any(e.stream == s for e in events))}
    lane = (0.8 - broad) / max(1, len(lanes))
    for stream, i in lanes.items():
        _bars(axes, timeline, [e for e in events if e.stream == stream], scale, broad - top + i * lane, lane)
    _numbers(axes, [e for e in events if e.kind in KINDS[:4]], scale, broad / 2 - top, end_s)

    axes.set_xlim(0, end_s * scale or 1)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_yticks(range(ranks))
    axes.set_yticklabels([_row_name(timeline, rank) for rank in range(ranks)], fontsize=9 if ranks <= 32 else 5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({unit})" + ("; darker: a rank's later stage" if timeline.schedule.stages > ranks else ""))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    used = [kind for kind in KINDS if any(e.kind == kind for e in events)]
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in [*used, "idle"]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _bars(axes: Axes, timeline: Timeline, events: Sequence[Event], scale: float, offset: float, height: float) -> None:
    """Boxes of one band of every row, all of one colour in one call."""
    groups: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    local = {s: i for rank in range(timeline.schedule.ranks) for i, s in enumerate(timeline.schedule.held(rank))}
    for e in events:
        shade = local.get(e.stage, 0) if e.stream == "compute" else 0
        groups.setdefault((e.rank, e.kind, shade), []).append((e.start_s * scale, (e.end_s - e.start_s) * scale))
    edge = 0.4 if len(events) <= 2000 else 0.0
    for (rank, kind, shade), spans in groups.items():
        axes.broken_barh(
            spans,
            (rank + offset, height),
            facecolors=_shade(COLOURS[kind], shade),
            edgecolors="white",
            linewidth=edge,
            zorder=2,
        )


def _numbers(axes: Axes, events: Sequence[Event], scale: float, offset: float, end_s: float) -> None:
    """The micro-batch in each box that is wide enough for it."""
    widths = np.array([e.end_s - e.start_s for e in events])
    for e, wide in zip(events, widths > end_s / 150, strict=True):
        if wide and len(events) <= 1500:
            middle = (e.start_s + e.end_s) / 2 * scale
            colour = "white" if e.kind in ("forward", "weight gradient") else "#202020"
            axes.text(
                middle, e.rank + offset, str(e.microbatch), ha="center", va="center", fontsize=7, color=colour, zorder=3
            )


def _row_name(timeline: Timeline, rank: int) -> str:
    stages = timeline.schedule.held(rank)
    if timeline.schedule.stages == timeline.schedule.ranks:
        return f"stage {stages[0]}" if stages == (rank,) else f"rank {rank}"
    return f"rank {rank}\nstage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _shade(colour: str, step: int) -> str:
    """A colour, darker by a quarter with each step."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(part * 0.75**step):02x}" for part in parts)


def summary(timeline: Timeline) -> Mapping[str, Any]:
    """Figures of a timeline as JSON data: seconds, and by rank the busy time, idle share and most in flight."""
    return {
        "step_time_s": timeline.step_time_s,
        "pipeline_s": timeline.pipeline_s,
        "ranks": [
            {"rank": rank, "stages": list(timeline.schedule.held(rank)), "busy_s": busy, "bubble": idle, "in_flight": n}
            for rank, (busy, idle, n) in enumerate(
                zip(timeline.busy_s.tolist(), timeline.bubble.tolist(), timeline.in_flight, strict=True)
            )
        ],
    }
