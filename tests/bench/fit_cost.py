"""Fit the constants of the step-time model to published runs, and judge them on sources that were left out.

    python tests/bench/fit_cost.py                      errors by source with the constants in use
    python tests/bench/fit_cost.py --fit 6              six rounds of least squares from there, printed, never written
    python tests/bench/fit_cost.py --leave-one-out 3    the same once a source, without it; its errors are printed
                                   --only SOURCE ...    these sources alone

The loss is the sum over rows of |log(predicted / measured)|, smoothed near 0, a source of many rows counting by the
square root of their number, rows of class C (several assumptions) by 0.4. Constants move in log; a weak pull keeps
those at their place that no row decides; without one source they start from `_NEUTRAL`, figures set before any fit.
What is fitted: the fields of `Fitted`, and the figures of `_PROFILE`.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from autopar.cost.fitted import FITTED, Fitted
from autopar.cost.hardware import Profile, load_profile
from autopar.cost.training import step_time
from autopar.cost.training_run import Run
from autopar.validate_rows import read
from autopar.validate_run import run_of

DATA = Path(__file__).parents[1] / "cost" / "data" / "published_runs.csv"

_PROFILE = (
    ("v100", "matmul_plateau"),
    ("a100", "matmul_plateau"),
    ("h100", "matmul_plateau"),
    ("a100", "attention_fraction"),
    ("h100", "attention_fraction"),
    ("h100", "native_attention_fraction"),
)
"""(devices whose names begin so, figure of their profiles) that are fitted too."""

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "eager_traffic": (1.0, 6.0),
    "fused_traffic": (1.0, 1.4),
    "logit_traffic": (0.7, 3.0),
    "score_traffic": (0.7, 3.0),
    "accumulate_fraction": (0.05, 1.5),
    "overlap_slowdown": (0.02, 1.0),
    "h100 native_attention_fraction": (0.3, 0.85),
    "a100 matmul_plateau": (0.803, 0.869),
    "h100 matmul_plateau": (0.65, 0.803),
    "v100 matmul_plateau": (0.6, 0.869),
}
_NEUTRAL: Mapping[str, float] = {
    "eager_traffic": 2.0,
    "fused_traffic": 1.2,
    "logit_traffic": 1.0,
    "score_traffic": 1.0,
    "flash_half_dim": 20.0,
    "flash_backward": 0.8,
    "odd_head_fraction": 0.15,
    "overlap_slowdown": 0.4,
    "accumulate_fraction": 0.6,
    "send_sync_s": 3e-4,
    "collective_sync_s": 2e-5,
    "checkpoint_wait_s": 1e-3,
    "straggler_fraction": 0.01,
    "step_s": 0.01,
    "v100 matmul_plateau": 0.78,
    "a100 matmul_plateau": 0.82,
    "h100 matmul_plateau": 0.76,
    "a100 attention_fraction": 0.6,
    "h100 attention_fraction": 0.35,
    "h100 native_attention_fraction": 0.8,  # FlashAttention-3, arXiv 2407.08608: 600 TFLOP/s, causal, heads of 128
}
"""Where a fit without a source starts: guesses from data sheets and published kernels, of before the first fit."""

_PULL = 0.3  # log standard deviation of a constant about where it stands


@dataclass(frozen=True, slots=True)
class Case:
    source: str
    run: Run
    measured_s: float
    weight: float
    complete: bool
    """Of class A or B: at most one assumption."""


def cases(path: Path = DATA) -> list[Case]:
    """Rows with a step time that can be expressed."""
    rows = read([path]).rows
    found = [(row, run_of(row, rows)) for row in rows if row.step_time_s]
    many = collections.Counter(row.source for row, run in found if not isinstance(run, str))
    return [
        Case(
            row.source,
            run[0],
            row.step_time_s or 0.0,
            (1.0 if row.weight_class in "AB" else 0.4) * (60 / max(many[row.source], 60)) ** 0.5,
            row.weight_class in ("A", "B"),
        )
        for row, run in found
        if not isinstance(run, str)
    ]


class Constants:
    """A vector of log constants, and what it means."""

    def __init__(self) -> None:
        self.names = [f.name for f in fields(Fitted)] + [f"{device} {figure}" for device, figure in _PROFILE]
        start = [getattr(FITTED, f.name) for f in fields(Fitted)]
        start += [getattr(_example(device), figure) for device, figure in _PROFILE]
        self.start = np.log(np.array(start))
        bounds = [_BOUNDS.get(name, (0.0, float("inf"))) for name in self.names]
        with np.errstate(divide="ignore"):
            self.low, self.high = np.log(np.array(bounds)).T

    def neutral(self) -> Constants:
        """The same, starting from `_NEUTRAL`."""
        other = Constants()
        other.start = np.log([_NEUTRAL.get(n, v) for n, v in zip(self.names, np.exp(self.start), strict=True)])
        return other

    def values(self, x: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, np.exp(x).tolist(), strict=True))

    def predict(self, x: np.ndarray, of: Sequence[Case]) -> np.ndarray:
        values = self.values(x)
        fitted = Fitted(**{f.name: values[f.name] for f in fields(Fitted)})
        scales = [(d, figure, values[f"{d} {figure}"] / getattr(_example(d), figure)) for d, figure in _PROFILE]
        changed: dict[int, Profile] = {}

        def run(old: Run) -> Run:
            profile = changed.get(id(old.profile))
            if profile is None:
                new = {f: getattr(old.profile, f) * scale for d, f, scale in scales if old.profile.name.startswith(d)}
                profile = changed[id(old.profile)] = replace(old.profile, **new)
            return replace(old, profile=profile)

        known: dict[int, float] = {}  # rows of one configuration share their run
        for case in of:
            if id(case.run) not in known:
                known[id(case.run)] = step_time(run(case.run), fitted).total_s
        return np.array([known[id(case.run)] for case in of])


def _example(device: str) -> Profile:
    return load_profile({"v100": "v100-sxm-16gb", "a100": "a100-sxm-80gb", "h100": "h100-sxm"}[device])


def fit(of: Sequence[Case], rounds: int, constants: Constants, show: bool = True) -> np.ndarray:
    """Log constants after `rounds` of Gauss-Newton with damping; each round never makes the loss worse."""
    weight = np.array([c.weight for c in of])
    measured = np.log([c.measured_s for c in of])
    x = constants.start.copy()

    def errors(x: np.ndarray) -> np.ndarray:
        return np.log(constants.predict(x, of)) - measured

    def loss(e: np.ndarray, x: np.ndarray) -> float:
        return float(weight @ np.sqrt(e**2 + 0.02**2) + 0.2 * np.sum(((x - constants.start) / _PULL) ** 2))

    def slopes_at(x: np.ndarray, e: np.ndarray, felt: np.ndarray) -> np.ndarray:
        """felt: which constants (columns) each case (rows) depends on at all."""
        found = np.zeros(felt.shape)
        for i, unit in enumerate(np.eye(len(x))):
            some = np.flatnonzero(felt[:, i])
            predicted = constants.predict(x + step * unit, [of[case] for case in some])
            found[some, i] = (np.log(predicted) - measured[some] - e[some]) / step
        return found

    e = errors(x)
    best, damping, step = loss(e, x), 1.0, 0.03
    felt = np.ones((len(of), len(x)), dtype=bool)
    for number in range(rounds):
        slopes = slopes_at(x, e, felt)
        felt = slopes != 0
        w = weight / np.sqrt(e**2 + 0.03**2)
        normal = (slopes * w[:, None]).T @ slopes + np.diag(np.full(len(x), 0.4 / _PULL**2))
        pull = -(slopes * w[:, None]).T @ e - 0.4 * (x - constants.start) / _PULL**2
        while damping < 1e4:
            move = np.linalg.solve(normal + damping * 0.02 * np.diag(np.diag(normal)), pull)
            y = np.clip(x + np.clip(move, -0.4, 0.4), constants.low, constants.high)
            e_y = errors(y)
            if loss(e_y, y) < best:
                break
            damping *= 4
        else:
            break
        gain = best - loss(e_y, y)
        x, e, best = y, e_y, best - gain
        damping = max(damping / 3, 0.01)
        if show:
            print(f"round {number}: loss {best:.3f}, median error {np.median(np.abs(np.expm1(e))):.2%}", flush=True)
        if gain < 0.02:
            break
    return x


def table(of: Sequence[Case], predicted: np.ndarray) -> str:
    """Errors by source and in all."""
    error = predicted / np.array([c.measured_s for c in of]) - 1
    lines = [f"{'source':28s} rows  median    p90   bias"]
    for name in (*sorted({c.source for c in of}), "all", "class A and B"):
        pick = [name in ("all", c.source) or (name == "class A and B" and c.complete) for c in of]
        e = error[np.array(pick)]
        if len(e):
            a = np.abs(e)
            lines.append(f"{name:28s} {len(e):4d} {np.median(a):7.2%} {np.quantile(a, 0.9):6.1%} {np.median(e):+6.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--leave-one-out", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--only", nargs="+", metavar="SOURCE", help="leave only these sources out")
    parser.add_argument("--data", type=Path, default=DATA)
    args = parser.parse_args()
    of, constants = cases(args.data), Constants()
    x = fit(of, args.fit, constants)
    if args.fit:
        for name, value, was in zip(constants.names, np.exp(x), np.exp(constants.start), strict=True):
            print(f"{name:36s} {value:.4g}   (was {was:.4g})")
    print(table(of, constants.predict(x, of)))
    if args.leave_one_out:
        print("\neach source predicted by constants fitted without it")
        judged, held = [], []
        for source in args.only or sorted({c.source for c in of}):
            rest, out = ([c for c in of if (c.source == source) is left] for left in (False, True))
            x = fit(rest, args.leave_one_out, constants.neutral(), show=False)
            judged += out
            held += constants.predict(x, out).tolist()
            print(f"fitted without {source}, {len(out)} rows", flush=True)
        print(table(judged, np.array(held)))


if __name__ == "__main__":
    main()
