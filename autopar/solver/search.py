"""Choose the logical axes, too: solve one problem for each way to factor the mesh, keep the best plan.

What enters: an `Analysis`, the topology, settings. What leaves: a `Found`: the axes, the built problem, its solution.
The first factoring is one axis a level; then come those with one data axis across nodes; others divide a level, or a
pinned tp that the model's heads do not divide.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.hardware import Profile
from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import ROLES, LogicalMesh, Mesh, factor_axes, free_factorisations
from autopar.rules.analyse import Analysis
from autopar.solver.build import Built, build
from autopar.solver.equal import representatives
from autopar.solver.heads import LOSS_CHUNKS, heads_of
from autopar.solver.optimise import Beaten, solve, too_large
from autopar.solver.problem import Solution
from autopar.solver.settings import Settings

GAP = 1e-3
"""Relative gap at which the solver may stop."""
WORK = 25_000.0
"""Options that all factorings may have together, by estimate; the first is tried however many it has. Counted, not
timed, so that a busy machine finds the same plan."""
GROWTH = 7.0
"""An axis more makes a problem about this many times as large: the options of an op on one axis."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    mesh: LogicalMesh
    built: Built
    solution: Solution
    price_s: float
    solve_s: float
    recompute: str = "none"
    loss_chunks: int = 1
    largest: float = 1.0
    held: float = 1.0


def search(
    analysis: Analysis,
    topology: Mesh,
    profile: Profile,
    settings: Settings,
    sinks: Mapping[int, str],
    *,
    levels: Sequence[str] = ("none",),
    time_limit_s: float = 60.0,
    most: int = 4,
    beaten_s: float = math.inf,
    quick: bool = False,
) -> Found:
    """The best plan over at most `most` factorings of the mesh and these levels of recomputation.

    quick: over the first factoring that keeps the pins, and as `solve` means it.

    Raises:
        InfeasibleError: none fits the memory. PlanError: a pin cannot be kept. Beaten: none costs less than `beaten_s`.
    """
    spent, ops = 0.0, len(analysis.ops.keys() & set(representatives(analysis).values()))
    parameters = [s.path for s in analysis.program.sources if s.kind == "parameter"]
    settings = replace(settings, pins=settings.pins.for_names(parameters, analysis.program.ties))
    best: Found | None = None
    refusal: Exception | None = None
    tries = [
        (pinned, mesh)
        for pinned in _roles_of_layouts(settings, topology)
        for mesh in candidates(analysis, topology, pinned)[:most]
    ]
    tries[1:1] = [(pinned, factor_axes(topology, pinned.pins.degrees)) for pinned in _across_nodes(settings, topology)]
    spare = [(pinned, mesh) for pinned in {id(p): p for p, _ in tries}.values() for mesh in divided(topology, pinned)]
    for attempt, (pinned, mesh) in enumerate((*tries, *spare)):
        if attempt >= len(tries) and (best is not None or isinstance(refusal, InfeasibleError | Beaten)):
            break
        known = best is not None or beaten_s < math.inf
        if known and spent + ops * GROWTH ** len(mesh.axes) > WORK:
            continue
        try:
            at_hand_s = best.solution.objective_s if best is not None else beaten_s
            found = _recomputing(analysis, mesh, profile, pinned, sinks, levels, time_limit_s, at_hand_s, quick)
        except Beaten as error:
            if quick:
                raise
            refusal = refusal or error
            spent += ops * GROWTH ** len(mesh.axes)
            continue
        except (InfeasibleError, PlanError) as error:
            refusal = refusal or error
            continue
        spent += ops * GROWTH ** len(mesh.axes)
        if best is None or found.solution.objective_s < best.solution.objective_s * (1 - GAP):
            best = found
        if quick:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _across_nodes(settings: Settings, topology: Mesh) -> list[Settings]:
    """One data axis over nodes and the rest of each, beside a tensor axis on near devices: collectives of both levels
    at once are faster than one after another. For free choices on several levels; degrees that divide a node.
    """
    pins = settings.pins
    if pins.degrees or pins.layouts or sum(n > 1 for n in topology.levels) < 2:
        return []
    inside = topology.levels[0]
    near = [n for n in range(2, inside) if inside % n == 0]  # a whole node's axis is that of the plain factoring
    return [replace(settings, pins=replace(pins, degrees={"tp": n, "dp": topology.size // n})) for n in near]


def _roles_of_layouts(settings: Settings, topology: Mesh) -> list[Settings]:
    """A layout pinned on a role whose degree is not asks for an axis of it: one try for each degree it may have."""
    given = settings.pins.degrees
    missing = sorted({key for _, layout in settings.pins.layouts for key, _ in layout if key in ROLES} - set(given))
    found = [given]
    for role in missing:
        found = [
            {**degrees, role: n}
            for degrees in found
            for left in (topology.size // math.prod(degrees.values()),)
            for n in range(2, left + 1)
            if left % n == 0
        ]
    return [replace(settings, pins=replace(settings.pins, degrees=degrees)) for degrees in found] or [settings]


def on_axes(
    analysis: Analysis, mesh: LogicalMesh, profile: Profile, settings: Settings, sinks: Mapping[int, str]
) -> Found:
    """The best plan on given axes."""
    return _solve(analysis, mesh, profile, settings, sinks, 60.0, math.inf)


def _recomputing(
    analysis: Analysis,
    mesh: LogicalMesh,
    profile: Profile,
    settings: Settings,
    sinks: Mapping[int, str],
    levels: Sequence[str],
    time_limit_s: float,
    at_hand_s: float,
    quick: bool,
) -> Found:
    """The best level of recomputation; more is only tried where memory binds, since it saves nothing else. Where no
    level fits, the head's product and its loss are chunked, too.

    Raises:  Beaten: this costs no less than the plan at hand.
    """
    best: Found | None = None
    refusal: InfeasibleError | None = None
    tries = list(itertools.product(_chunks(analysis, settings), levels))
    for chunks, level in tries:
        if best is not None and chunks > best.loss_chunks:
            break
        tried = replace(settings, recompute=level, loss_chunks=chunks)
        try:
            known_s = min(at_hand_s, best.solution.objective_s) if best is not None else at_hand_s
            found = _solve(analysis, mesh, profile, tried, sinks, time_limit_s, known_s, quick)
        except Beaten:
            if best is None:
                raise Beaten(refusal is None) from None
            break  # more is made again at the levels to come
        except InfeasibleError as error:
            if refusal is None and len(tries) > 2:  # where the last one does not fit, none does
                last = replace(settings, recompute=tries[-1][1], loss_chunks=tries[-1][0])
                if too_large(build(analysis, mesh, profile, last, sinks).problem, time_limit_s):
                    raise
            refusal = refusal or error
            continue
        if best is None or found.solution.objective_s < best.solution.objective_s * (1 - GAP):
            best = found
        if found.solution.solver == "elimination":
            break
    if best is None:
        assert refusal is not None
        raise refusal
    if best.solution.objective_s >= at_hand_s:
        raise Beaten(False)
    return best


def _chunks(analysis: Analysis, settings: Settings) -> tuple[int, ...]:
    """Numbers of chunks of the loss to try: the pinned one, or whole and then in chunks.

    Raises:  PlanError: chunks are pinned, and no loss has logits of its own.
    """
    pinned = settings.pins.given.get("loss_chunks")
    if pinned == 1 or (pinned is None and not (analysis.program.training and settings.chunked)):
        return (1,)
    heads = heads_of(analysis)
    if pinned is None:
        return (1, LOSS_CHUNKS) if heads else (1,)
    if not heads:
        raise PlanError(
            f"pin loss_chunks={pinned}: no cross entropy is the only reader of a product's logits; leave the pin, or "
            "return the loss without the logits"
        )
    return (pinned,)


def _solve(
    analysis: Analysis,
    mesh: LogicalMesh,
    profile: Profile,
    settings: Settings,
    sinks: Mapping[int, str],
    time_limit_s: float,
    beaten_s: float,
    quick: bool = False,
) -> Found:
    begun = time.perf_counter()
    built = build(analysis, mesh, profile, settings, sinks)
    priced = time.perf_counter()
    solution = solve(
        built.problem, time_limit_s=time_limit_s, relative_gap=GAP, beaten_s=beaten_s * (1 - GAP), quick=quick
    )
    return Found(
        mesh, built, solution, priced - begun, time.perf_counter() - priced, settings.recompute, settings.loss_chunks,
        settings.largest, settings.held,
    )  # fmt: skip


def candidates(analysis: Analysis, topology: Mesh, settings: Settings) -> list[LogicalMesh]:
    """Factorings to try, the plainest first."""
    degrees = settings.pins.degrees
    near = settings.pins.given.get("zero_ranks", 1)
    if 1 < near < degrees.get("dp", 1):  # hybrid sharding: over near data ranks, copies on the far ones
        return [factor_axes(topology, degrees, {"dp": (near, degrees["dp"] // near)})]
    found = [factor_axes(topology, degrees)]
    tp = degrees.get("tp", 1)
    divided = [{"tp": (part, tp // part)} for part in head_divisors(analysis, tp)]
    found += [factor_axes(topology, degrees, parts) for parts in divided]
    found += [factor_axes(topology, degrees, free=free) for free in free_factorisations(topology, degrees)[1:]]
    return found


def divided(topology: Mesh, settings: Settings) -> list[LogicalMesh]:
    """Factorings for pins that one axis cannot keep: 6 channels on 4 ranks leave one empty, on 2 x 2 ranks none."""
    degrees = settings.pins.degrees
    if "zero_ranks" in settings.pins.given:
        return []
    return [
        factor_axes(topology, degrees, {role: (part, degree // part)})
        for role, degree in degrees.items()
        if role in ("tp", "dp")
        for part in range(2, degree)
        if degree % part == 0
    ]


def head_divisors(analysis: Analysis, tp: int) -> Sequence[int]:
    """Proper divisors of tp that divide the leading part of some divided weight dim which tp does not (key/value
    heads).
    """
    found = set()
    for source in analysis.program.sources:
        if source.kind == "parameter":
            for dim in analysis.parts[source.node].dims:
                shared = math.gcd(tp, dim[0])
                if len(dim) > 1 and 1 < shared < tp:
                    found.add(shared)
    return sorted(found)
