"""The constants of the step-time model that no data sheet gives.

Enters: nothing. Leaves: `Fitted`, one frozen record; `FITTED` holds the values in use. Refused: nothing.

All were fitted together by `tests/bench/fit_cost.py` to published training steps of all sources at once; none belongs
to a row, a source or a model. What differs between devices (plateaus, attention, latencies) stands in their profiles.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants, all [measured]; shares and multiples are pure numbers.

    Fields:  eager_traffic, fused_traffic: bytes moved by ops between matmuls over those of ideal fusion, for frameworks
             that run each op by itself and for those with fused kernels or a compiler.
             logit_traffic, score_traffic: the same for the loss, and for the softmax of unfused attention.
             host_kernel_s: the host launches one kernel; a layer takes at least that for each of its kernels.
             flash_half_dim: head size at which fused attention is at half of its speed.
             flash_backward: speed of its backward over its forward.
             odd_head_fraction: speed of attention matmuls whose heads are no whole number of vector loads.
             overlap_slowdown: share of a hidden collective that is felt all the same: its kernels take multiprocessors
             and memory bandwidth.
             accumulate_fraction: share of the traffic of gradient accumulation that matmuls do not absorb.
             send_sync_s: a pipeline send waits for both hosts. collective_sync_s: what a collective in line costs
             besides the wire, mostly the wait for the last rank.
             straggler_fraction: slowdown for each doubling of the nodes: the slowest of many sets the pace.
             step_s: fixed cost of a step: data, gradient norm, loss scale, host.
    """

    eager_traffic: float = 2.17
    fused_traffic: float = 1.33
    logit_traffic: float = 0.7
    score_traffic: float = 0.926
    host_kernel_s: float = 6e-06
    flash_half_dim: float = 14.0
    flash_backward: float = 0.736
    odd_head_fraction: float = 0.0741
    overlap_slowdown: float = 0.621
    accumulate_fraction: float = 0.405
    send_sync_s: float = 0.000167
    collective_sync_s: float = 1.86e-05
    straggler_fraction: float = 0.0121
    step_s: float = 0.0115


FITTED = Fitted()
