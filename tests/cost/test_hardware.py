"""Profiles: the shipped files, and every way a file can be wrong."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from autopar.cost import hardware
from autopar.cost.hardware import Link, load_profile, profile_names
from autopar.errors import MeshError

PROFILES = Path(hardware.__file__).parent / "profiles"
NAMES = set(
    "a100-pcie-40gb a100-pcie-80gb a100-sxm-40gb a100-sxm-80gb a800-sxm-80gb b200 b300 cpu gb200 gb300 h20 "
    "h100-96gb-hbm2e-500w h100-pcie h100-sxm h200-sxm h800-sxm l40s mi300x mi325x mi355x rtx-4090 v100-sxm-16gb "
    "v100-sxm-32gb".split()
)


def test_names():
    assert set(profile_names()) == NAMES
    assert list(profile_names()) == sorted(profile_names())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_shipped_profiles_are_sane(name):
    profile = load_profile(name)
    assert profile.name == name
    assert 0 <= profile.reserve_bytes < profile.memory_bytes / 7
    assert profile.peak("fp16") >= profile.peak("bf16")
    assert profile.peak("fp32") >= profile.peak("fp64") * 0.99
    bandwidths = [link.bandwidth_bytes_per_s for link in profile.links]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert len(profile.links) == (3 if name in ("gb200", "gb300") else 2)
    assert hash(profile) == hash(load_profile(name))
    assert pickle.loads(pickle.dumps(profile)) == profile


def test_vendor_figures():
    h100 = load_profile("h100-sxm")
    assert h100.peak("bf16") == 989e12
    assert h100.memory_bandwidth_bytes_per_s == 3350e9
    assert load_profile("a100-sxm-80gb").peak("bf16") == 312e12
    assert load_profile("v100-sxm-16gb").peak("fp16") == 125e12
    # 3.125 GB/s a node, shared by 8 devices.
    assert load_profile("v100-sxm-16gb").link(1).bandwidth_bytes_per_s < 3.125e9 / 8


def test_links_repeat_for_slow_levels():
    profile = load_profile("h100-sxm")
    assert profile.link(0).name == "nvlink4"
    assert profile.link(1) is profile.link(2) is profile.links[-1]


@pytest.mark.parametrize(
    ("dtype", "same"),
    [
        (torch.bfloat16, "bf16"),
        ("float16", "fp16"),
        (torch.float64, "fp64"),
        ("torch.float32", "fp32"),
        (torch.int64, "fp32"),
    ],
)
def test_peak_takes_torch_dtypes(dtype, same):
    profile = load_profile("v100-sxm-16gb")
    assert profile.peak(dtype) == profile.peak_flop_per_s[same]


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100", "h100-sxm"), ("a100", "a100-sxm-40gb"), ("h10-sxm", "h100-sxm"), ("v100-sxm-16g", "v100-sxm-16gb")],
)
def test_unknown_device_names_the_nearest(name, near):
    with pytest.raises(MeshError) as error:
        load_profile(name)
    assert f"Did you mean '{near}'?" in str(error.value)
    assert "h200-sxm" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "zzz", "../cost"])
def test_unknown_device_without_a_near_one(name):
    with pytest.raises(MeshError) as error:
        load_profile(name)
    assert "Did you mean" not in str(error.value)


def test_name_ignores_case():
    assert load_profile("H100-SXM") == load_profile("h100-sxm")


def write(path, change):
    data = json.loads((PROFILES / "h100-sxm.json").read_text())
    change(data)
    file = path / "mine.json"
    file.write_text(json.dumps(data))
    return file


def test_path_of_a_file(tmp_path):
    profile = load_profile(write(tmp_path, lambda data: data.update(name="mine")))
    assert profile.name == "mine"
    assert profile.links == load_profile("h100-sxm").links


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(data):
        for key in keys:
            data = data[key]
        data[last] = value

    return change


def drop(*keys):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


SPEC = "[spec] vendor"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop("memory_bytes"), "'memory_bytes' is missing"),
        (drop("memory_bytes", "source"), "'memory_bytes.source' is missing"),
        (drop("peak_flop_per_s", "bf16"), "'peak_flop_per_s.bf16' is missing"),
        (drop("links", 1, "latency_s", "value"), r"'links\[1\].latency_s.value' is missing"),
        (drop("name"), "'name' is missing"),
        (put("links", []), "'links' is empty"),
        (put("links", {}), "'links' is {}; it must be a list"),
        (put("links", 0, 3), r"'links\[0\]' is int, not an object"),
        (put("memory_bytes", 3), "'memory_bytes' is 3; it must be an object"),
        (put("memory_bytes", "value", 1.5), "'memory_bytes.value' is 1.5; it must be an integer"),
        (put("memory_bytes", "value", True), "'memory_bytes.value' is True"),
        (put("memory_bytes", "value", 0), "'memory_bytes' is 0; it must be above 0"),
        (put("reserve_bytes", "value", -1), "'reserve_bytes' is -1; it must be at least 0"),
        (put("matmul_plateau", "value", 1.2), "'matmul_plateau' is 1.2; it must be between 0 and 1"),
        (
            put("links", 0, "bandwidth_bytes_per_s", "value", "fast"),
            r"'links\[0\].bandwidth_bytes_per_s.value' is 'fast'",
        ),
        (put("links", 0, "bandwidth_bytes_per_s", "value", float("nan")), "is nan; it must be above 0"),
        (put("links", 0, "bandwidth_bytes_per_s", "value", float("inf")), "is inf; it must be above 0"),
        (
            put("links", 0, "bandwith", {"value": 1, "source": SPEC}),
            r"unknown field 'links\[0\].bandwith'; did you mean",
        ),
        (put("speed", 3), "unknown field 'speed'"),
        (put("memory_bytes", "source", "a guess"), "'memory_bytes' has source 'a guess'"),
        (put("memory_bytes", "value", 80), "'memory_bytes' is 80; it is read in bytes, and looks like GB"),
        (
            put("peak_flop_per_s", "bf16", "value", 989.0),
            "'peak_flop_per_s.bf16' is 989; it is read in FLOP/s, and looks",
        ),
        (put("memory_bandwidth_bytes_per_s", "value", 3350.0), "is 3350; it is read in bytes/s, and looks like GB/s"),
        (
            put("links", 0, "latency_s", "value", 1.3),
            r"'links\[0\].latency_s' is 1.3; it is read in seconds, and looks",
        ),
        (put("links", 0, "peers", {"value": -1, "source": SPEC}), r"'links\[0\].peers' is -1; it must be at least 0"),
    ],
)
def test_wrong_file_names_file_and_field(tmp_path, change, text):
    with pytest.raises(MeshError, match=text) as error:
        load_profile(write(tmp_path, change))
    assert str(error.value).startswith("mine.json: ")
    assert "\n" not in str(error.value)


def test_a_reserve_of_all_memory(tmp_path):
    with pytest.raises(MeshError, match="field 'reserve_bytes' is 90000000000, not below"):
        load_profile(write(tmp_path, put("reserve_bytes", "value", 90_000_000_000)))


def test_without_a_switch_a_small_group_has_few_wires():
    link = load_profile("mi300x").link(0)
    assert link.among(8) is link
    assert link.among(2).bandwidth_bytes_per_s == link.bandwidth_bytes_per_s / 7
    assert link.among(5).bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s * 4 / 7)
    assert load_profile("h100-sxm").link(0).among(2) is load_profile("h100-sxm").link(0)


@pytest.mark.parametrize(("content", "text"), [("[1]", "the file is list"), ("{", "not JSON"), ("null", "NoneType")])
def test_not_a_profile(tmp_path, content, text):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(MeshError, match=text):
        load_profile(file)


def test_missing_file(tmp_path):
    with pytest.raises(MeshError, match="No such file"):
        load_profile(tmp_path / "none.json")


def test_link_without_bandwidth():
    with pytest.raises(MeshError, match="bandwidth above 0"):
        Link("wire", 0.0, 1e-6)
