"""How parameters may be stored: shards that a DTensor can express, as far as the pins and the given plan allow."""

from __future__ import annotations

import math

from autopar.errors import PlanError
from autopar.layout import I, Layout, Parts, S
from autopar.mesh import LogicalMesh
from autopar.solver.settings import Settings


def allowed_storage(path: str, parts: Parts, mesh: LogicalMesh, settings: Settings) -> list[Layout]:
    """Layouts that the parameter `path` may be stored in.

    ZeRO 1 to 3 cut every parameter on the data axes as far as it can be cut, over `zero_ranks` at most where that is
    pinned (hybrid sharding); pinned layouts and those of a given plan hold.
    Raises:  PlanError: none is left.
    """
    every = storage_layouts(parts, mesh)
    pinned = settings.pins.layout_of(path)
    if settings.fixed is not None and path in settings.fixed.params:
        found = [x for x in every if tuple(map(parts.name, x)) == settings.fixed.params[path]]
    elif pinned:
        axes = {a.name for a in mesh.axes} | {a.role for a in mesh.axes if a.role is not None}
        unknown = [key for key in pinned if key not in axes]
        if unknown:
            raise PlanError(
                f"pin of {path}: no axis {unknown[0]!r} on {mesh.topology}; there are {', '.join(sorted(axes))}, and "
                f"roles whose degree is pinned, too (pin {unknown[0]}=n)"
            )
        found = [x for x in every if _keeps(x, parts, mesh, pinned)]
    elif settings.pins.zero:
        most = settings.pins.given.get("zero_ranks", mesh.size)
        best = max(cut for x in every if (cut := cut_over_data(x, mesh)) <= most)
        found = [x for x in every if cut_over_data(x, mesh) == best]
        found = [x for x in found if _near_first(x, mesh)] or found
    else:
        found = every
    if not found:
        wanted = pinned or (settings.fixed and settings.fixed.params[path])
        raise PlanError(f"parameter {path} of shape {parts.shape} cannot lie as {wanted} on {mesh.topology}")
    return found


def _keeps(layout: Layout, parts: Parts, mesh: LogicalMesh, pinned: dict[str, str]) -> bool:
    for axis, placement in zip(mesh.axes, layout, strict=True):
        for key in (axis.name, axis.role):
            if key in pinned and parts.name(placement) != pinned[key].replace("R", "I"):
                return False
    return True


def cut_over_data(layout: Layout, mesh: LogicalMesh) -> int:
    """Ranks over which the data axes (pinned dp, or free axes) cut a stored parameter."""
    axes = zip(mesh.axes, layout, strict=True)
    return math.prod(a.size for a, p in axes if a.role in ("dp", "cp", None) and p.kind == "S")


def _near_first(layout: Layout, mesh: LogicalMesh) -> bool:
    """Is no far data axis cut while a nearer one is not?"""
    cut = [p.kind == "S" for a, p in zip(mesh.axes, layout, strict=True) if a.role == "dp"]
    return cut == sorted(cut, reverse=True)


def storage_layouts(parts: Parts, mesh: LogicalMesh) -> list[Layout]:
    """Ways to store a parameter: cut in at most one part a dim, in shards that a DTensor can express.

    Even cuts of any part are strided shards; an uneven cut needs a dim of one part.
    """
    found: list[Layout] = [()]
    for axis in mesh.axes:
        longer = []
        for layout in found:
            longer.append((*layout, I))
            for part, size in enumerate(parts.flat):
                dim = parts.dim_of(part)
                others = [p.part for p in layout if p.kind == "S" and parts.dim_of(p.part) == dim]
                if any(p != part for p in others):
                    continue
                taken = [a.size for a, p in zip(mesh.axes, layout, strict=False) if p == S(part)]
                ranks = axis.size * math.prod(taken)
                single = len([n for n in parts.dims[dim] if n > 1]) == 1
                even = size > 1 and size % ranks == 0
                uneven = size > 1 and single and not others and -(-size // ranks) * ranks <= 2 * size
                if (even and (not others or single)) or uneven:
                    longer.append((*layout, S(part)))
        found = longer
    return found
