"""The constants of the step-time model that no data sheet gives, and what kind of software runs a plan.

Enters: nothing. Leaves: `Fitted`, one frozen record; `FITTED` holds the values in use. `Software`, what a published run
states or a plan assumes; `NATIVE` is the default backend's. Refused: nothing.

All were fitted together by `tests/bench/fit_cost.py` to published training steps of all sources at once; none belongs
to a row, a source or a model. What differs between devices (plateaus, attention, latencies) stands in their profiles.
"""

from dataclasses import dataclass, replace

from autopar.cost.hardware import Profile


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
             checkpoint_wait_s: what a recomputed layer costs besides, each micro-batch, where the host waits for the
             device at it: Megatron-DeepSpeed's published steps have it; that its host waits there is an assumption.
             straggler_fraction: slowdown for each doubling of the nodes: the slowest of many sets the pace.
             step_s: fixed cost of a step: data, gradient norm, loss scale, host.
             update_traffic: bytes that the optimizer moves over those it must. norm_traffic: whether the loop takes the
             gradients' norm, scales and clears them.
    """

    eager_traffic: float = 2.42
    fused_traffic: float = 1.4
    logit_traffic: float = 0.7
    score_traffic: float = 1.207
    host_kernel_s: float = 6e-06
    flash_half_dim: float = 12.3
    flash_backward: float = 0.714
    odd_head_fraction: float = 0.0887
    overlap_slowdown: float = 0.528
    accumulate_fraction: float = 0.358
    send_sync_s: float = 0.000167
    collective_sync_s: float = 1.82e-05
    checkpoint_wait_s: float = 0.00612
    straggler_fraction: float = 0.00853
    step_s: float = 0.0133
    update_traffic: float = 1.0
    norm_traffic: float = 1.0


FITTED = Fitted()


@dataclass(frozen=True, slots=True)
class Software:
    """How ops are run.

    Fields:  fused: ops between products share kernels; else each runs by itself. counted: with `fused` False, whether
             each op's own bytes are counted; else `eager_traffic` is over those of ideal fusion.
             native_attention: fused attention is the device vendor's, not a portable one.
             overlap: gradients are reduced, and parameters gathered, beside compute.
    """

    fitted: Fitted = FITTED
    fused: bool = True
    counted: bool = False
    native_attention: bool = False
    overlap: bool = True

    @property
    def traffic(self) -> float:
        """Bytes moved between products, over those that `cost/traffic.py` counts."""
        return self.fitted.fused_traffic if self.fused else self.fitted.eager_traffic


NATIVE = Software()
"""What a plan for GPUs assumes: autopar's own backend with its kernels, collectives beside compute, torch's attention.

It is what is assumed of published runs of compiled FSDP, too.
"""

ON_CPU = Software(
    Fitted(
        eager_traffic=1.0, logit_traffic=1.0, host_kernel_s=0.0, flash_half_dim=0.0, odd_head_fraction=1.0,
        overlap_slowdown=1.0, send_sync_s=0.0, collective_sync_s=0.0, checkpoint_wait_s=0.0, straggler_fraction=0.0,
        step_s=0.0, norm_traffic=0.0,
    ),
    fused=False,
    counted=True,
)  # fmt: skip
"""What a plan for processors assumes: each op by itself, collectives that take the time of the cores that compute.

[derived] what a GPU's host and kernels cost beside their work is in the profile that `autopar calibrate` measures.
"""


def software_of(profile: Profile) -> Software:
    """What runs a plan on devices of a profile."""
    if profile.multiprocessors:
        return NATIVE
    measured = replace(
        ON_CPU.fitted,
        eager_traffic=profile.pointwise_traffic,
        logit_traffic=profile.loss_traffic,
        update_traffic=profile.update_traffic,
    )
    return replace(ON_CPU, fitted=measured)
