"""The training script of README.md under torchrun with the plan of a pipeline, unchanged, beside one device."""

import os
import subprocess
import sys

import pytest
import torch

import autopar
from tests.end_to_end.readme_script import ROOT

SCRIPT = str(ROOT / "tests" / "end_to_end" / "readme_script.py")
STEPS_LENGTH = 10 * 1e-3
"""Of one number, over the whole script."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_trains_the_same(tmp_path):
    model = autopar.models.build("gpt-tiny", batch=8, seq=64, device="meta")
    plan = autopar.plan(model, autopar.Mesh("4", device="cpu"), pin={"pp": 2, "dp": 2, "microbatches": 2})
    path = tmp_path / "plan.json"
    plan.save(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for command in (
        [SCRIPT, "-", str(tmp_path)],
        [*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", SCRIPT, str(path), str(tmp_path)],
    ):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    one, *ranks = (torch.load(tmp_path / f"{name}.pt") for name in ("one", *range(4)))
    for found in ranks:
        assert found["held"] < len(found["parameters"])
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert found["parameters"].keys() == one["parameters"].keys()
        for name, expected in one["parameters"].items():
            # Adam makes steps of what is left of a gradient that is truly zero (the bias of keys), in float32
            least = 1e-3 * STEPS_LENGTH * expected.numel() ** 0.5
            assert (found["parameters"][name] - expected).norm() <= max(1e-4 * expected.norm(), least), name
