"""Published runs: the errors of today with a margin, both file forms, and every way a file can be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.cli import main
from autopar.errors import PlanError
from autopar.validate import Predicted, predict, report, summary
from autopar.validate_framework import framework_of
from autopar.validate_ranks import groups_of, repeat_noise, spearman
from autopar.validate_rows import Published, read
from autopar.validate_run import run_of

DATA = Path(__file__).parent / "cost" / "data" / "published_runs.csv"


@pytest.fixture(scope="module")
def published():
    found = read([DATA])
    return predict(found)


# (median, 90th percentile) that each source reaches, with a margin of about a tenth; see tests/bench/validation.md.
BOUNDS = {
    "alpa_osdi22": (0.056, 0.248),
    "bigscience_bloom_sweeps": (0.039, 0.085),
    "korthikanti_2022": (0.062, 0.1),
    "llm_foundry": (0.028, 0.092),
    "megatron_sc21": (0.022, 0.163),
    "nvidia_dgxc_benchmarking": (0.023, 0.044),
    "torchtitan": (0.064, 0.09),
    "zero_bubble_2023": (0.031, 0.065),
    "all": (0.033, 0.093),
}


@pytest.mark.parametrize("source", BOUNDS)
def test_time(published, source):
    errors = summary(published)["time"][source]
    median, p90 = BOUNDS[source]
    assert errors["median"] <= median
    assert errors["p90"] <= p90


def test_the_bar_of_complete_rows(published):
    errors = summary([p for p in published if p.row.weight_class in "AB"])["time"]["all"]
    assert errors["n"] >= 420
    assert errors["median"] <= 0.036
    assert errors["p90"] <= 0.103


def test_ranks(published):
    data = summary(published)
    assert data["time"]["all"]["spearman"] >= 0.99
    assert data["groups"]["n"] >= 45
    assert data["groups"]["median_spearman"] >= 0.95
    assert data["groups"]["mean_spearman"] >= 0.84
    assert data["groups"]["errorless_spearman"] < 0.95  # what runs printed twice leave to any prediction
    assert data["groups"]["pairs"]["right"] >= 0.93 * data["groups"]["pairs"]["n"]
    assert data["groups"]["chosen"]["right"] >= 0.8 * data["groups"]["n"]
    assert data["groups"]["chosen"]["over"] <= 0.015 < 0.05 < data["groups"]["chosen"]["any"]


def test_noise_of_repeated_runs_bounds_what_ranks_can_say():
    def row(source, tp, time_s):
        return Published("a", source, group=source, tp=tp, step_time_s=time_s)

    quiet = [row("quiet", tp, time_s) for tp, time_s in ((1, 1.0), (2, 1.01), (4, 1.02))]
    noisy = [row("noisy", tp, time_s) for tp, time_s in ((1, 1.0), (1, np.exp(0.2)), (2, 1.01), (4, 1.02))]
    assert repeat_noise([*quiet, *noisy]) == {"noisy": pytest.approx(0.2 / np.sqrt(2))}
    assert groups_of((r, r.step_time_s) for r in quiet)["errorless_spearman"] == pytest.approx(1.0)
    found = groups_of((r, r.step_time_s) for r in noisy)
    assert found["mean_spearman"] == pytest.approx(1.0)
    assert found["errorless_spearman"] < 0.7  # three of the four are 1 % apart, two runs 14 %


def test_groups_are_listed_and_pooled():
    def row(group, measured, predicted):
        return Predicted(Published("a", "b", group=group, step_time_s=measured), predicted)

    right = [row("one", 1.0, 2.0), row("one", 2.0, 3.0), row("one", 2.02, 2.9), row("one", 4.0, 5.0)]
    wrong = [row("two", 1.0, 3.0), row("two", 2.0, 2.0), row("two", 3.0, 1.0)]
    small = [row("three", 1.0, 3.0), row("three", 2.0, 2.0)]
    groups = summary([*right, *wrong, *small])["groups"]
    assert groups["by_group"] == {"two": [3, -1.0], "one": [4, pytest.approx(0.8)]}
    assert groups["mean_spearman"] == pytest.approx(-0.1)
    assert groups["weighted_spearman"] == pytest.approx((0.8 * 6 - 3) / 9)
    assert -1 < groups["pooled_spearman"] < 0.8
    assert groups["pairs"] == {"n": 8, "right": 5}  # the pair that is 1 % apart does not count
    over = pytest.approx((0 + 2) / 2), pytest.approx((9.02 / 4 - 1 + 1) / 2)
    assert groups["chosen"] == {"right": 1, "over": over[0], "any": over[1]}
    equal = [row("one", 1.0, 2.0), row("one", 1.2, 2.0), row("one", 2.0, 3.0)]  # one configuration that ran twice
    assert summary(equal)["groups"]["chosen"] == {"right": 0, "over": pytest.approx(0.1), "any": pytest.approx(0.4)}


def test_memory_and_outcomes(published):
    data = summary(published)
    assert data["memory"]["all"]["median"] <= 0.07
    assert data["memory"]["all"]["p90"] <= 0.15
    assert data["outcome"]["right"] >= 0.97 * data["outcome"]["n"]


def test_rows_left_out_are_counted_by_reason(published):
    data = summary(published)
    assert sum(data["skipped"].values()) == 11
    assert [reason for reason in data["skipped"] if "convolutional" in reason]


def test_assumptions_are_named(published):
    by_id = {p.row.id: p for p in published}
    assert by_id["bs_177B_n384_tp1_pp48_dp8_mb1_gbs2048_hNone"].assumed == ("heads 96",)
    assert by_id["kort_t5_22B_full"].assumed == ()


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Every thirtieth row."""
    path = tmp_path_factory.mktemp("published") / "few.csv"
    header, *rows = DATA.read_text().splitlines()
    path.write_text("\n".join([header, *rows[::30], *(row for row in rows if "wresnet" in row)]))
    return str(path)


def test_json_has_the_documented_form(few, capsys):
    assert main(["validate", few, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"rows", "time", "memory", "outcome", "skipped"} <= data.keys()
    keys = "id source measured_s predicted_s measured_bytes predicted_bytes outcome predicted_outcome reason".split()
    assert all(set(keys) <= row.keys() for row in data["rows"])
    assert set(data["time"]["all"]) == {"n", "median", "p90", "spearman"}
    assert set(data["outcome"]) == {"n", "right"}


def test_table(few, capsys):
    assert main(["validate", few, "--summary"]) == 0
    shown = capsys.readouterr().out
    assert "90th percentile" in shown
    assert "left out: convolutional" in shown
    assert "llmf_" not in shown
    assert main(["validate", few]) == 0
    assert "llmf_" in capsys.readouterr().out


def test_spearman():
    assert spearman(np.array([1, 2, 3.0]), np.array([10, 20, 15.0])) == pytest.approx(0.5)
    assert spearman(np.array([1, 1, 2.0]), np.array([3, 3, 9.0])) == pytest.approx(1.0)
    assert spearman(np.array([1, 1.0]), np.array([1, 2.0])) is None


YAML = """
source: {id: somewhere}
rows:
- id: one
  model: {name: GPT-22B, layers: 48, hidden: 6144, heads: 64, ffn: 24576, vocab: 51200, seq_len: 2048}
  batch: {global_seqs: 4, micro_seqs: 4}
  precision: bf16
  hw: {gpu: A100-80GB-SXM, gpus_per_node: 8, inter_node_GBps_per_gpu_unidir: 25, n_gpus: 8}
  par: {tp: 8, pp: 1, dp: 1, zero: 0, seq_parallel: true, recompute: selective (attention core)}
  measured: {iter_time_s: 1.1, peak_mem_gib: 40}
- id: two
  model: {name: Llama-8B, layers: 32, hidden: 4096, heads: 32, kv_heads: 8, ffn: 14336, vocab: 128256, seq_len: 8192}
  batch: {local_batch: 2, global_seqs: 32}
  precision: float8
  hw: {gpu: H100, n_gpus: 16}
  par: {dp: 16}
  measured: {tokens_per_s_per_gpu: 6000}
- {id: three, gpu: A100, tflops: 3}
"""


def test_yaml(tmp_path):
    path = tmp_path / "runs.yaml"
    path.write_text(YAML)
    data = report([path])
    [one, *others] = data["rows"]
    assert one["predicted_s"] == pytest.approx(1.1, rel=0.1)
    assert one["measured_bytes"] == 40 * 2**30
    assert [row["reason"] for row in others] == ["fp8 or fp4", "not a training run"]
    assert data["skipped"] == {"fp8 or fp4": 1, "not a training run": 1}


def csv(tmp_path, **changes):
    row = dict(
        id="a", source="b", layers="2", hidden="64", seq_len="8", global_seqs="8", micro_seqs="1", dp="8", nodes="1"
    )
    row |= {"devices_per_node": "8", "device": "h100-sxm", "step_time_s": "1", "outcome": "fit", "precision": "bf16"}
    row |= changes
    path = tmp_path / "runs.csv"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "x"}, r"runs.csv line 2 \(a\): field 'layers' is 'x', not a number"),
        ({"hidden": "2.5"}, "field 'hidden' is 2.5; it must be a whole number"),
        ({"step_time_s": "-1"}, "field 'step_time_s' is -1; it must be a number >= 0"),
        ({"sp": "maybe"}, "field 'sp' is 'maybe', neither 0 nor 1"),
    ],
)
def test_wrong_figures_name_file_row_and_field(tmp_path, changes, message):
    with pytest.raises(PlanError, match=message):
        report([csv(tmp_path, **changes)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "h300"}, "device: unknown device 'h300'"),
        ({"layers": ""}, "layers not stated"),
        ({"device": ""}, "device not stated"),
        ({"dp": "4"}, "field 'dp' contradicts: tp x pp x cp x dp = 4, nodes x devices_per_node = 8"),
        ({"model_family": "moe"}, "experts not stated"),
        ({"precision": "fp8"}, "precision fp8 has no profile"),
        ({"schedule": "sideways", "pp": "2", "dp": "4"}, "schedule 'sideways' is none of"),
        ({"ep": "4", "model_family": "moe", "note": "experts=8 top_k=2"}, "expert parallel"),
        ({"note": "LoRA of rank 16"}, "LoRA: only adapters are trained"),
        ({"model_family": "t5"}, "encoder and decoder"),
        ({"tp": "0"}, "field 'tp' contradicts: it is 0"),
        ({"grad_accum": "4"}, "field 'grad_accum' contradicts: micro_seqs x grad_accum x dp = 32, global_seqs = 8"),
        ({"heads": "8", "kv_heads": "3"}, "field 'kv_heads' contradicts: 3 does not divide the 8 heads"),
        ({"zero": "4"}, "field 'zero' contradicts: level 4"),
        ({"outcome": "oom"}, "field 'outcome' contradicts: out of memory, and a step of 1 s"),
        ({"outcome": "maybe"}, "field 'outcome' contradicts: 'maybe' is neither"),
        ({"params_b": "8", "model_family": "dense-llama"}, "field 'params_b' contradicts: 8 billion"),
    ],
)
def test_rows_that_cannot_be_expressed_are_listed(tmp_path, changes, reason):
    [row] = report([csv(tmp_path, **changes)])["rows"]
    assert row["reason"].startswith(reason)
    assert row["predicted_s"] is None


@pytest.mark.parametrize(
    ("changes", "name", "named"),
    [
        ({"framework": "NeMo"}, "megatron", True),
        ({"framework": "jax"}, "xla", True),
        ({"framework": "nemo", "note": "FSDP"}, "megatron", True),  # the column outranks the note, the note the source
        ({"note": "FSDP FULL_SHARD", "source": "megatron"}, "fsdp", True),
        ({"note": "NeMo defaults to ZeRO-1"}, "megatron", True),
        ({"source": "torchtitan_h200"}, "fsdp", True),
        ({"source": "nemotron_report", "tp": 2}, "megatron", False),
        ({"zero": 3, "precision": "bf16"}, "fsdp", False),
        ({"zero": 3, "precision": "fp16"}, "megatron", False),
        ({"zero": 3, "precision": "bf16", "tp": 4}, "megatron", False),
        ({}, "megatron", False),
    ],
)
def test_framework(changes, name, named):
    row = Published(**({"id": "a", "source": "somebody_2027"} | changes))
    found, is_named = framework_of(row)
    assert (found.name, is_named) == (name, named)


def test_a_framework_that_is_not_named_is_an_assumption(tmp_path):
    [row] = report([csv(tmp_path, zero="3")])["rows"]
    assert "framework fsdp" in row["assumed"]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("A100 40GB", "a100-sxm-40gb"),
        ("A100-PCIe-80GB", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("V100", "v100-sxm-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("DGX H200", "h200-sxm"),
        ("GB200 NVL72", "gb200"),
        ("HGX B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GB300 NVL72", "gb300"),
        ("HGX B300", "b300"),
        ("A800 80GB", "a800-sxm-80gb"),
        ("H20 SXM", "h20"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_devices_by_other_spellings(tmp_path, device, name):
    found = read([csv(tmp_path, device=device)])
    run, _ = run_of(found.rows[0], found.rows)
    assert run.profile.name == name


def test_files_of_no_known_form(tmp_path, capsys):
    for name, text in (("runs.txt", ""), ("runs.yaml", "{[")):
        (tmp_path / name).write_text(text)
        assert main(["validate", str(tmp_path / name)]) == 1
        assert capsys.readouterr().err.startswith("autopar: PlanError: ")
    assert main(["validate", str(tmp_path / "none.csv")]) == 1
    assert "cannot read" in capsys.readouterr().err
