"""`autopar calibrate`: measure this machine into a hardware profile.

Enters: the number of local ranks, each of one thread, that a node of the profile has. Leaves: a profile as JSON data, a
table, and the measurements. Refused, with an error of ours: ranks that fail or take too long.

All ranks measure at once, as they compute at once in training; where there are fewer cores than ranks, one a core (a
call that is shorter than the turns that ranks take would be measured as if it had the core to itself). What is fitted
to what:

    peak, plateau                          the fastest matmul of each dtype; half_output and half_depth: small ones
    memory bandwidth                       adding buffers that no cache holds
    kernel launch                          adding tiny buffers
    attention, pointwise, loss, update     forward and backward of attention, of a norm with an activation and a sum, of
                                           a cross entropy; a step of AdamW: over what their work or bytes would take
    latency, bandwidth of the first link   gloo's collectives from 1 KiB to 16 MiB, as `cost/collective` prices them;
                                           scatter_traffic: its reduce-scatters, over what those figures say

Where there are fewer cores than ranks, the profile has the figures of a rank with a core of its own, and the cores.

Devices beyond this machine are not measured: the second link repeats the first, with a network's latency.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost.collective import lines
from autopar.cost.hardware import Link, Profile, load_profile, parse_profile

if TYPE_CHECKING:
    from rich.console import RenderableType

DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
MATMULS = (32, 64, 128, 256, 512, 1024)
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "all_to_all", "reduce_scatter")
SIZES = tuple(2**k for k in (10, 14, 18, 20, 22, 24))
STREAM_BYTES = 64 * 2**20
_NETWORK_S = 5e-5  # [derived] what a round trip over Ethernet adds to a hop

Measured = Mapping[str, Any]


def measure(ranks: int, timeout_s: float = 600.0, tell: Callable[[str], None] = lambda stage: None) -> Measured:
    """Measurements of `ranks` local processes: {"matmul": {dtype: {n: s}}, "stream_s", "launch_s", "collective": ...}.

    tell: called with each thing that is measured, as it begins.
    Raises:  AutoparError: a rank failed.
    """
    from autopar.runtime.launch import run_ranks_local

    found = run_ranks_local("autopar.calibrate:measure_rank", ranks, {}, timeout_s, on_event=tell)
    slowest: Measured = {**_slowest(found), "cores": len(os.sched_getaffinity(0))}
    return slowest


def measure_rank(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What one rank measures; the others do the same at the same time. Ranks beyond the cores measure collectives."""
    import torch
    from torch import distributed

    from autopar.runtime.launch import report

    torch.set_num_threads(1)
    first, computes = distributed.get_rank() == 0, distributed.get_rank() < len(os.sched_getaffinity(0))

    def tell(stage: str) -> None:
        distributed.barrier()
        if first:
            report(stage)

    matmul: dict[str, dict[str, float]] = {}
    for name, dtype in DTYPES.items():
        tell(f"matmuls in {name}")
        matmul[name] = {}
        for n in MATMULS if computes else ():
            a, b = (torch.ones(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
            matmul[name][str(n)] = _seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
            if matmul[name][str(n)] > 0.5:
                break  # larger ones would take minutes, and this is the plateau already
    tell("memory")
    found: dict[str, float] = {}
    if computes:
        big, small = [torch.ones(STREAM_BYTES // 4) for _ in range(3)], torch.ones(8)
        found["stream_s"] = _seconds(lambda: torch.add(big[0], big[1], out=big[2]))
        found["launch_s"] = _seconds(lambda: small.add_(1.0))
    collective: dict[str, dict[str, float]] = {}
    for kind in COLLECTIVES if distributed.get_world_size() > 1 else ():
        tell(f"collective {kind}")
        collective[kind] = {str(size): _collective_seconds(kind, size) for size in SIZES}
    tell("ops of a model")
    if computes:
        found |= {f"{name}_s": _seconds(call, 0.4) for name, call in _model_ops().items()}
    return {"matmul": matmul, "collective": collective, **found}


TOKENS, WIDTH, HEADS, WORDS = 512, 512, 8, 4096
"""Sizes of the ops that `_model_ops` measures; attention is over sequences of 128."""


def _model_ops() -> dict[str, Callable[[], Any]]:
    """Forward and backward of what stands between matmuls, and a step of AdamW."""
    import torch
    from torch.nn import functional as F

    x, y, logits = (torch.randn(TOKENS, n).requires_grad_() for n in (WIDTH, WIDTH, WORDS))
    q, k, v = (torch.randn(TOKENS // 128, HEADS, 128, WIDTH // HEADS).requires_grad_() for _ in range(3))
    weight, targets = torch.ones(WIDTH, requires_grad=True), torch.zeros(TOKENS, dtype=torch.int64)
    parameters = [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(8)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    ones, heads = torch.ones(TOKENS, WIDTH), torch.ones_like(q)

    def pointwise() -> None:
        (F.gelu(F.layer_norm(x, (WIDTH,), weight, weight), approximate="tanh") + y).backward(ones)  # type: ignore[no-untyped-call]  # torch's

    return {
        "attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(heads),  # type: ignore[no-untyped-call]  # torch's
        "pointwise": pointwise,
        "loss": lambda: F.cross_entropy(logits, targets).backward(),  # type: ignore[no-untyped-call]  # torch's
        "update": optimizer.step,
    }


def _model_shares(measured: Measured, rate: float, bandwidth: float) -> dict[str, float]:
    """How much faster or slower these ops are than by work and bytes; of files without them, as a CPU is known to be.

    rate: flop/s of large matmuls. bandwidth: bytes/s.
    """
    if "attention_s" not in measured:
        return {"attention_fraction": 0.5, "pointwise_traffic": 1.0, "loss_traffic": 1.0, "update_traffic": 1.0}
    from autopar.cost.fitted import ON_CPU
    from autopar.cost.memory import parameter_bytes
    from autopar.cost.op_time import loss_bytes

    flop = 4 * TOKENS * WIDTH * 128 * 129 / 256 * (1 + 2.5 / ON_CPU.fitted.flash_backward)
    tensor = 4.0 * TOKENS * WIDTH
    moves = 2 + 3 + 2 + 3 + 3  # norm and activation, each way, and the sum's forward; a sum passes its gradient on
    held = parameter_bytes("adamw", 4)
    ideal = {
        "pointwise": moves * tensor,
        "loss": sum(loss_bytes(TOKENS * WORDS, 4, ON_CPU.fitted)),
        "update": 8 * WIDTH * WIDTH * (2 * (held.weights + held.optimizer) + held.gradients),
    }
    shares = {f"{name}_traffic": float(measured[f"{name}_s"] * bandwidth / size) for name, size in ideal.items()}
    return {"attention_fraction": min(1.0, flop / rate / float(measured["attention_s"])), **shares}


def _seconds(call: Callable[[], Any], budget_s: float = 0.15) -> float:
    """Seconds of a call: the lower quintile of as many as the budget allows, 3 to 200; others share the machine."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return float(np.quantile(times, 0.2))


def _collective_seconds(kind: str, size_bytes: int, times: int = 15) -> float:
    """Seconds (median: to wait for a rank that has no core is part of them) of a collective whose full buffer has
    `size_bytes`; every rank makes as many.
    """
    import torch
    from torch import distributed

    world = distributed.get_world_size()
    full = torch.ones(max(size_bytes // 4 // world * world, world))
    part, parts = full[: len(full) // world].clone(), list(full.clone().chunk(world))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(full),
        "all_gather": lambda: distributed.all_gather(parts, part),
        "broadcast": lambda: distributed.broadcast(full, 0),
        "all_to_all": lambda: distributed.all_to_all_single(torch.empty_like(full), full),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, full),
    }
    found = []
    for _ in range(times):
        distributed.barrier()
        begun = time.perf_counter()
        calls[kind]()
        found.append(time.perf_counter() - begun)
    return float(np.median(found))


def _slowest(found: Sequence[Any]) -> Any:
    """Leaf by leaf the largest: a step waits for the slowest rank. The first has measured everything."""
    if isinstance(found[0], dict):
        return {key: _slowest([f[key] for f in found if key in f]) for key in found[0]}
    return max(found)


def profile_data(measured: Measured, ranks: int, name: str = "this-machine") -> dict[str, Any]:
    """The profile of measurements, in the form of the files that `load_profile` reads."""
    import torch

    where = f"{ranks} ranks of 1 thread, {platform.processor() or platform.machine()}, torch {torch.__version__}"

    def entry(value: float, of: str, tag: str = "measured") -> dict[str, Any]:
        return {"value": value, "source": f"[{tag}] {of}{f', {where}' if tag == 'measured' else ''}"}

    cores = measured.get("cores", ranks)
    alone = min(1.0, cores / ranks)  # with cores of their own, ranks would take so much of the time of a collective
    collective = _scaled(measured["collective"], alone)
    rates = {d: max(2 * int(n) ** 3 / s for n, s in times.items()) for d, times in measured["matmul"].items()}
    output, depth = _half_sizes(measured["matmul"]["fp32"], rates["fp32"], measured["launch_s"])
    bandwidth = 3 * STREAM_BYTES / measured["stream_s"]
    latency_s, wire, scatter = _link(collective, ranks)
    memory = _memory_bytes() // ranks
    shares = _model_shares(measured, 0.95 * rates["fp32"], bandwidth)
    link = {
        "name": "gloo-loopback",
        "bandwidth_bytes_per_s": entry(wire, "fitted to gloo collectives from 1 KiB to 16 MiB"),
        "latency_s": entry(latency_s, "fitted to gloo collectives from 1 KiB to 16 MiB"),
        "bulk_latency_s": entry(0.0, "gloo has one protocol", "derived"),
        "small_fraction": entry(1.0, "gloo has one protocol", "derived"),
        "reduce_bytes_per_s": entry(0.0, "no in-switch reduction", "spec"),
        "scatter_traffic": entry(scatter, "reduce-scatters, over a ring at the bandwidth and latency of this link"),
    }
    far = link | {
        "name": "gloo-network",
        "bandwidth_bytes_per_s": entry(wire, "not measured: as on this machine", "derived"),
        "latency_s": entry(latency_s + _NETWORK_S, "not measured: as on this machine and a round trip", "derived"),
    }
    return {
        "name": name,
        "note": f"Measured by autopar calibrate on {platform.node() or 'this machine'}: {where}.",
        "peak_flop_per_s": {
            "fp64": entry(rates["fp64"], "fastest matmul"),
            "fp32": entry(rates["fp32"], "fastest matmul"),
            "tf32": entry(rates["fp32"], "no tf32: runs as fp32", "derived"),
            "bf16": entry(rates["bf16"], "fastest matmul"),
            "fp16": entry(rates["bf16"], "as bf16", "derived"),
        },
        "memory_bytes": entry(memory, "a rank's share of the memory"),
        "reserve_bytes": entry(min(2**29, memory // 8), "interpreter and libraries", "derived"),
        "memory_bandwidth_bytes_per_s": entry(bandwidth, "adding buffers of 64 MiB"),
        "memory_efficiency": entry(1.0, "the bandwidth is the measured one", "derived"),
        "links": [link, far],
        "kernel_launch_s": entry(measured["launch_s"], "adding 8 numbers in place"),
        "matmul_plateau": entry(0.95, "large matmuls of a step, of the fastest one", "derived"),
        "matmul_half_output": entry(output, "fitted to matmuls of 32 to 256"),
        "matmul_half_depth": entry(depth, "fitted to matmuls of 32 to 256"),
        "narrow_half_dim": entry(depth, "as matmuls", "derived"),
        "multiprocessors": entry(0, "a core works through a product without waves of tiles", "derived"),
        "attention_fraction": entry(shares["attention_fraction"], "attention, 128 tokens, heads of 64, with backward"),
        "native_attention_fraction": entry(shares["attention_fraction"], "as the portable one", "derived"),
        "cores": entry(cores, "that the process may use", "spec"),
        "pointwise_traffic": entry(shares["pointwise_traffic"], "norm, activation and sum, with backward"),
        "loss_traffic": entry(shares["loss_traffic"], "cross entropy of 4096 words, with backward"),
        "update_traffic": entry(shares["update_traffic"], "AdamW on eight matrices of 512"),
        "misaligned_fraction": entry(1.0, "no such effect", "derived"),
        "alignment_bytes": entry(4, "no such effect", "derived"),
        "host_link_bytes_per_s": entry(bandwidth / 2, "a copy reads and writes: half of that", "derived"),
        "host_memory_bytes_per_s": entry(bandwidth, "the memory bandwidth: host and device are one", "derived"),
    }


def _scaled(measured: Any, factor: float) -> Any:
    """All seconds of measurements times a factor."""
    if isinstance(measured, Mapping):
        return {key: _scaled(value, factor) for key, value in measured.items()}
    return measured * factor


def _half_sizes(times: Mapping[str, float], rate: float, launch_s: float) -> tuple[float, float]:
    """The half_output and half_depth that come nearest to small matmuls, in the mean of |log|."""
    sizes = np.array([int(n) for n in times if int(n) <= 256], dtype=np.float64)
    seconds = np.array([times[str(int(n))] for n in sizes])
    output, depth = np.meshgrid(np.geomspace(1, 20000, 60), np.geomspace(0.1, 200, 60))
    slow = (1 + output[..., None] / sizes**2) * (1 + depth[..., None] / sizes)
    error = np.abs(np.log((launch_s + 2 * sizes**3 / rate * slow) / seconds)).mean(axis=-1)
    best = np.unravel_index(np.argmin(error), error.shape)
    return float(output[best]), float(depth[best])


def _link(times: Mapping[str, Mapping[str, float]], ranks: int) -> tuple[float, float, float]:
    """Latency and bandwidth of a link with which the model of collectives comes nearest to the measured ones, but for
    broadcasts, which gloo sends along a tree and no plan makes; and how many times what it says of a reduce-scatter one
    takes.
    """
    base = load_profile("cpu")
    if not times:
        template = base.link(0)
        return template.latency_s, template.bandwidth_bytes_per_s, template.scatter_traffic

    def over(kinds: Iterable[str], latency_s: float, bandwidth: float) -> list[float]:
        """Logarithms of measured over predicted seconds."""
        found = []
        for kind in kinds:
            options = lines(kind, ((0, ranks),), _with_link(base, Link("", bandwidth, latency_s)))
            for size, seconds in times[kind].items():
                predicted = min(start + int(size) * each for start, each in options)
                found.append(float(np.log(seconds / predicted)))
        return found

    fitted = [kind for kind in times if kind not in ("reduce_scatter", "broadcast")]
    latencies, bandwidths = np.geomspace(1e-6, 1e-2, 41), np.geomspace(1e7, 1e11, 41)
    best = min(((a, b) for a in latencies for b in bandwidths), key=lambda pair: np.mean(np.abs(over(fitted, *pair))))
    scatter = over([kind for kind in times if kind == "reduce_scatter"], *best)
    return float(best[0]), float(best[1]), float(np.exp(np.median(scatter))) if scatter else 1.0


def _with_link(profile: Profile, link: Link) -> Profile:
    from dataclasses import replace

    return replace(profile, links=(link,))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(measured: Measured, data: Mapping[str, Any], ranks: int) -> RenderableType:
    """Measured against what the profile predicts of it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    from autopar.console import seconds, size
    from autopar.cost.collective import collective_s
    from autopar.cost.compute import matmul_s
    from autopar.mesh import Axis

    profile = parse_profile(dict(data), "the measured profile").shared_by(ranks)
    products = Table(title="matmuls", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("dtype", "size", "measured", "profile", "rate"):
        products.add_column(name, justify="left" if name == "dtype" else "right")
    for dtype, times in measured["matmul"].items():
        for n, s in times.items():
            work = 2 * int(n) ** 3
            predicted = matmul_s(work, int(n), int(n), int(n), dtype, profile)
            products.add_row(dtype, n, seconds(s), seconds(predicted), f"{work / s / 1e9:.1f} GFLOP/s")
    wires = Table(title="collectives", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("kind", "buffer", "measured", "profile"):
        wires.add_column(name, justify="left" if name == "kind" else "right")
    axis = Axis("ranks", ranks, None, ((0, ranks),), 1)
    for kind, by_size in measured["collective"].items():
        for text, s in by_size.items():
            wires.add_row(kind, size(int(text)), seconds(s), seconds(collective_s(kind, int(text), axis, profile)))
    bandwidth = profile.memory_bandwidth_bytes_per_s / 1e9
    return Group(products, wires, f"memory: {bandwidth:.1f} GB/s a rank; launch: {seconds(measured['launch_s'])}")
