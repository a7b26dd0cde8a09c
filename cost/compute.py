"""Seconds of one op on one device: a roofline with efficiencies that fall for small sizes.

Enters: floating-point operations, bytes moved to and from memory, dtype and a `Profile`. Leaves: seconds.
Refused: nothing; sizes may be numbers or numpy arrays, which broadcast.

    matmul:   t = launch + max(flop / (peak x plateau) x slow x misaligned, bytes / bandwidth)
    memory:   t = launch + bytes / bandwidth

On a GPU each multiprocessor makes one tile of the result at a time, so a product takes whole waves of tiles, and the
last wave leaves some idle. Libraries balance it in part (split sums), so waves lie between tiles / units and that
rounded up:

    slow = min over tile shapes of  elements of the tile x units / (b m n x speed of the shape) x (waves + D / k)

with b the batch of a batched matmul and D (`matmul_half_depth`) the filling and draining of the pipeline, once a
product. Without multiprocessors slow = (1 + O / (b m n)) (1 + D / k), O = `matmul_half_output`. `bandwidth` is the
memory's peak times what streaming kernels reach.

Source: Williams et al. 2009 (roofline); constants fitted to measured matmuls, see the profiles.
"""

from typing import Any

import numpy as np

from autopar.cost.hardware import Profile

TILES = np.array([(256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.75), (64, 128, 0.75)])
"""(rows, columns, relative speed) of the tiles that matmul libraries choose from. [measured] with square matmuls.

A small tile reads each operand for less work.
"""

WAVE_SHARE = 0.7
"""[measured] share of a last, partial wave that is paid as a whole one; square matmuls and published training steps."""

_ELEMENT_BYTES = {"fp64": 8, "float64": 8, "fp32": 4, "float32": 4, "tf32": 4}  # everything else that multiplies has 2


def element_bytes(dtype: object) -> int:
    """Bytes of one element of a floating-point dtype (a torch dtype, its name, or one of `hardware.DTYPES`)."""
    return _ELEMENT_BYTES.get(str(dtype).removeprefix("torch."), 2)


def matmul_s(flop: Any, m: Any, n: Any, k: Any, dtype: object, profile: Profile) -> Any:
    """Seconds of ``[b, m, k] @ [b, k, n]``.

    Args:    flop: 2 b m n k, which also says the batch b.
             m, n, k: rows, columns and length of the sum, of this device's shards.
    Returns: seconds; a float, or an array of the broadcast shape of the arguments. No flop costs 0.
    """
    flop, m, n, k = (np.asarray(x, dtype=np.float64) for x in (flop, m, n, k))
    width = element_bytes(dtype)
    safe_m, safe_n, safe_k = np.maximum(m, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0)
    batch = flop / (2 * safe_m * safe_n * safe_k)
    # A row that is not a whole number of vector loads makes the library fall back to slower kernels.
    misaligned = (n * width % profile.alignment_bytes != 0) | (k * width % profile.alignment_bytes != 0)
    odd = np.where(misaligned, 1 / profile.misaligned_fraction, 1.0)
    slowdown = _slowdown(batch, safe_m, safe_n, safe_k, profile) * odd
    compute_s = flop / (profile.peak(dtype) * profile.matmul_plateau) * slowdown
    size_bytes = width * batch * (safe_m * safe_k + safe_k * safe_n + safe_m * safe_n)
    time_s = profile.kernel_launch_s + np.maximum(compute_s, size_bytes / _bandwidth_bytes_per_s(profile))
    return _scalar(np.where(flop > 0, time_s, 0.0))


def _slowdown(batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray, profile: Profile) -> np.ndarray:
    """How many times longer a product takes than one that keeps every unit busy."""
    elements = np.maximum(batch * m * n, 1.0)
    if not profile.multiprocessors:
        return np.asarray((1 + profile.matmul_half_output / elements) * (1 + profile.matmul_half_depth / k))
    rows, columns, speed = (column.reshape(-1, *[1] * elements.ndim) for column in TILES.T)
    waves = batch * np.ceil(m / rows) * np.ceil(n / columns) / profile.multiprocessors
    waves = WAVE_SHARE * np.ceil(waves) + (1 - WAVE_SHARE) * np.maximum(waves, 1.0)
    tile = rows * columns * profile.multiprocessors / speed
    return np.asarray((tile * (waves + profile.matmul_half_depth / k)).min(axis=0) / elements)


def memory_bound_s(size_bytes: Any, profile: Profile) -> Any:
    """Seconds of a pointwise op, reduction or copy that reads and writes `size_bytes` in all. 0 bytes cost 0."""
    size = np.asarray(size_bytes, dtype=np.float64)
    time_s = profile.kernel_launch_s + size / _bandwidth_bytes_per_s(profile)
    return _scalar(np.where(size > 0, time_s, 0.0))


def _bandwidth_bytes_per_s(profile: Profile) -> float:
    return profile.memory_bandwidth_bytes_per_s * profile.memory_efficiency


def _scalar(time_s: np.ndarray) -> Any:
    return float(time_s) if time_s.ndim == 0 else time_s
