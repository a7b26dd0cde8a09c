"""Run on each rank: a pipeline in which a rank stops in mid-schedule; what every rank is told, and after how long."""

import json
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

import autopar
from tests.end_to_end.pipeline_models import build, inputs


def stop(payload):
    """payload: {"stall_s", "how": "sleeps", "raises" or "dies", "rank": which, "folder"}. Writes [error, seconds] of
    each rank into a file of the folder: after a stall the ranks cannot talk any more, not even at their end.
    """
    args, kwargs = inputs("gpt")
    world, stage = dist.get_world_size(), payload["rank"]
    pin = {"pp": world, "microbatches": 4}
    m = autopar.parallelize(
        build("gpt"), str(world), example_args=args, example_kwargs=kwargs, pin=pin, backend="eager"
    )
    m(*args, **kwargs)
    pipeline = next(iter(m._cache.values())).run
    if dist.get_rank() == stage:
        real = pipeline.program.run[stage, 2]

        def stopped(*values):
            if payload["how"] == "raises":
                raise ValueError("the user's own error")
            if payload["how"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2 * payload["stall_s"])
            return real(*values)

        pipeline.program.run[stage, 2] = stopped
    os.environ["AUTOPAR_STALL_S"] = str(payload["stall_s"])
    dist.barrier()
    begun = time.monotonic()
    try:
        m(*args, **kwargs)
        found = ["", time.monotonic() - begun]
    except (autopar.AutoparError, ValueError) as error:
        found = [f"{type(error).__name__}: {error}", time.monotonic() - begun]
    Path(payload["folder"], str(dist.get_rank())).write_text(json.dumps(found))
    time.sleep(3 * payload["stall_s"])  # the first to end must not end the others
