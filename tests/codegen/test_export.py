"""autopar export: the printed program of a rank runs alone and gives the module's loss and gradients."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autopar
from autopar.codegen.python_call import _OF_MODULE
from autopar.errors import MeshError, UnsupportedOpError
from autopar.export import export_text
from autopar.runtime.launch import CAPTURE, run_ranks_local
from autopar.runtime.moves import use_groups
from tests.end_to_end.small_models import build, inputs

PIN = {"tp": 2}


def load(text, folder):
    file = folder / "exported_program.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("exported_program", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(module, m, args):
    """Largest differences of loss and gradients between an exported program and the parallel module."""
    leaves = {
        n: (p.to_local() if hasattr(p, "to_local") else p).detach().requires_grad_() for n, p in m.named_parameters()
    }
    for name, (shape, dtype) in module.PARAMETERS.items():
        assert (tuple(leaves[name].shape), leaves[name].dtype) == (shape, dtype)
    with use_groups(module.groups()):
        (loss,) = module.forward(leaves, args)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    expected = m(*args)
    expected.backward()
    worst = 0.0
    for name, p in m.named_parameters():
        grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        worst = max(worst, float((grad - grads[name]).abs().max()))
    return float((loss - expected).detach().abs()), worst


CASES = {
    "forward": ("gpt", PIN, {}),
    "backward": ("gpt", PIN, {"backward": True}),
    "sharded": ("llama", {"dp": 2, "zero": 3}, {"backward": True}),
    "recomputed": ("llama", {"tp": 2, "recompute": "full"}, {"backward": True}),
}
"""Model, pins, what is exported."""


def one_rank(payload):
    import pathlib
    import tempfile

    import torch.distributed as dist

    found = {}
    for name, (kind, pin, options) in CASES.items():
        args, _ = inputs(kind)
        mesh = autopar.Mesh("2", device="cpu")
        text = export_text(build(kind), mesh, rank=dist.get_rank(), example_args=args, pin=pin, **options)
        m = autopar.parallelize(build(kind), mesh, example_args=args, pin=pin)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = difference(load(text, pathlib.Path(folder)), m, args)
    return found


@pytest.mark.slow
def test_two_ranks_equal_the_module():
    preload = (*CAPTURE, "functorch.compile")
    for found in run_ranks_local("tests.codegen.test_export:one_rank", 2, {}, 240, preload=preload):
        assert found.keys() == CASES.keys()
        for name, (loss, grads) in found.items():
            assert loss <= 1e-12, name
            assert grads <= 1e-12, name


def test_one_device(tmp_path):
    args, _ = inputs("llama")
    text = export_text(build("llama"), autopar.Mesh("1"), example_args=args)
    assert "import autopar" not in text
    assert {line.split()[1] for line in text.splitlines() if line.startswith("from ")} == {
        "autopar.runtime.exported", "autopar.runtime.moves",
    }  # fmt: skip
    assert "layers_0_mlp_silu = aten.silu.default(layers_0_mlp_gate_proj_linear)" in text
    assert "# llama.py:" in text
    assert max(map(len, (line for line in text.splitlines() if line.startswith("def ")))) < 60
    m = autopar.parallelize(build("llama"), autopar.Mesh("1"), example_args=args)
    assert max(difference(load(text, tmp_path), m, args)) <= 1e-12
    assert "exported_program" not in sys.modules


def test_both_graphs_with_kernels(tmp_path):
    """Kernels are run in Triton's interpreter, in a process that imports Triton for it."""
    args, _ = inputs("gpt")
    text = export_text(build("gpt"), autopar.Mesh("1"), example_args=args, backward=True, kernels="on")
    assert "def forward_graph(" in text
    assert "def backward_graph(" in text
    assert text.count("@triton.jit") >= 4
    assert "import autopar" not in text
    names = [line.split("(")[0] for line in text.splitlines() if line.startswith("def ")]
    assert len(names) == len(set(names))
    m = autopar.parallelize(build("gpt"), autopar.Mesh("1"), example_args=args)
    loss = m(*args)
    loss.backward()
    torch.save([{n: p.detach() for n, p in m.named_parameters()}, args, loss.detach(),
                {n: p.grad for n, p in m.named_parameters()}], tmp_path / "expected.pt")  # fmt: skip
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(float, done.stdout.split())) <= 1e-9, done.stdout  # the bound of kernels in the module itself


RUN = """
import torch
import program

parameters, args, loss, grads = torch.load("expected.pt")
leaves = {n: p.requires_grad_() for n, p in parameters.items()}
(found,) = program.forward(leaves, args)
found.backward()
floor = 1e-6 * max(float(g.abs().max()) for g in grads.values())
worst = max(float((leaves[n].grad - g).abs().max() / g.abs().max().clamp(min=floor)) for n, g in grads.items())
print(float((found.detach() - loss).abs()), worst)
"""


def test_lowered_for_a_device_that_is_not_here():
    args, _ = inputs("gpt")
    with pytest.raises(UnsupportedOpError, match=r"gpt.py.*attention becomes other ops on cuda"):
        export_text(build("gpt"), autopar.Mesh("2", device="h100-sxm"), example_args=args, pin=PIN, backward=True)
    text = export_text(build("gpt"), autopar.Mesh("2", device="h100-sxm"), example_args=args, pin=PIN)
    assert "DEVICE = torch.device('cuda')" in text
    assert "aten.scaled_dot_product_attention.default" in text


def test_mixed_precision_reads_stored_parameters(tmp_path):
    args, _ = inputs("llama")
    text = export_text(build("llama").float(), autopar.Mesh("1"), example_args=args, precision="bf16")
    module = load(text, tmp_path)
    assert all(dtype == torch.float32 for _, dtype in module.PARAMETERS.values())
    assert "load(" in text


def test_refusals():
    args, _ = inputs("gpt")
    with pytest.raises(MeshError, match="rank 3 is not in a mesh of 2"):
        export_text(build("gpt"), autopar.Mesh("2"), rank=3, example_args=args)


def test_command_line(tmp_path, capsys):
    from autopar.cli import main

    file = tmp_path / "program.py"
    options = ["--mesh", "2", "--device", "cpu", "--batch", "4", "--seq", "8", "--pin", "tp=2"]
    assert main(["export", "gpt-tiny", *options, "--rank", "1", "-o", str(file)]) == 0
    assert "the program of rank 1 of 2 (tp 1 of 2)" in file.read_text()
    assert main(["export", "gpt-tiny", *options]) == 2
    assert "-o" in capsys.readouterr().err


def test_every_op_of_ours_can_be_written_or_is_known_not_to():
    gone = {"block", "block_backward", "edge", "grad"}  # replaced before a graph is final
    of_a_process = {"function", "put", "fetch"}  # a user's own Function; host memory
    for module in set(_OF_MODULE.values()) | {"offload"}:
        importlib.import_module(f"autopar.runtime.{module}")
    ours = {n.partition("::")[2].partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if "autopar::" in n}
    assert ours - gone - of_a_process == set(_OF_MODULE)
    for name, module in _OF_MODULE.items():
        assert f'"{name}(' in Path(importlib.util.find_spec(f"autopar.runtime.{module}").origin).read_text(), name
