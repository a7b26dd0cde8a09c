"""Times the solver on transformer-like problems: python tests/bench/solver.py [two] [three] [--limits 0.9,0.5,0.2].

Builds two classes of transformer blocks with rotary attention, gated feed-forward, residual joins and a storage choice
for each parameter, over two mesh axes (64 options, 36 layouts) or three (343 options, 216 layouts; "equal": 2 x 2 x 2).
A limit is a fraction between the least memory and that of the cheapest assignment. Prints a line a solve.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import time

import numpy as np

from autopar.solver import Choice, Edge, Problem, evaluate, solve
from autopar.solver.infeasible import least_memory
from autopar.solver.reduce import simplify

LAYOUTS = ("I", "R", "S0", "S1", "S2", "P")
CUT = {"S0", "S1", "S2"}
# seconds a byte of each move, in units of one all-gather over the axis; forward and backward together
MOVES = {
    ("I", "R"): 2, ("I", "S"): 1, ("R", "S"): 0, ("S", "I"): 1, ("S", "R"): 2, ("S", "S'"): 0.5, ("P", "I"): 2,
    ("P", "R"): 4, ("P", "S"): 2, ("R", "I"): 0, ("I", "P"): 0, ("R", "P"): 0, ("S", "P"): 1,
}  # fmt: skip
# for each kind of op and axis: (input layout, weight layout, output layout) of its ways to use the axis
LINEAR = [("I", "I", "I"), ("S0", "R", "S0"), ("S1", "R", "S1"), ("R", "S0", "S2"), ("S2", "S1", "P"), ("R", "R", "R"),
          ("P", "R", "P"), ("I", "I", "I")]  # fmt: skip
POINTWISE = [(x, "R", x) for x in ("I", "R", "S0", "S1", "S2", "P", "S0", "I")]
NORM = [("I", "I", "I"), ("S0", "R", "S0"), ("S1", "R", "S1"), ("R", "R", "R")] * 2
ATTENTION = [("I", "I", "I"), ("S0", "R", "S0"), ("S2", "R", "S2"), ("R", "R", "R")] * 2
STORAGE = [("I", "I", "I"), ("S0", "S0", "S0"), ("S1", "S1", "S1"), ("R", "R", "R")] * 2
KINDS = {"linear": LINEAR, "pointwise": POINTWISE, "norm": NORM, "attention": ATTENTION, "storage": STORAGE}


def synthetic(axes: tuple[int, ...], ways: int, blocks: int, seed: int = 0) -> Problem:
    """A problem over mesh axes of these sizes, `ways` ways an axis, so ways ** len(axes) options a choice."""
    return _Builder(axes, ways, seed).build(blocks)


class _Builder:
    def __init__(self, axes: tuple[int, ...], ways: int, seed: int) -> None:
        self.axes, self.ways = axes, ways
        self.rng = np.random.default_rng(seed)
        self.choices: list[Choice] = []
        self.ports: list[list[np.ndarray]] = []  # of each choice: the layout of input, weight, output by option
        self.edges: list[Edge] = []
        self.layouts = list(itertools.product(range(len(LAYOUTS)), repeat=len(axes)))
        self.moves = self._moves()

    def add(self, name: str, kind: str, work_s: float, size_bytes: float, times: int = 1) -> int:
        table = KINDS[kind][: self.ways]
        options = list(itertools.product(table, repeat=len(self.axes)))
        cost, memory = np.zeros(len(options)), np.zeros(len(options))
        for o, ways in enumerate(options):
            split = math.prod(n for n, way in zip(self.axes, ways, strict=True) if way[2] in CUT or way[1] in CUT)
            cost[o] = times * work_s / split * (1 + 0.02 * self.rng.random())
            held = math.prod(n for n, way in zip(self.axes, ways, strict=True) if way[2] in CUT)
            memory[o] = times * size_bytes / held
        self.choices.append(Choice(name, cost, memory))
        code = np.array([[[LAYOUTS.index(x) for x in way] for way in ways] for ways in options])  # [o, axis, port]
        weight = len(LAYOUTS) ** np.arange(len(self.axes))[::-1]
        self.ports.append([(code[:, :, port] * weight).sum(1) for port in range(3)])
        return len(self.choices) - 1

    def connect(self, source: int, target: int, size_bytes: float, port: int = 0, times: int = 1) -> None:
        cost = times * size_bytes * self.moves
        self.edges.append(Edge(source, target, self.ports[source][2], self.ports[target][port], cost))

    def _moves(self) -> np.ndarray:
        """[from, to] seconds a byte; what other axes cut makes a move cheaper; a slower axis costs more."""
        one = np.zeros((len(LAYOUTS), len(LAYOUTS)))
        for (i, a), (j, b) in itertools.product(enumerate(LAYOUTS), repeat=2):
            kind = ("S" if a in CUT else a, ("S'" if a in CUT else "S") if b in CUT else b)
            one[i, j] = 0.0 if a == b else MOVES[kind]
        total = np.zeros((len(self.layouts), len(self.layouts)))
        cut = np.array([LAYOUTS[i] in CUT for i in range(len(LAYOUTS))])
        at = np.array(self.layouts)
        for axis, n in enumerate(self.axes):
            others = [i for i in range(len(self.axes)) if i != axis]
            shard = np.prod([np.where(cut[at[:, i]], self.axes[i], 1) for i in others], axis=0)
            seconds = (n - 1) / n / (200e9 / 6**axis)
            total += one[np.ix_(at[:, axis], at[:, axis])] * seconds / shard[:, None]
        return total

    def parameter(self, name: str, op: int, size_bytes: float, times: int) -> None:
        storage = self.add(name, "storage", 0.0, 8 * size_bytes, times)
        self.connect(storage, op, size_bytes, 1, times)

    def build(self, blocks: int) -> Problem:
        d, tokens = 4096, 16 * 2048
        act, weight = tokens * d * 2.0, d * d * 2.0
        layers = 32 // blocks

        def linear(name: str, source: int, ratio: float = 1.0, times: int = layers) -> int:
            op = self.add(name, "linear", 6 * tokens * d * d * ratio / 4e14, act * ratio, times)
            self.connect(source, op, act * max(1.0, ratio), 0, times)
            self.parameter(name + ".weight", op, weight * ratio, times)
            return op

        def simple(name: str, kind: str, *sources: int, times: int = layers) -> int:
            op = self.add(name, kind, 3 * act / 2e12, act, times)
            for source in sources:
                self.connect(source, op, act, 0, times)
            return op

        x = linear("embed", self.add("ids", "pointwise", 0.0, tokens * 8.0), times=1)
        rotary = self.add("rotary", "attention", 0.0, tokens * 256.0)
        for b in range(blocks):
            h = simple(f"b{b}.norm1", "norm", x)
            self.parameter(f"b{b}.norm1.weight", h, d * 2.0, layers)
            q, k, v = (linear(f"b{b}.{name}", h) for name in "qkv")
            q, k = (simple(f"b{b}.rotate_{name}", "attention", s) for name, s in (("q", q), ("k", k)))
            for s in (q, k):
                self.connect(rotary, s, tokens * 256.0, 0, layers)
            o = linear(f"b{b}.o", simple(f"b{b}.attention", "attention", q, k, v))
            x = simple(f"b{b}.add1", "pointwise", x, o)
            h = simple(f"b{b}.norm2", "norm", x)
            self.parameter(f"b{b}.norm2.weight", h, d * 2.0, layers)
            gate, up = linear(f"b{b}.gate", h, 2.7), linear(f"b{b}.up", h, 2.7)
            down = linear(f"b{b}.down", simple(f"b{b}.mul", "pointwise", gate, up), 2.7)
            x = simple(f"b{b}.add2", "pointwise", x, down)
        x = simple("norm", "norm", x, times=1)
        simple("loss", "norm", linear("head", x, 8.0, times=1), times=1)
        return Problem(tuple(self.choices), tuple(self.edges))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["two", "three"])
    parser.add_argument("--limits", default="inf,0.9,0.5,0.2,0.05")
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("--time", type=float, default=60.0)
    arguments = parser.parse_args()
    for name in arguments.sizes:
        axes, ways = {"two": ((8, 4), 8), "three": ((8, 2, 4), 7), "equal": ((2, 2, 2), 7)}[name]
        problem = synthetic(axes, ways, blocks=2)
        least = evaluate(problem, least_memory(simplify(problem)) or ())[1]
        largest = 0.0
        print(
            f"{name}: {len(problem.choices)} choices x {ways ** len(axes)} options, {len(problem.edges)} edges, "
            f"{6 ** len(axes)} layouts"
        )
        for limit in arguments.limits.split(","):
            bytes_ = math.inf if limit == "inf" else least + float(limit) * (largest - least)
            begun, cpu = time.perf_counter(), time.process_time()
            case = Problem(problem.choices, problem.edges, bytes_)
            s = solve(case, time_limit_s=arguments.time, relative_gap=arguments.gap)
            largest = largest or s.memory_bytes
            print(
                f"  limit {limit:>5}: {time.perf_counter() - begun:6.2f} s "
                f"({time.process_time() - cpu:.2f} s of CPU)  {s.solver:12} "
                f"objective {s.objective_s:.6f} gap {s.gap:.1e} memory {s.memory_bytes / 2**30:.2f} GiB, "
                f"process peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
