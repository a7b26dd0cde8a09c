"""A machine's measurements become a profile: known figures come back, the file loads, real ranks measure."""

import json

import numpy as np
import pytest

from autopar.calibrate import COLLECTIVES, DTYPES, MATMULS, SIZES, measure, profile_data, table
from autopar.cli import main
from autopar.console import plain_text
from autopar.cost.collective import collective_s
from autopar.cost.hardware import load_profile, parse_profile
from autopar.mesh import Axis

RANKS = 4
AXIS = Axis("ranks", RANKS, None, ((0, RANKS),), 1)


def synthetic():
    """What a machine would measure that is exactly the profile `cpu`."""
    cpu = load_profile("cpu")
    rates = {"fp64": 30e9, "fp32": 80e9, "bf16": 1e9}
    slow = {n: (1 + 400 / n**2) * (1 + 10 / n) for n in MATMULS}
    return {
        "matmul": {d: {str(n): 5e-6 + 2 * n**3 / rates[d] * slow[n] for n in MATMULS} for d in DTYPES},
        "stream_s": 3 * 64 * 2**20 / 15e9,
        "launch_s": 5e-6,
        "collective": {k: {str(s): collective_s(k, s, AXIS, cpu) for s in SIZES} for k in COLLECTIVES},
    }


def test_known_figures_come_back():
    profile = parse_profile(profile_data(synthetic(), RANKS), "test")
    cpu = load_profile("cpu")
    assert profile.peak("fp32") == pytest.approx(80e9, rel=0.02)
    assert profile.memory_bandwidth_bytes_per_s == pytest.approx(15e9)
    assert profile.kernel_launch_s == 5e-6
    assert profile.link(0).bandwidth_bytes_per_s == pytest.approx(cpu.link(0).bandwidth_bytes_per_s, rel=0.15)
    assert profile.link(0).latency_s == pytest.approx(cpu.link(0).latency_s, rel=0.15)
    assert profile.link(0).scatter_traffic == pytest.approx(cpu.link(0).scatter_traffic, rel=0.15)
    assert cpu.link(0).scatter_traffic == 2.0
    assert profile.matmul_half_output == pytest.approx(400, rel=0.25)
    assert profile.link(1).latency_s > profile.link(0).latency_s


def test_the_file_loads_and_predicts_what_was_measured(tmp_path):
    measured = synthetic()
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(profile_data(measured, RANKS)))
    profile = load_profile(str(path))
    for kind, times in measured["collective"].items():
        for size, seconds in times.items():
            assert collective_s(kind, int(size), AXIS, profile) == pytest.approx(seconds, rel=0.2)


def test_table_shows_measured_beside_predicted():
    measured = synthetic()
    shown = plain_text(table(measured, profile_data(measured, RANKS), RANKS))
    assert "all_reduce" in shown
    assert "GFLOP/s" in shown


def test_more_ranks_than_cores():
    """Collectives are measured by all ranks, which share the cores; the rest by one rank a core."""
    measured = synthetic() | {"cores": RANKS // 2}
    shared, alone = (parse_profile(profile_data(m, RANKS), "test") for m in (measured, synthetic()))
    assert shared.peak_flop_per_s == alone.peak_flop_per_s
    assert shared.memory_bandwidth_bytes_per_s == alone.memory_bandwidth_bytes_per_s
    crowded = shared.shared_by(RANKS)
    assert crowded.link(0).bandwidth_bytes_per_s == pytest.approx(alone.link(0).bandwidth_bytes_per_s, rel=0.3)
    assert crowded.link(0).latency_s == pytest.approx(alone.link(0).latency_s, rel=0.3)
    assert crowded.peak("fp32") == alone.peak("fp32") / 2


def test_one_rank_has_no_collectives():
    measured = synthetic() | {"collective": {}}
    data = profile_data(measured, 1)
    assert data["links"][0]["latency_s"]["value"] == load_profile("cpu").link(0).latency_s


@pytest.mark.slow
def test_real_ranks(tmp_path, capsys):
    told = []
    measured = measure(2, tell=told.append)
    assert told[0] == "matmuls in fp64"
    assert all(np.isfinite(s) and s > 0 for times in measured["matmul"].values() for s in times.values())
    assert set(measured["collective"]) == set(COLLECTIVES)
    path = tmp_path / "machine.json"
    assert main(["calibrate", "--ranks", "2", "-o", str(path)]) == 0
    assert "collectives" in capsys.readouterr().out
    assert load_profile(str(path)).link(0).bandwidth_bytes_per_s > 0
