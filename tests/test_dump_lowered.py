"""autopar/dump_lowered.py: both lowered graphs can be read: bytes saved, the user's lines, what runs again."""

import re

import pytest

import autopar
from tests.end_to_end.small_models import build, inputs


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """(forward text, backward text, graphs) of the small GPT on one device, recomputing selectively."""
    folder = tmp_path_factory.mktemp("dump")
    args, _ = inputs("gpt")
    options = {"backend": "aot", "pin": {"recompute": "selective"}, "dump_dir": str(folder)}
    m = autopar.parallelize(build("gpt"), autopar.Mesh("1"), example_args=args, **options)
    m(*args).backward()
    forward, backward = (next(folder.glob(f"*_after_lower_{which}.txt")) for which in ("forward", "backward"))
    assert forward.name < backward.name
    (lowered,) = m._cache.values()
    return forward.read_text(), backward.read_text(), lowered.run.graphs[0]


def test_saved_values_and_their_bytes(dumped):
    forward, _, graphs = dumped
    sizes = [int(n.replace(",", "")) for n in re.findall(r"^  saves %\w+: ([\d,]+) bytes", forward, re.M)]
    assert sum(sizes) == graphs.saved_bytes > 0
    assert f"saves {graphs.saved_bytes:,} bytes" in forward.splitlines()[0]
    assert sizes == sorted(sizes, reverse=True)


def test_nodes_name_the_users_code_and_layout(dumped):
    forward, backward, _ = dumped
    assert re.search(r"%addmm\w* : float64\[\d+, \d+\].*# layers\.0\.attention\.q_proj, gpt\.py:\d+", forward)
    assert re.search(r"%gelu : float64\[8, 8, 64\] \[I\] = aten.gelu", forward)
    assert "parameter layers.1.mlp.up_proj.weight" in forward
    assert re.search(r"aten.gelu_backward.*# layers\.1\.mlp, gpt\.py:\d+", backward)
    assert re.search(r"^  gradient of layers\.0\.norm1\.weight: %\w+$", backward, re.M)


def test_what_runs_again_says_so(dumped):
    _, backward, graphs = dumped
    again = [line for line in backward.splitlines() if line.endswith("made again")]
    assert any("aten.gelu.default" in line for line in again)
    assert not any("backward" in line.split("#")[0] for line in again)
    assert "gelu" in str([n.target for n in graphs.backward.graph.nodes])
