"""Rank correlation of step time inside groups of comparable published runs, and the best that their noise allows.

Enters: rows with their predictions. Leaves: figures of all groups of three rows and more. Refused: nothing.

One configuration that a source prints twice differs from run to run, and rows of a group often by less. So a prediction
without any error would not put all of them in the measured order either; what it would reach is drawn: measured times
once more, each with the noise that its source's repeated runs have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from autopar.validate_rows import Published

RANKS = {
    "mean_spearman": "mean of the groups",
    "median_spearman": "median of the groups",
    "weighted_spearman": "weighted by pairs",
    "pooled_spearman": "pooled",
    "errorless_spearman": "mean that a prediction without error would reach at the noise of repeated runs",
}
"""What is printed of `groups_of`, in words."""
NEAR = 0.05  # runs of one configuration, published twice, differ by 1 to 9 %
DRAWS = 200
_RESULTS = {"id", "step_time_s", "peak_memory_gb", "outcome", "note", "group", "weight_class"}


def groups_of(rows: Iterable[tuple[Published, float | None]]) -> dict[str, Any]:
    """Rank correlation of step time inside groups of comparable configurations, of three rows and more.

    Args:    rows: runs and the seconds predicted for them.
    Returns: n: groups. mean_spearman, median_spearman: over groups. weighted_spearman: the mean where a group counts by
             its pairs of rows. pooled_spearman: of all rows together, each over its group's geometric mean.
             errorless_spearman: the mean that a prediction without error is expected to reach, see the module.
             pairs: pairs of rows whose measured times are 5 % apart or more, and how many of them stand in the right
             order: nearer ones repeat no better than that. chosen: groups whose fastest run is the one predicted to be
             it, and by how much of the fastest one's time the chosen runs exceed it, as a mean of groups; any: the same
             of a run drawn from each group. by_group: (rows, correlation), the worst first.
    """
    groups: dict[str, list[tuple[Published, float, float]]] = defaultdict(list)
    for row, predicted_s in rows:
        if row.group and row.step_time_s and predicted_s:
            groups[row.group].append((row, row.step_time_s, predicted_s))
    known = {name: members for name, members in groups.items() if len(members) >= 3}
    logs = {name: np.log(np.array([pair for _, *pair in members])) for name, members in known.items()}
    found = {name: s for name, log in logs.items() if (s := spearman(*log.T)) is not None}
    if not found:
        return {"n": 0, **dict.fromkeys(RANKS), "pairs": {"n": 0, "right": 0}, "chosen": None, "by_group": {}}
    values, sizes = np.array(list(found.values())), np.array([len(logs[name]) for name in found])
    pooled = np.concatenate([logs[name] - logs[name].mean(axis=0) for name in found])
    apart = [_apart(logs[name]) for name in found]
    noise = repeat_noise([row for members in groups.values() for row, _, _ in members])
    spread = [np.array([noise.get(row.source, 0.0) for row, _, _ in known[name]]) for name in found]
    return {
        "n": len(found),
        "mean_spearman": float(values.mean()),
        "median_spearman": float(np.median(values)),
        "weighted_spearman": float(np.average(values, weights=sizes * (sizes - 1) / 2)),
        "pooled_spearman": spearman(*pooled.T),
        "errorless_spearman": _errorless([logs[name][:, 0] for name in found], spread),
        "pairs": {"n": sum(n for n, _ in apart), "right": sum(right for _, right in apart)},
        "chosen": _chosen([np.exp(logs[name]) for name in found]),
        "by_group": {name: [len(logs[name]), found[name]] for name in sorted(found, key=lambda name: found[name])},
    }


def repeat_noise(rows: Sequence[Published]) -> dict[str, float]:
    """Standard deviation of the logarithm of one run's step time, by source, from configurations with several runs.

    A source that repeats none is not in it.
    """
    names = [f.name for f in fields(Published) if f.name not in _RESULTS]
    same: dict[tuple[str, tuple[Any, ...]], list[float]] = defaultdict(list)
    for row in rows:
        if row.step_time_s:
            same[row.source, tuple(getattr(row, name) for name in names)].append(np.log(row.step_time_s))
    squares: dict[str, float] = defaultdict(float)
    freedom: dict[str, int] = defaultdict(int)
    for (source, _), logs in same.items():
        if len(logs) > 1:
            squares[source] += len(logs) * float(np.var(logs))
            freedom[source] += len(logs) - 1
    return {source: float(np.sqrt(squares[source] / n)) for source, n in freedom.items()}


def _errorless(measured: Sequence[np.ndarray], noise: Sequence[np.ndarray]) -> float:
    """The mean over groups of the correlation of measured times with themselves and noise, over many draws."""
    generator = np.random.default_rng(0)
    draws = [
        spearman(log, log + generator.normal(0.0, sd))
        for _ in range(DRAWS)
        for log, sd in zip(measured, noise, strict=True)
    ]
    return float(np.mean([d for d in draws if d is not None]))


def _apart(logs: np.ndarray) -> tuple[int, int]:
    """Pairs of rows measured apart by more than `NEAR`, and how many of them are predicted in that order."""
    first, second = np.triu_indices(len(logs), 1)
    measured, predicted = (logs[first] - logs[second]).T
    apart = np.abs(measured) > np.log1p(NEAR)
    return int(apart.sum()), int((apart & (measured * predicted > 0)).sum())


def _chosen(groups: Sequence[np.ndarray]) -> dict[str, float]:
    """What trusting the predictions costs: of each group the run (of equal ones: all) predicted to be the fastest."""
    over = np.array([g[g[:, 1] == g[:, 1].min(), 0].mean() / g[:, 0].min() - 1 for g in groups])
    anyhow = [g[:, 0].mean() / g[:, 0].min() - 1 for g in groups]
    return {"right": int((over < 1e-9).sum()), "over": float(over.mean()), "any": float(np.mean(anyhow))}


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None of fewer than two values or of equal ones."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse])
