"""What it costs to keep states in host memory: bytes left on the device, bytes on the host, seconds a step.

Enters: bytes of a parameter by role, how often a step gathers it. Leaves: bytes an element on the device and on the
host, seconds an element of moving and updating. Refused, with a `PlanError`: a machine whose profile does not say how
fast its host is.

    offload       on the device                        sent to the device a step          sent back
    optimizer     weights, gradients of a backward     weights, once                      gradients
    parameters    nothing but what a block reads       what is computed with, forward     gradients
                                                       and backward

With ZeRO 1 and 2 both keep the gathered copy, which is priced where it is gathered, and nothing of the shard. A
pipeline fetches parameters for a whole call, so that "parameters" leaves as much on the device as "optimizer". As with
the gathers of ZeRO 3, what a block has fetched is not counted. Transfers are not taken to run beside the computation.

Source: Ren et al. 2021 (ZeRO-Offload), section 4; there gradients leave the device while the backward runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.hardware import Profile
from autopar.cost.memory import ParameterBytes
from autopar.errors import PlanError


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Of one element of a parameter."""

    device_bytes: float
    host_bytes: float
    update_s: float


def check_host(profile: Profile) -> None:
    """Raises: PlanError when the profile does not say how fast the host is."""
    if not profile.host_link_bytes_per_s or not profile.host_memory_bytes_per_s:
        raise PlanError(
            f"pin offload: profile '{profile.name}' has no host_link_bytes_per_s and host_memory_bytes_per_s; add them"
        )


def offload_price(
    held: ParameterBytes, offload: str, gathered_once: bool, whole_call: bool, profile: Profile
) -> Offloaded:
    """Prices of keeping a trained parameter on the host.

    Args:    held: bytes by role when nothing is offloaded. offload: "optimizer" or "parameters".
             gathered_once: ZeRO 1 or 2. whole_call: parameters are fetched for a call, as in a pipeline.
    Raises:  PlanError: as `check_host`.
    """
    check_host(profile)
    computed = held.compute_copy or held.weights
    stays = not gathered_once and (offload == "optimizer" or whole_call)
    sent = computed if gathered_once else held.weights if stays else 2 * computed
    traffic = 2 * held.weights + held.gradients + 2 * held.optimizer
    return Offloaded(
        device_bytes=held.weights + held.compute_copy + held.gradients if stays else 0.0,
        host_bytes=held.weights + held.gradients + held.optimizer,
        update_s=(sent + held.gradients) / profile.host_link_bytes_per_s + traffic / profile.host_memory_bytes_per_s,
    )
