"""Seconds of a collective along one logical axis.

Enters: a kind of collective, a buffer size, an `Axis` and a `Profile`.
Leaves: seconds. Sizes may be numpy arrays; the answer has their shape.
Refused: kinds it does not know (`ValueError`: a bug of ours, never the user's).

Each algorithm that a communication library would choose from is a line, seconds = latency + bytes x seconds_per_byte,
and the library takes the fastest: the time is the least of a few lines, so it is monotone and concave in the size.

An axis takes n_i ranks from each level i it spans; n is their product and p_i that of the levels below i, which is how
many devices of one group share the crossing of level i, each over its own link of bandwidth b_i and hop latency a_i.

    all-gather, reduce-scatter   ring:  (n-1)/n S / min_i(p_i b_i)       hops_i = (n_i - 1) x groups above level i
    broadcast                    chain: S / min_i(p_i b_i)               same hops
    all-reduce                   ring:  2 (n-1)/n S / min_i(p_i b_i)     twice those hops
                                 tree:  the slowest level of: level 0: as a ring, or S / r with an adding switch;
                                        level i: c S / (p_i b_i)         2 (n_0 - 1) and 2 ceil(log2 n_i) hops
                                        c = 1 for two nodes (each sends its sum once), 2 for more (up and down)
    all-to-all                   pairs: max_i (p_{i+1} - p_i)/n S / b_i  n_i - 1 messages
    send                         S / b and one hop, of the slowest level that the axis spans

Without a switch a group of k devices has k - 1 of the wires of each (`Link.among`).

Every algorithm has two lines: small packets run at a share `small_fraction` of the bandwidth, bulk transfers at all of
it after `bulk_latency_s`. A library without a reduce-scatter takes `Link.scatter_traffic` times the ring's seconds.

Source: Patarasuk & Yuan 2009 (ring), Thakur et al. 2005 (trees, pairwise exchange), Sanders et al. 2009 (two trees,
each node inner in one); which algorithms exist and that the fastest is taken: NCCL's documented tuning. Constants are
in the profiles. Published all-reduce plateaus of 8 to 4096 GPUs come out within 6 %, whole curves (32 KiB to 16 GiB)
within 10 % on average.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost.hardware import Link, Profile
from autopar.mesh import Axis

_SWITCH_RANKS = 5  # [measured] H200, B200: NCCL lets the switch add from five ranks on; with four it takes the ring.

Line = tuple[float, float]  # (latency in seconds, seconds a byte of the full buffer)


def collective_s(kind: str, size_bytes: Any, axis: Axis, profile: Profile) -> Any:
    """Seconds of one collective along one axis, when nothing else uses the links.

    Args:    kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "none".
             size_bytes: the full buffer, not sharded along this axis: the output of an all-gather, the input of a
             reduce-scatter, the buffer of an all-reduce or broadcast, one rank's input of an all-to-all, the message.
             A number, or an array of them.
             axis: whose ranks take part; only its spans matter.
    Returns: seconds, a float, or a float64 array shaped like `size_bytes`. An axis of one rank, no bytes, and "none"
             cost 0.
    Raises:  ValueError: unknown kind.
    Source:  see the module.
    """
    candidates = lines(kind, axis.spans, profile)
    size = np.asarray(size_bytes, dtype=np.float64)
    if not candidates:
        time_s = np.zeros_like(size)
    else:
        time_s = functools.reduce(np.minimum, (latency_s + size * s_per_byte for latency_s, s_per_byte in candidates))
        time_s = np.where(size > 0, time_s, 0.0)
    return float(time_s) if time_s.ndim == 0 else time_s


@functools.lru_cache(maxsize=4096)
def lines(kind: str, spans: tuple[tuple[int, int], ...], profile: Profile) -> tuple[Line, ...]:
    """The lines (latency, seconds a byte) whose least is the time of a collective; none when it is free.

    Args:    spans: (level, ranks taken from it), fastest first, as in `Axis`.
    Raises:  ValueError: unknown kind.
    """
    if kind not in _ALGORITHMS:
        raise ValueError(f"unknown collective '{kind}'; known are {', '.join(_ALGORITHMS)}")
    levels = tuple(_Span(level, ranks, profile.link(level).among(ranks)) for level, ranks in spans if ranks > 1)
    if not levels:
        return ()
    bulk_latency_s = sum(span.link.bulk_latency_s for span in levels)
    small_fraction = min(span.link.small_fraction for span in levels)
    slow = max(span.link.scatter_traffic for span in levels) if kind == "reduce_scatter" else 1.0
    found = []
    for latency_s, s_per_byte in _ALGORITHMS[kind](levels):
        found += [(latency_s, s_per_byte / small_fraction), (latency_s + bulk_latency_s, s_per_byte)]
    return tuple((slow * latency_s, slow * s_per_byte) for latency_s, s_per_byte in found)


@dataclass(frozen=True, slots=True)
class _Span:
    level: int
    ranks: int
    link: Link


_Levels = tuple[_Span, ...]  # the spanned levels with more than one rank, fastest first


def _below(levels: _Levels) -> list[int]:
    """p_i: ranks of the axis below each level, then n."""
    return [math.prod(span.ranks for span in levels[:i]) for i in range(len(levels) + 1)]


def _ring_s_per_byte(levels: _Levels) -> float:
    return 1.0 / min(p * span.link.bandwidth_bytes_per_s for p, span in zip(_below(levels), levels, strict=False))


def _ring_latency_s(levels: _Levels) -> float:
    """A chunk passes n - 1 hops on its way round the ring, as few as possible of them on slow levels."""
    below = _below(levels)
    n = below[-1]
    return sum((span.ranks - 1) * n // below[i + 1] * span.link.latency_s for i, span in enumerate(levels))


def _ring(levels: _Levels) -> list[Line]:
    n = _below(levels)[-1]
    return [(_ring_latency_s(levels), (n - 1) / n * _ring_s_per_byte(levels))]


def _broadcast(levels: _Levels) -> list[Line]:
    return [(_ring_latency_s(levels), _ring_s_per_byte(levels))]


def _all_reduce(levels: _Levels) -> list[Line]:
    [(latency_s, s_per_byte)] = _ring(levels)
    return [(2 * latency_s, 2 * s_per_byte), _tree(levels)]


def _tree(levels: _Levels) -> Line:
    below = _below(levels)
    n = below[-1]
    latency_s, s_per_byte = 0.0, 0.0
    for p, span in zip(below, levels, strict=False):
        link, ranks = span.link, span.ranks
        if span.level == 0:
            hops = 2 * (ranks - 1)
            volume_s = 2 * (n - 1) / n / link.bandwidth_bytes_per_s
            if link.reduce_bytes_per_s and ranks >= _SWITCH_RANKS:
                volume_s = 1 / link.reduce_bytes_per_s
        else:
            hops = 2 * math.ceil(math.log2(ranks))
            volume_s = (1 if ranks == 2 else 2) / (p * link.bandwidth_bytes_per_s)
        latency_s += hops * link.latency_s
        s_per_byte = max(s_per_byte, volume_s)
    return latency_s, s_per_byte


def _all_to_all(levels: _Levels) -> list[Line]:
    below = _below(levels)
    n = below[-1]
    latency_s = sum((span.ranks - 1) * span.link.latency_s for span in levels)
    s_per_byte = max((below[i + 1] - p) / n / levels[i].link.bandwidth_bytes_per_s for i, p in enumerate(below[:-1]))
    return [(latency_s, s_per_byte)]


def _send(levels: _Levels) -> list[Line]:
    # Neighbours lie on different levels at different places of the axis; a pipeline waits for its slowest hop.
    links = [span.link for span in levels]
    return [(max(link.latency_s for link in links), max(1 / link.bandwidth_bytes_per_s for link in links))]


_ALGORITHMS: dict[str, Callable[[_Levels], list[Line]]] = {
    "none": lambda levels: [],
    "all_reduce": _all_reduce,
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
