"""The physical topology and the logical axes laid over it.

Enters: a shape such as ``"2x8"`` (2 nodes of 8 devices, slowest level first), or a torch `DeviceMesh`; pinned degrees.
Leaves: a `Mesh`, and a `LogicalMesh` whose axes together cover every device exactly once.
Refused, with a `MeshError`: shapes that are no positive integers, and degrees that do not divide what they must divide.

Rank r of a ``"2x8"`` mesh is device r % 8 of node r // 8. Levels are counted from the fastest one: level 0 is the
devices inside a node, level 1 the nodes. Axes are ordered fastest-varying first, and where two axes take part of the
same level the earlier axis takes the nearer ranks. This is also the order in which axes cut a tensor dim.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.errors import MeshError

ROLES = ("tp", "cp", "ep", "dp", "pp")
"""Roles a degree can be pinned for, in the order in which they are laid on the mesh, nearest devices first."""

# A torch mesh says only "cuda"; which GPU it is cannot be asked without one, so the most common one is assumed.
_PROFILE_OF_DEVICE_TYPE = {"cpu": "cpu"}
_PROFILE_OF_OTHER_DEVICES = "h100-sxm"


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """A physical topology: how many devices at each level, and which hardware profile they have.

    Args:    shape: ``"4"`` one node of 4 devices, ``"2x8"`` two nodes of 8, ``"4x2x8"`` four pods of 2 nodes of 8; or
             the same as a tuple of ints. Slowest level first.
             device: name (or path) of a hardware profile; it is looked up when something is priced, not here.
    Raises:  MeshError: the shape is not made of positive integers.
    """

    shape: tuple[int, ...]
    device: str

    def __init__(self, shape: "str | int | Sequence[int]", device: str = "cpu") -> None:
        if not isinstance(device, str) or not device:
            raise MeshError(f"mesh device {device!r} is not the name of a hardware profile, such as 'h100-sxm'")
        object.__setattr__(self, "shape", _parse_shape(shape))
        object.__setattr__(self, "device", device)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def levels(self) -> tuple[int, ...]:
        """Devices at each level, fastest level (inside a node) first."""
        return self.shape[::-1]

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> tuple["Mesh", dict[str, int]]:
        """The topology of a torch `DeviceMesh`, and the degrees that its named dims pin.

        Each mesh dim becomes a level. Dims named "pp", "dp", "tp", "cp" or "ep" pin that degree (1 included); other
        names pin nothing.

        Args:    device_mesh: a `torch.distributed.device_mesh.DeviceMesh`, or anything with `mesh` (a tensor of
                 ranks), `mesh_dim_names` and `device_type`.
        Raises:  MeshError: its ranks are not 0, 1, 2, ... in order (a sub-mesh, or devices in another order).
        """
        ranks = device_mesh.mesh
        flat = [int(rank) for rank in ranks.flatten().tolist()]
        if flat != list(range(len(flat))):
            raise MeshError(
                f"DeviceMesh holds the ranks {_shorten(flat)}, not 0 to {len(flat) - 1} in order; "
                "make it with init_device_mesh over all ranks"
            )
        shape = tuple(int(size) for size in ranks.shape)
        names = device_mesh.mesh_dim_names or ()
        pins = {name: size for name, size in zip(names, shape, strict=False) if name in ROLES}
        device = _PROFILE_OF_DEVICE_TYPE.get(device_mesh.device_type, _PROFILE_OF_OTHER_DEVICES)
        return cls(shape or (1,), device=device), pins


@dataclass(frozen=True, slots=True)
class Axis:
    """One logical axis.

    Fields:  name: unique in its mesh. size: ranks along it. role: the pinned role, None for a free axis.
             spans: (level, ranks taken from it), fastest first; their product is `size`.
             stride: rank distance between neighbours on the fastest span.
    """

    name: str
    size: int
    role: str | None
    spans: tuple[tuple[int, int], ...]
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1 or math.prod(ranks for _, ranks in self.spans) != self.size:
            raise MeshError(f"axis '{self.name}' has size {self.size}, which its spans {self.spans} do not multiply to")
        if self.role is not None and self.role not in ROLES:
            raise MeshError(f"axis '{self.name}' has role '{self.role}', which is none of {', '.join(ROLES)}")

    def between(self, a: int, b: int) -> "Axis":
        """The spans that a message from index `a` to `b` crosses, those below them included."""
        far = 0
        for i, (_, ranks) in enumerate(self.spans, 1):
            far = far if a % ranks == b % ranks else i
            a, b = a // ranks, b // ranks
        spans = self.spans[:far]
        return replace(self, size=math.prod(ranks for _, ranks in spans), spans=spans)


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Axes that together cover a topology; coordinates and groups of ranks.

    A coordinate has one index an axis, in the order of `axes` (fastest-varying first).

    Raises:  MeshError: two axes share a name, or a level is not covered exactly once.
    """

    topology: Mesh
    axes: tuple[Axis, ...]
    # For each axis: (ranks, rank distance) of each span. Derived from the order of the axes, see the module docstring.
    _steps: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise MeshError(f"axis names {names} are not unique")
        levels = self.topology.levels
        distance = [math.prod(levels[:level]) for level in range(len(levels))]  # rank distance of the next free rank
        end = [math.prod(levels[: level + 1]) for level in range(len(levels))]
        steps = []
        for axis in self.axes:
            spans = []
            for level, ranks in axis.spans:
                if not 0 <= level < len(levels):
                    raise MeshError(f"axis '{axis.name}' uses level {level} of the {len(levels)} of {self.topology}")
                spans.append((ranks, distance[level]))
                distance[level] *= ranks
            steps.append(tuple(spans))
        if distance != end:
            taken = [d * levels[i] // end[i] for i, d in enumerate(distance)]
            raise MeshError(f"axes take {taken} ranks of the levels {list(levels)} (fastest first) of {self.topology}")
        object.__setattr__(self, "_steps", tuple(steps))

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.topology.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(axis.size for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """The axis of that name. Raises: MeshError when there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise MeshError(f"no axis '{name}'; the mesh has {', '.join(a.name for a in self.axes) or 'no axes'}")

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Index of `rank` along each axis. Raises: MeshError when the rank is not in the mesh."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not in mesh {self.topology} of {self.size} devices")
        indices = []
        for spans in self._steps:
            index, weight = 0, 1
            for ranks, distance in spans:
                index += rank // distance % ranks * weight
                weight *= ranks
            indices.append(index)
        return tuple(indices)

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate. Raises: MeshError when an index is out of range or one is missing."""
        if len(coordinate) != len(self.axes):
            raise MeshError(f"coordinate {tuple(coordinate)} has {len(coordinate)} indices for {len(self.axes)} axes")
        rank = 0
        for axis, spans, index in zip(self.axes, self._steps, coordinate, strict=True):
            if not 0 <= index < axis.size:
                raise MeshError(f"index {index} is out of range on axis '{axis.name}' of size {axis.size}")
            for ranks, distance in spans:
                rank += index % ranks * distance
                index //= ranks
        return rank

    def group(self, axis_index: int, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The ranks that differ from `coordinate` along one axis only, in the order of that axis."""
        before, after = tuple(coordinate[:axis_index]), tuple(coordinate[axis_index + 1 :])
        return tuple(self.rank((*before, i, *after)) for i in range(self.axes[axis_index].size))

    def rank_array(self) -> np.ndarray:
        """All ranks, int64, shaped like `sizes`: element [i, j, ...] is the rank at coordinate (i, j, ...)."""
        array = np.zeros(self.sizes, dtype=np.int64)
        for position, (axis, spans) in enumerate(zip(self.axes, self._steps, strict=True)):
            index, offsets = np.arange(axis.size), np.zeros(axis.size, dtype=np.int64)
            for ranks, distance in spans:
                offsets += index % ranks * distance
                index = index // ranks
            array += offsets.reshape([-1 if i == position else 1 for i in range(len(self.axes))])
        return array


def factor_axes(
    mesh: Mesh,
    pin: Mapping[str, int],
    parts: Mapping[str, Sequence[int]] | None = None,
    free: Sequence[Sequence[int]] | None = None,
) -> LogicalMesh:
    """Lay pinned and free axes over a topology.

    Pinned degrees above 1 come first, nearest devices first, in the order of `ROLES`. An axis takes what it can of the
    fastest level that has ranks left and goes on with the next level; what no pin took becomes free axes "x0", "x1"...

    Args:    pin: degree of each pinned role.
             parts: divides a pinned degree into several axes, fastest first: ``{"tp": (2, 2)}`` gives tp0 and tp1.
             free: how each level that has ranks left is divided, fastest level first, and in each level fastest axis
                   first; None makes one axis a level.
    Returns: a `LogicalMesh` of all devices.
    Raises:  MeshError: a degree is not positive or has no such role; the product of the degrees does not divide the
             mesh; `parts` or `free` do not multiply to what they divide.
    """
    left, taken = _take_pinned(mesh, pin, parts or {})
    levels = [level for level, ranks in enumerate(left) if ranks > 1]
    if free is None:
        free = [(left[level],) for level in levels]
    wanted = [left[level] for level in levels]
    shown = [tuple(sizes) for sizes in free]
    if len(free) != len(levels) or any(
        min(sizes, default=0) < 1 or math.prod(sizes) != ranks for sizes, ranks in zip(free, wanted, strict=True)
    ):
        raise MeshError(f"free axes {shown} do not multiply to the ranks {wanted} left on the levels")
    spans_left = [((level, size),) for level, sizes in zip(levels, free, strict=True) for size in sizes if size > 1]
    named = [*taken, *((f"x{i}", None, spans) for i, spans in enumerate(spans_left))]

    distance = [math.prod(mesh.levels[:level]) for level in range(len(mesh.levels))]
    axes = []
    for name, role, spans in named:
        axes.append(Axis(name, math.prod(r for _, r in spans), role, spans, stride=distance[spans[0][0]]))
        for level, ranks in spans:
            distance[level] *= ranks
    return LogicalMesh(mesh, tuple(axes))


def inside_stage(mesh: Mesh, stages: int) -> Mesh:
    """The topology that one rank of a pipeline is made of: `stages` ranks are taken from the slowest levels.

    Raises:  MeshError: `stages` does not divide the mesh.
    """
    left, size = list(mesh.levels), stages
    for level in reversed(range(len(left))):
        part = math.gcd(size, left[level])
        left[level] //= part
        size //= part
    if stages < 1 or size != 1:
        raise MeshError(f"pp={stages} does not divide the {mesh.size} devices of {mesh}")
    return Mesh(tuple(reversed(left)), mesh.device)


def with_pipeline(inner: LogicalMesh, mesh: Mesh, stages: int) -> LogicalMesh:
    """All axes of a pipeline: those inside a stage, and "pp", which takes what `inside_stage` left out."""
    taken = [whole // part for whole, part in zip(mesh.levels, inner.topology.levels, strict=True)]
    spans = tuple((level, ranks) for level, ranks in enumerate(taken) if ranks > 1)
    below = math.prod(mesh.levels[: spans[0][0]]) * inner.topology.levels[spans[0][0]] if spans else 1
    return LogicalMesh(mesh, (*inner.axes, Axis("pp", stages, "pp", spans, stride=below)))


def free_factorisations(mesh: Mesh, pin: Mapping[str, int]) -> list[tuple[tuple[int, ...], ...]]:
    """Ways to divide what the pins leave, as `free` arguments of `factor_axes`.

    The first is one axis a level. The others divide one level in two factors, fastest level first, the smaller factor
    on the nearer devices first (8: 2x4, then 4x2).

    Raises:  MeshError: as `factor_axes`.
    """
    left, _ = _take_pinned(mesh, pin, {})
    whole = tuple((ranks,) for ranks in left if ranks > 1)
    divided = [
        (*whole[:i], (near, ranks // near), *whole[i + 1 :])
        for i, (ranks,) in enumerate(whole)
        for near in range(2, ranks)
        if ranks % near == 0
    ]
    return [whole, *divided]


_NamedSpans = tuple[str, str | None, tuple[tuple[int, int], ...]]


def _take_pinned(
    mesh: Mesh, pin: Mapping[str, int], parts: Mapping[str, Sequence[int]]
) -> tuple[list[int], list[_NamedSpans]]:
    """Ranks left on each level (fastest first) after the pins, and name, role and spans of each pinned axis."""
    for role, degree in pin.items():
        if role not in ROLES:
            raise MeshError(f"'{role}' is no role of an axis; the roles are {', '.join(ROLES)}")
        if not _is_positive_int(degree):
            raise MeshError(f"pin {role}={degree!r} is not a positive integer")
    product = math.prod(pin.values())
    if mesh.size % product:
        pins = ", ".join(f"{role}={pin[role]}" for role in ROLES if role in pin)
        raise MeshError(f"pinned degrees {pins} multiply to {product}, which does not divide the {mesh.size} of {mesh}")
    for role, sizes in parts.items():
        if math.prod(sizes) != pin.get(role, 1) or not all(map(_is_positive_int, sizes)):
            raise MeshError(f"parts {tuple(sizes)} of '{role}' do not multiply to its degree {pin.get(role, 1)}")

    left = list(mesh.levels)
    taken: list[_NamedSpans] = []
    for role in ROLES:
        sizes = [size for size in parts.get(role, (pin.get(role, 1),)) if size > 1]
        names = [role] if len(sizes) == 1 else [f"{role}{i}" for i in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            taken.append((name, role, _take(left, size)))
    return left, taken


def _take(left: list[int], size: int) -> tuple[tuple[int, int], ...]:
    """Take `size` ranks from `left`, in place, nearest level first.

    The greatest common divisor is what an axis can take of a level so that every group takes equally many there. Prime
    by prime this is greedy, so it takes all of `size` whenever `size` divides the product of `left`.
    """
    spans = []
    for level, ranks in enumerate(left):
        part = math.gcd(size, ranks)
        if part > 1:
            spans.append((level, part))
            left[level] //= part
            size //= part
    assert size == 1, "the product of all pinned degrees was checked to divide the mesh"
    return tuple(spans)


def _parse_shape(shape: "str | int | Sequence[int]") -> tuple[int, ...]:
    problem = f"mesh shape {shape!r} is not of the form '4', '2x8' or '4x2x8': positive integers, slowest level first"
    if isinstance(shape, str):
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape):
            raise MeshError(problem)
        sizes: tuple[Any, ...] = tuple(int(size) for size in shape.split("x"))
    elif isinstance(shape, Sequence):
        sizes = tuple(shape)
    else:
        sizes = (shape,)
    if not sizes or not all(map(_is_positive_int, sizes)):
        raise MeshError(problem)
    return sizes


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shorten(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:8]))}, ...]"
