"""autopar export: the printed program of a rank runs alone and gives the module's loss and gradients."""

import importlib.util
import sys

import pytest
import torch

import autopar
from autopar.errors import MeshError, PlanError
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


def one_rank(payload):
    import pathlib
    import tempfile

    import torch.distributed as dist

    args, _ = inputs("gpt")
    mesh = autopar.Mesh("2", device="cpu")
    text = export_text(build("gpt"), mesh, rank=dist.get_rank(), example_args=args, pin=PIN)
    m = autopar.parallelize(build("gpt"), mesh, example_args=args, pin=PIN)
    with tempfile.TemporaryDirectory() as folder:
        return difference(load(text, pathlib.Path(folder)), m, args)


def test_two_ranks_equal_the_module():
    for loss, grads in run_ranks_local("tests.codegen.test_export:one_rank", 2, {}, 240, preload=CAPTURE):
        assert loss <= 1e-12
        assert grads <= 1e-12


def test_one_device(tmp_path):
    args, _ = inputs("llama")
    text = export_text(build("llama"), autopar.Mesh("1"), example_args=args)
    assert "import autopar" not in text
    assert {line.split()[1] for line in text.splitlines() if line.startswith("from ")} == {"autopar.runtime.moves"}
    assert "layers_0_mlp_silu = aten.silu.default(layers_0_mlp_gate_proj_linear)" in text
    assert "# llama.py:" in text
    assert max(map(len, (line for line in text.splitlines() if line.startswith("def ")))) < 60
    m = autopar.parallelize(build("llama"), autopar.Mesh("1"), example_args=args)
    assert max(difference(load(text, tmp_path), m, args)) <= 1e-12
    assert "exported_program" not in sys.modules


def test_refusals():
    args, _ = inputs("gpt")
    with pytest.raises(MeshError, match="rank 3 is not in a mesh of 2"):
        export_text(build("gpt"), autopar.Mesh("2"), rank=3, example_args=args)
    with pytest.raises(PlanError, match="pin pp=1"):
        export_text(build("gpt"), autopar.Mesh("2"), example_args=args, pin={"pp": 2})


def test_command_line(tmp_path, capsys):
    from autopar.cli import main

    file = tmp_path / "program.py"
    options = ["--mesh", "2", "--device", "cpu", "--batch", "4", "--seq", "8", "--pin", "tp=2"]
    assert main(["export", "gpt-tiny", *options, "--rank", "1", "-o", str(file)]) == 0
    assert "the program of rank 1 of 2 (tp 1 of 2)" in file.read_text()
    assert main(["export", "gpt-tiny", *options]) == 2
    assert "-o" in capsys.readouterr().err
