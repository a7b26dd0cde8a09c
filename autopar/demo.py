"""`autopar demo`: a small GPT trained on local ranks and, beside it, on one device; every step is compared.

Enters: pins, steps, ranks. Leaves: losses of both and the largest difference. Refused: nothing here; the planner may.
`train` runs on each rank, `run` starts the ranks and hands on what they tell.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

BOUND = 1e-9  # "equal" in float64
LEARNING_RATE = 1e-3
MODEL, BATCH, SEQ = "gpt-tiny", 8, 32


def run(
    *,
    pin: Mapping[str, Any] | None = None,
    steps: int = 20,
    ranks: int = 4,
    timeout_s: float = 600.0,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train on `ranks` local processes.

    Args:    on_event: called with {"plan": ...} once, then {"step", "single", "parallel", "error"} for each step.
    Returns: {"equal", "bound", "max_error": {"loss", "params"}, "steps": [...], "plan": {...}}; errors are relative to
             the single device.
    Raises:  AutoparError: a rank failed.
    """
    from autopar.runtime.launch import CAPTURE, run_ranks_local

    payload = {"pin": dict(pin or {}), "steps": steps, "ranks": ranks}
    train = "autopar.demo:train"
    found: dict[str, Any] = run_ranks_local(train, ranks, payload, timeout_s, on_event=on_event, preload=CAPTURE)[0]
    return found


def train(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: train the parallel model, on rank 0 the single-device one too. Returns: as `run`."""
    import copy

    import torch
    from torch import distributed

    from autopar import api
    from autopar.errors import PlanError
    from autopar.mesh import Mesh
    from autopar.models import GPT, SIZES, GPTConfig
    from autopar.runtime.launch import report
    from autopar.schedule.build import KINDS

    first = distributed.get_rank() == 0
    torch.manual_seed(0)
    config = SIZES[MODEL].config
    assert isinstance(config, GPTConfig)
    single = GPT(config, batch=BATCH, seq=SEQ, device="cpu", dtype=torch.float64)
    mesh = Mesh(str(payload["ranks"]), device="cpu")
    example, _ = single.example_inputs()
    m = api.parallelize(copy.deepcopy(single), mesh, example_args=example, pin=payload["pin"] or None)
    if KINDS[m.plan.schedule].asynchronous:
        raise PlanError(f"demo: schedule {m.plan.schedule} applies stale gradients and does not equal one device")
    optimizer = torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE)
    single_optimizer = torch.optim.AdamW(single.parameters(), lr=LEARNING_RATE)
    if first:
        report({"plan": m.plan.to_dict()})
    tokens, steps = torch.Generator().manual_seed(1), []
    for step in range(payload["steps"]):
        rows = torch.randint(config.vocab, (BATCH, SEQ + 1), generator=tokens)
        batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss = _step(m, optimizer, batch)
        if first:
            expected = _step(single, single_optimizer, batch)
            error = _finite(abs(loss - expected) / abs(expected))
            steps.append({"step": step + 1, "single": expected, "parallel": loss, "error": error})
            report(steps[-1])
    trained = m.full_state_dict()  # on every rank: it gathers
    errors = {
        "loss": max((s["error"] for s in steps), default=0.0),
        "params": max(_error(trained[k], value) for k, value in single.state_dict().items()) if first else 0.0,
    }
    equal = max(errors.values()) <= BOUND
    return {"equal": equal, "bound": BOUND, "max_error": errors, "steps": steps, "plan": m.plan.to_dict()}


def _step(model: Any, optimizer: Any, batch: tuple[Any, Any]) -> float:
    """The user's loop: forward, backward, update."""
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _error(found: Any, expected: Any) -> float:
    """Largest difference over the largest magnitude expected.

    At least over the learning rate, the length of one Adam step: the bias of the keys has no gradient but rounding
    errors (softmax does not see it), starts at zero, and is moved by Adam all the same.
    """
    return _finite(float((found - expected).abs().max() / expected.abs().max().clamp_min(LEARNING_RATE)))


def _finite(error: float) -> float:
    """The error; the largest float for NaN, which no comparison would catch, and for infinity, which JSON lacks."""
    return error if math.isfinite(error) else sys.float_info.max
