"""autopar export: the printed program of a rank runs alone and gives the module's loss and gradients."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.codegen.python_call import _OF_MODULE
from autopar.errors import MeshError, UnsupportedOpError
from autopar.export import export_text
from autopar.runtime.launch import CAPTURE, run_ranks_local
from autopar.runtime.moves import use_groups
from autopar.runtime.random import Draw, drawing
from tests.end_to_end.small_models import build, inputs

PIN = {"tp": 2}
SEED = 7


class Awkward(nn.Module):
    """What is hard to write: parameters with the names of functions, names that are none, dropout, NaN, tensors made in
    forward, buffers that forward writes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        for name in ("load", "move", "max_over", "use_groups", "connect", "stage", "constants"):
            self.register_parameter(name, nn.Parameter(torch.linspace(0.5, 1.5, 8)))
        self.odd = nn.ParameterDict(
            {key: torch.linspace(1, 2, 8) for key in ('a"b', "a b", "a_b", "x²", "\uff41ten", "\\'")}
        )
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("unused", torch.zeros(2))

    def forward(self, x):
        y = self.norm(F.dropout(self.first(x), 0.5, self.training))
        y = y * self.load * self.move + self.max_over * self.use_groups + self.connect * self.stage + self.constants
        for value in self.odd.values():
            y = y * value
        y = y + torch.tensor([0.5, -2, float("inf"), float("nan"), 0, float("-inf"), 1, 2]).nan_to_num(
            posinf=1, neginf=2
        )
        y = y * torch.tensor(2.0)
        y = y.masked_fill(x > 1, float("nan")).nan_to_num()
        return (self.last(y) - y.amax(0)).logsumexp(0).mean()


def built(kind):
    if kind != "awkward":
        return build(kind)
    torch.manual_seed(0)
    return Awkward().double()


def batch(kind):
    if kind != "awkward":
        return inputs(kind)[0]
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64),)


def load(text, folder):
    file = folder / "exported_program.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("exported_program", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(module, m, args):
    """Largest differences of loss and gradients between an exported program and the parallel module; new values of
    buffers count as gradients."""
    m.manual_seed(SEED)
    leaves = {
        n: (p.to_local() if hasattr(p, "to_local") else p).detach().requires_grad_() for n, p in m.named_parameters()
    }
    for name, (shape, dtype) in module.PARAMETERS.items():
        assert (tuple(leaves[name].shape), leaves[name].dtype) == (shape, dtype)
    buffers = {n: b.clone() for n, b in m.named_buffers()}
    with use_groups(module.groups()), drawing(Draw(SEED, 0)):
        loss, *written = module.forward({**leaves, **buffers}, args)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    expected = m(*args)
    expected.backward()
    worst = 0.0
    for name, p in m.named_parameters():
        grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        worst = max(worst, float((grad - grads[name]).abs().max()))
    places = getattr(module, "NEW_VALUES", {})
    assert list(places) == list(range(1, 1 + len(written)))
    for value, name in zip(written, places.values(), strict=True):
        worst = max(worst, float((value - m.get_buffer(name)).abs().max()))
    return float((loss - expected).detach().abs()), worst


CASES = {
    "forward": ("gpt", PIN, {}),
    "backward": ("gpt", PIN, {"backward": True}),
    "sharded": ("llama", {"dp": 2, "zero": 3}, {"backward": True}),
    "recomputed": ("llama", {"tp": 2, "recompute": "full"}, {"backward": True}),
    "awkward": ("awkward", {"dp": 2, "zero": 0}, {}),
    "awkward, split": ("awkward", PIN, {}),
    "awkward, sharded": ("awkward", {"dp": 2, "zero": 3}, {}),
    "awkward, backward": ("awkward", {"dp": 2, "zero": 3}, {"backward": True}),
    "awkward, recomputed": ("awkward", {"dp": 2, "recompute": "full"}, {"backward": True}),
}
"""Model, pins, what is exported."""


def one_rank(payload):
    import pathlib
    import tempfile

    import torch.distributed as dist

    found = {}
    for name, (kind, pin, options) in CASES.items():
        args = batch(kind)
        mesh = autopar.Mesh("2", device="cpu")
        text = export_text(built(kind), mesh, rank=dist.get_rank(), example_args=args, pin=pin, **options)
        m = autopar.parallelize(built(kind), mesh, example_args=args, pin=pin)
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


def run_interpreted(text, kind, folder):
    """Run a file with kernels in a process of its own, as Triton is imported for its interpreter or not. Returns: the
    process, which prints the errors of the loss and of the gradients."""
    args = batch(kind)
    m = autopar.parallelize(built(kind), autopar.Mesh("1"), example_args=args)
    m.manual_seed(SEED)
    state = {n: t.detach().clone() for n, t in (*m.named_parameters(), *m.named_buffers())}
    loss = m(*args)
    loss.backward()
    torch.save([state, args, loss.detach(), {n: p.grad for n, p in m.named_parameters()}], folder / "expected.pt")
    (folder / "program.py").write_text(text)
    (folder / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "run.py"]
    return [
        subprocess.run(command, cwd=folder, env=environment | more, capture_output=True, text=True, timeout=250)
        for more in ({"TRITON_INTERPRET": "0"}, {"TRITON_INTERPRET": "1"})
    ]


@pytest.mark.parametrize("kind", ["gpt", "awkward"])
def test_both_graphs_with_kernels(tmp_path, kind):
    """Kernels are run in Triton's interpreter, in a process that imports Triton for it."""
    text = export_text(built(kind), autopar.Mesh("1"), example_args=batch(kind), backward=True, kernels="on")
    assert "def forward_graph(" in text
    assert "def backward_graph(" in text
    assert text.count("@triton.jit") >= 4
    assert "import autopar" not in text
    assert "set TRITON_INTERPRET=1 before Triton is imported" in text.split('"""')[1]
    names = [line.split("(")[0] for line in text.splitlines() if line.startswith("def ")]
    assert len(names) == len(set(names))
    without, done = run_interpreted(text, kind, tmp_path)
    assert without.returncode != 0
    assert without.stderr.splitlines()[-1].startswith("RuntimeError: kernels on a CPU run in Triton's interpreter: set")
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(float, done.stdout.split())) <= 1e-9, done.stdout  # the bound of kernels in the module itself


RUN = """
import torch
import program
from autopar.runtime.random import Draw, drawing

parameters, args, loss, grads = torch.load("expected.pt")
leaves = {n: p.requires_grad_(n in grads) for n, p in parameters.items()}
with drawing(Draw(7, 0)):
    found, *_ = program.forward(leaves, args)
found.backward()
floor = 1e-6 * max(float(g.abs().max()) for g in grads.values())
worst = max(float((leaves[n].grad - g).abs().max() / g.abs().max().clamp(min=floor)) for n, g in grads.items())
print(float((found.detach() - loss).abs()), worst)
"""


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_hard_to_write(tmp_path, backward):
    args = batch("awkward")
    text = export_text(built("awkward"), autopar.Mesh("1"), example_args=args, backward=backward)
    module = load(text, tmp_path)
    about = " ".join(module.__doc__.split())
    assert "call it under `drawing(Draw(seed, stream))`" in about
    assert "The outputs in NEW_VALUES are what forward writes to buffers or parameters" in about
    assert module.drawing is drawing
    assert 'odd.a"b' in module.PARAMETERS
    assert set(module.NEW_VALUES.values()) == {
        f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }
    m = autopar.parallelize(built("awkward"), autopar.Mesh("1"), example_args=args)
    assert max(difference(module, m, args)) <= 1e-12


@pytest.mark.parametrize("kernels", ["off", "on"])
def test_the_docstring_says_no_more_than_there_is(kernels):
    text = export_text(
        build("gpt"), autopar.Mesh("1"), example_args=batch("gpt"), pin={}, backward=True, kernels=kernels
    )
    for word in ("drawing", "NEW_VALUES", "CONSTANTS", "constants", *(("INTERPRET",) if kernels == "off" else ())):
        assert word not in text, word
    mesh = autopar.Mesh("1", device="h100-sxm")
    assert "INTERPRET" not in export_text(nn_stack(), mesh, example_args=(torch.ones(4, 8),), backward=True)


def nn_stack():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


class NamedLikeMoves(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("load", "move", "max_over", "random_ops", "aten", "groups"):
            self.register_parameter(name, nn.Parameter(torch.ones(8)))
        self.head = nn.Linear(8, 8192)

    def forward(self, x, labels):
        x = F.dropout(x * self.load * self.move * self.max_over, 0.1) * self.random_ops * self.aten * self.groups
        return F.cross_entropy(self.head(x), labels)


def test_no_variable_hides_what_a_function_calls():
    args, called = (torch.ones(512, 8), torch.zeros(512, dtype=torch.long)), set()
    for pin in ({"dp": 2}, {"dp": 2, "zero": 3}, PIN, {"pp": 2}):
        for options in ({}, {"precision": "bf16"}, {"backward": True}):
            text = export_text(NamedLikeMoves(), autopar.Mesh("2"), example_args=args, pin=pin, **options)
            tree = ast.parse(text)
            for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
                nodes = list(ast.walk(function))
                local = {node.arg for node in nodes if isinstance(node, ast.arg)}
                local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
                heads = {root(node.func) for node in nodes if isinstance(node, ast.Call)}
                assert not local & heads, (pin, options, function.name)
                called |= heads
    assert {"load", "move", "max_over"} <= called


def root(node):
    """The first name of `a.b.c`."""
    return root(node.value) if isinstance(node, ast.Attribute) else getattr(node, "id", None)


LONG = [0.5] * 2000


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        short = torch.tensor([[0.5, float("nan"), -0.0, 1e-40]], device=x.device).nan_to_num()
        return (self.linear(x) * short).sum() + torch.tensor(LONG, device=x.device).sum()


@pytest.mark.parametrize("pin", [{}, {"microbatches": 2}])
@pytest.mark.parametrize("backward", [False, True])
def test_short_tensors_made_in_forward_are_written_out(tmp_path, backward, pin):
    model, x = Constant(), torch.randn(8, 4)
    module = load(export_text(model, autopar.Mesh("1"), example_args=(x,), pin=pin, backward=backward), tmp_path)
    ((name, (shape, _)),) = module.CONSTANTS.items()
    assert shape == (2000,)
    assert "`parameters` holds the tensors of CONSTANTS, too" in module.__doc__
    given = {**dict(model.named_parameters()), name: torch.tensor(LONG)}
    torch.testing.assert_close(module.forward(given, (x,))[0], model(x))
    ((short, value),) = module.constants().items()
    assert value.shape == (1, 4)
    changed = module.forward({**given, short: torch.zeros(1, 4)}, (x,))[0]
    torch.testing.assert_close(changed.detach(), torch.tensor(1000.0))


def test_tensors_without_values_are_given_by_the_caller():
    with torch.device("meta"):
        text = export_text(Constant(), autopar.Mesh("1"), example_args=(torch.empty(8, 4),))
    table = text[text.index("CONSTANTS = {") :]
    assert re.search(r"\(1, 4\), torch.float32\),  # test_export.py:\d+\n.*\(2000,\)", table)
    assert "def constants" not in text


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
