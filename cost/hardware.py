"""Hardware profiles: what a device computes, holds and sends.

Enters: the name of a profile in ``profiles/`` (``"h100-sxm"``), or the path of a JSON file of the same form.
Leaves: a frozen `Profile`. Formulas live in `compute`, `collective` and `memory`; every figure lives in the JSON file.
Refused, with a one-line `MeshError`: unknown names, and files with missing, negative or wrongly typed fields.

In a file every figure is ``{"value": number, "source": "[spec|derived|measured] where it comes from"}``: [spec] is the
vendor's, [derived] computed from others, [measured] observed. The tag is checked when the file is read.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.errors import MeshError

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""Dtypes a profile has a peak for. fp32 is strict; tf32 is what fp32 matmuls run in when the user allows it."""

_DTYPE_OF_TORCH = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PROFILES = Path(__file__).parent / "profiles"
_TAGS = ("[spec] ", "[derived] ", "[measured] ")


@dataclass(frozen=True, slots=True)
class Link:
    """How one device reaches its neighbours on one level. Bandwidths are per device, one direction, achieved.

    Fields:  bandwidth_bytes_per_s: what a device sends in a ring with large buffers, when all its node sends too.
             latency_s: one hop of a small message.
             bulk_latency_s: what a collective pays once to run at full bandwidth instead of in small packets.
             small_fraction: share of the bandwidth that small packets reach, 0 < share <= 1.
             reduce_bytes_per_s: a switch that adds: buffer bytes all-reduced per second; 0 when the switch cannot.
             peers: neighbours among which a device's wires are divided, where there is no switch; 0 with a switch.
             scatter_traffic: seconds of a reduce-scatter over those of a ring: gloo has none, and reduces all instead.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    bulk_latency_s: float = 0.0
    small_fraction: float = 1.0
    reduce_bytes_per_s: float = 0.0
    peers: int = 0
    scatter_traffic: float = 1.0

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0 or not 0 < self.small_fraction <= 1:
            raise MeshError(f"link '{self.name}' needs a bandwidth above 0 and a small_fraction between 0 and 1")

    def among(self, ranks: int) -> Link:
        """The link as a group of so many devices has it: without a switch, wires to the others lie idle."""
        if ranks > self.peers:
            return self
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * max(ranks - 1, 1) / self.peers)


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of device and its links.

    Fields:  peak_flop_per_s: dense peak of each of `DTYPES`, without sparsity.
             memory_bytes: what the driver offers. reserve_bytes: what we leave to context, libraries, fragmentation.
             memory_bandwidth_bytes_per_s: peak. memory_efficiency: share of it that streaming kernels reach.
             links: fastest level first; the last one repeats for slower levels.
             kernel_launch_s: from the end of one kernel to the start of the next when the host keeps ahead.
             matmul_plateau: share of the peak that large matmuls reach.
             matmul_half_output, matmul_half_depth: elements of the result (rows x columns), and length of the sum, at
             which a matmul is at half of the plateau. narrow_half_dim: the same for the head size of fused attention.
             multiprocessors: units that each work on one tile of a matmul; 0 where a matmul has no waves of tiles.
             attention_fraction, native_attention_fraction: speed of fused attention with heads of 128 over that of
             large matmuls: of kernels that run on any device, and of kernels written for this one.
             misaligned_fraction: what is left of the speed when a row is not a multiple of `alignment_bytes`.
             host_link_bytes_per_s: between a device and its host's memory, one direction. host_memory_bytes_per_s: a
             device's share of what the host's processors read and write. 0 where a file does not say.
             cores: what the devices of a node are run by, when they are processes of one machine, each at the speed of
             a core of its own; 0: devices share nothing. pointwise_traffic, loss_traffic, update_traffic: seconds of
             ops between products, of the loss, and of the optimizer, over those of the bytes they must move.
    """

    name: str
    peak_flop_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    reserve_bytes: int
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float
    links: tuple[Link, ...]
    kernel_launch_s: float
    matmul_plateau: float
    matmul_half_output: float
    matmul_half_depth: float
    narrow_half_dim: float
    multiprocessors: int
    attention_fraction: float
    native_attention_fraction: float
    misaligned_fraction: float
    alignment_bytes: int
    host_link_bytes_per_s: float = 0.0
    host_memory_bytes_per_s: float = 0.0
    cores: int = 0
    pointwise_traffic: float = 1.0
    loss_traffic: float = 1.0
    update_traffic: float = 1.0

    def __post_init__(self) -> None:
        if not self.links:
            raise MeshError(f"profile '{self.name}' has no links")
        if self.reserve_bytes >= self.memory_bytes:
            raise MeshError(
                f"profile '{self.name}': field 'reserve_bytes' is {self.reserve_bytes}, not below the "
                f"{self.memory_bytes} of 'memory_bytes'"
            )
        missing = [dtype for dtype in DTYPES if dtype not in self.peak_flop_per_s]
        if missing:
            raise MeshError(f"profile '{self.name}' has no peak_flop_per_s for {', '.join(missing)}")

    def link(self, level: int) -> Link:
        """The link of a level, counted from the fastest one (0: devices inside a node)."""
        return self.links[min(level, len(self.links) - 1)]

    def crowding(self, ranks: int) -> float:
        """How many times slower each of so many devices of a node is than one with a core of its own."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def shared_by(self, ranks: int) -> Profile:
        """The profile of a device where so many of a node are at work."""
        slow = self.crowding(ranks)
        if slow == 1.0:
            return self
        return replace(
            self,
            peak_flop_per_s={dtype: peak / slow for dtype, peak in self.peak_flop_per_s.items()},
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s / slow,
            kernel_launch_s=self.kernel_launch_s * slow,
            links=tuple(
                replace(
                    link,
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slow,
                    latency_s=link.latency_s * slow,
                    bulk_latency_s=link.bulk_latency_s * slow,
                )
                for link in self.links
            ),
        )

    def peak(self, dtype: object) -> float:
        """Dense peak, flop/s, of one of `DTYPES`, a torch dtype or its name.

        Integers and booleans run on the same units as fp32 and count like it.
        """
        name = str(dtype).removeprefix("torch.")
        return self.peak_flop_per_s.get(_DTYPE_OF_TORCH.get(name, name), self.peak_flop_per_s["fp32"])


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with autopar, sorted."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


@functools.cache
def load_profile(name_or_path: str | Path) -> Profile:
    """The profile of a device.

    Args:    name_or_path: one of `profile_names()`, or the path of a JSON file (anything with a "/" or ".json").
    Raises:  MeshError: no such profile, or a field of the file is missing, negative or of the wrong type.
    """
    text = str(name_or_path)
    if text.endswith(".json") or "/" in text:
        path = Path(text)
    else:
        path = _PROFILES / f"{text.lower()}.json"
        if not path.is_file():
            start = text.lower()
            near = sorted((name for name in profile_names() if start and name.startswith(start)), key=len)
            near = near or difflib.get_close_matches(start, profile_names(), n=1, cutoff=0.4)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise MeshError(f"unknown device '{text}'; known devices are {', '.join(profile_names())}.{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshError(f"cannot read hardware profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise MeshError(f"hardware profile {path} is not JSON: {str(error).splitlines()[0]}") from error
    return parse_profile(data, path.name)


# Each figure of a file with its type, and its largest value where it is a share. Zero is allowed only where listed.
_FIGURES: dict[str, tuple[type, float | None]] = {
    "memory_bytes": (int, None),
    "reserve_bytes": (int, None),
    "memory_bandwidth_bytes_per_s": (float, None),
    "memory_efficiency": (float, 1.0),
    "kernel_launch_s": (float, None),
    "matmul_plateau": (float, 1.0),
    "matmul_half_output": (float, None),
    "matmul_half_depth": (float, None),
    "narrow_half_dim": (float, None),
    "multiprocessors": (int, None),
    "attention_fraction": (float, 1.0),
    "native_attention_fraction": (float, 1.0),
    "misaligned_fraction": (float, 1.0),
    "alignment_bytes": (int, None),
}
_HOST_FIGURES: dict[str, tuple[type, float | None]] = {
    "host_link_bytes_per_s": (float, None),
    "cores": (int, None),
    "pointwise_traffic": (float, None),
    "loss_traffic": (float, None),
    "update_traffic": (float, None),
    "host_memory_bytes_per_s": (float, None),
}
"""A file may leave these out."""
_LINK_FIGURES: dict[str, tuple[type, float | None]] = {
    "bandwidth_bytes_per_s": (float, None),
    "latency_s": (float, None),
    "bulk_latency_s": (float, None),
    "small_fraction": (float, 1.0),
    "reduce_bytes_per_s": (float, None),
    "peers": (int, None),
    "scatter_traffic": (float, None),
}
_OPTIONAL = {"peers", "cores", "pointwise_traffic", "loss_traffic", "update_traffic", "scatter_traffic"}
"""Left out: the class's default."""
_MAY_BE_ZERO = {"reserve_bytes", "kernel_launch_s", "latency_s", "bulk_latency_s", "reduce_bytes_per_s", "peers"} | {
    "matmul_half_output",
    "matmul_half_depth",
    "narrow_half_dim",
    "multiprocessors",
}
# End of a figure's name, least and largest value that its unit lets expect, and the unit it is mistaken for outside.
_PLAUSIBLE = (
    ("flop_per_s", 1e8, 1e18, "TFLOP/s"),
    ("bytes_per_s", 1e6, 1e15, "GB/s"),
    ("memory_bytes", 1e7, 1e14, "GB"),
    ("_s", 0.0, 1.0, "microseconds"),
)
_UNITS = {"flop_per_s": "FLOP/s", "bytes_per_s": "bytes/s", "memory_bytes": "bytes", "_s": "seconds"}


def parse_profile(data: Any, file: str) -> Profile:
    """The profile of a file's data. file: its name in errors. Raises: MeshError: as `load_profile`."""
    name = _field(data, "name", str, file, "")
    peaks = _field(data, "peak_flop_per_s", dict, file, "")
    links = _field(data, "links", list, file, "")
    known = {"name", "note", "peak_flop_per_s", "links", *_FIGURES, *_HOST_FIGURES}
    _refuse_unknown(data, known, file, "")
    _refuse_unknown(peaks, set(DTYPES), file, "peak_flop_per_s.")
    parsed_links = []
    for i, link in enumerate(links):
        prefix = f"links[{i}]."
        link_name = _field(link, "name", str, file, prefix)
        _refuse_unknown(link, {"name", *_LINK_FIGURES}, file, prefix)
        parsed_links.append(Link(link_name, **_figures(link, _LINK_FIGURES, file, prefix)))
    if not parsed_links:
        raise MeshError(f"{file}: field 'links' is empty; it needs one link a level, fastest level first")
    return Profile(
        name=name,
        peak_flop_per_s=_figures(peaks, dict.fromkeys(DTYPES, (float, None)), file, "peak_flop_per_s."),
        links=tuple(parsed_links),
        **_figures(data, _FIGURES | {k: v for k, v in _HOST_FIGURES.items() if k in data}, file, ""),
    )


def _figures(data: Any, table: Mapping[str, tuple[type, float | None]], file: str, prefix: str) -> dict[str, Any]:
    return {
        name: _figure(data, name, kind, most, file, prefix)
        for name, (kind, most) in table.items()
        if name in data or name not in _OPTIONAL
    }


def _figure(data: Any, name: str, kind: type, most: float | None, file: str, prefix: str) -> Any:
    entry = _field(data, name, dict, file, prefix)
    value = _field(entry, "value", (int, float) if kind is float else int, file, f"{prefix}{name}.")
    source = _field(entry, "source", str, file, f"{prefix}{name}.")
    where = f"{file}: field '{prefix}{name}'"
    if not 0 <= value < float("inf") or (value == 0 and name not in _MAY_BE_ZERO) or (most and value > most):
        bound = f"between 0 and {most:g}" if most else "at least 0" if name in _MAY_BE_ZERO else "above 0"
        raise MeshError(f"{where} is {value}; it must be {bound}")
    _plausible(value, f"{prefix}{name}", where)
    if not source.startswith(_TAGS):
        raise MeshError(f"{where} has source {source!r}, which starts with none of {', '.join(map(str.strip, _TAGS))}")
    return kind(value)


def _plausible(value: float, path: str, where: str) -> None:
    """Raises: MeshError: a figure that can only be in another unit."""
    for key in path.split(".")[:1] + path.split(".")[-1:]:
        for end, least, most, other in _PLAUSIBLE:
            if key.endswith(end):
                if value and not least <= value <= most:
                    raise MeshError(f"{where} is {value:g}; it is read in {_UNITS[end]}, and looks like {other}")
                return


def _field(data: Any, name: str, kind: Any, file: str, prefix: str) -> Any:
    if not isinstance(data, dict):
        where = f"field '{prefix[:-1]}'" if prefix else "the file"
        raise MeshError(f"{file}: {where} is {type(data).__name__}, not an object")
    if name not in data:
        raise MeshError(f"{file}: field '{prefix}{name}' is missing")
    value = data[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {str: "a string", dict: "an object", list: "a list", int: "an integer"}.get(kind, "a number")
        raise MeshError(f"{file}: field '{prefix}{name}' is {value!r}; it must be {wanted}")
    return value


def _refuse_unknown(data: dict[str, Any], known: set[str], file: str, prefix: str) -> None:
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"; did you mean '{prefix}{near[0]}'?" if near else ""
            raise MeshError(f"{file}: unknown field '{prefix}{name}'{hint}")
