"""autopar export of pipelines: the printed stages of a rank run alone and give the module's loss and gradients."""

import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import MeshError, PlanError, UnsupportedOpError
from autopar.export import export_text
from autopar.runtime.exported import connect
from autopar.runtime.launch import CAPTURE, run_ranks_local
from autopar.runtime.moves import use_groups
from tests.codegen.test_export import batch, built, difference, load
from tests.end_to_end.small_models import build, inputs

TWO = {
    "forward alone": ("gpt", {"pp": 2, "microbatches": 2, "schedule": "1f1b"}, {}),
    "gpipe": ("gpt", {"pp": 2, "microbatches": 3, "schedule": "gpipe"}, {"backward": True}),
    "interleaved": (
        "llama", {"pp": 2, "microbatches": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2}, {"backward": True}
    ),
    "weights later": ("gpt", {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}, {"backward": True}),
    "weights later, forward alone": ("gpt", {"pp": 2, "microbatches": 3, "schedule": "zb-v"}, {}),
    "two ways": ("llama", {"pp": 2, "microbatches": 4, "schedule": "chimera"}, {"backward": True}),
    "recomputed": ("llama", {"pp": 2, "microbatches": 2, "schedule": "1f1b", "recompute": "full"}, {"backward": True}),
    "mixed precision": (
        "gpt", {"pp": 2, "microbatches": 2, "schedule": "1f1b"}, {"backward": True, "precision": "bf16"}
    ),
    "awkward, forward alone": ("awkward", {"pp": 2, "microbatches": 1, "schedule": "1f1b"}, {}),
    "awkward": ("awkward", {"pp": 2, "microbatches": 1, "schedule": "1f1b"}, {"backward": True}),
}  # fmt: skip
"""Model, pins, what is exported."""
FOUR = {
    "sharded": ("llama", {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2, "schedule": "zb-v"}, {"backward": True}),
    "tensor parallel": ("gpt", {"pp": 2, "tp": 2, "microbatches": 3, "schedule": "1f1b"}, {"backward": True}),
}


def compare(payload):
    found = {}
    for name, (kind, pin, options) in (TWO if dist.get_world_size() == 2 else FOUR).items():
        args = batch(kind)
        mesh = autopar.Mesh(str(dist.get_world_size()), device="cpu")
        text = export_text(built(kind), mesh, rank=dist.get_rank(), example_args=args, pin=pin, **options)
        m = autopar.parallelize(built(kind), mesh, example_args=args, pin=pin, precision=options.get("precision"))
        with tempfile.TemporaryDirectory() as folder:
            found[name] = difference(load(text, pathlib.Path(folder)), m, args)
    with pytest.raises(MeshError, match=r"this file is the program of rank \d of \d; this process is rank \d"):
        connect({}, dist.get_rank() ^ 1, dist.get_world_size())
    if dist.get_world_size() == 2:
        found |= {name: calls_in_a_row(name) for name in ASYNCHRONOUS}
    return found


ASYNCHRONOUS = ("async-1f1b", "2bw")


def calls_in_a_row(schedule):
    """Gradients come some calls late, so what a call leaves is what the next ones find."""
    args, mesh = batch("gpt"), autopar.Mesh("2", device="cpu")
    pin = {"pp": 2, "microbatches": 2, "schedule": schedule}
    text = export_text(built("gpt"), mesh, rank=dist.get_rank(), example_args=args, pin=pin, backward=True)
    m = autopar.parallelize(built("gpt"), mesh, example_args=args, pin=pin)
    leaves = {n: p.to_local().detach().clone().requires_grad_() for n, p in m.named_parameters()}
    losses, grads = [0.0], [0.0]
    with tempfile.TemporaryDirectory() as folder:
        module = load(text, pathlib.Path(folder))
    with use_groups(module.groups()):
        for _ in range(4):
            (loss,) = module.forward(leaves, args)
            loss.backward()
            expected = m(*args)
            expected.backward()
            assert bool(loss.isnan()) == bool(expected.isnan())
            losses.append(float((loss - expected).detach().nan_to_num().abs()))
    for name, p in m.named_parameters():
        assert (p.grad is None) == (leaves[name].grad is None), name
        if p.grad is not None:
            grads.append(float((p.grad.to_local() - leaves[name].grad).abs().max()))
    assert len(grads) > 1
    return max(losses), max(grads)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_the_module(world):
    found = run_ranks_local("tests.codegen.test_export_pipeline:compare", world, {}, 300, preload=CAPTURE)
    for rank in found:
        assert list(rank) == ([*TWO, *ASYNCHRONOUS] if world == 2 else list(FOUR))
        for name, (loss, grads) in rank.items():
            assert loss <= 1e-12, name
            assert grads <= 1e-12, name


@pytest.mark.parametrize("backward", [False, True])
def test_microbatches_on_one_device(tmp_path, backward):
    args, _ = inputs("gpt")
    pin = {"microbatches": 3}
    text = export_text(build("gpt"), autopar.Mesh("1"), example_args=args, pin=pin, backward=backward)
    assert "import autopar" not in text
    m = autopar.parallelize(build("gpt"), autopar.Mesh("1"), example_args=args, pin=pin)
    assert max(difference(load(text, tmp_path), m, args)) <= 1e-12


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(F.dropout(self.first(x), 0.5, self.training)).mean()


@pytest.mark.parametrize("backward", [False, True])
def test_microbatches_draw_their_own_numbers(tmp_path, backward):
    args, pin = batch("awkward"), {"microbatches": 3}
    model = Drops().double()
    text = export_text(model, autopar.Mesh("1"), example_args=args, pin=pin, backward=backward)
    assert "call it under `drawing(Draw(seed, stream))`" in text
    m = autopar.parallelize(model, autopar.Mesh("1"), example_args=args, pin=pin)
    assert max(difference(load(text, tmp_path), m, args)) <= 1e-12


def exported(tmp_path, rank=1, **pin):
    args, _ = inputs("gpt")
    mesh = autopar.Mesh("2", device="cpu")
    return args, export_text(build("gpt"), mesh, rank=rank, example_args=args, pin={"pp": 2, **pin}, backward=True)


def test_what_a_reader_sees(tmp_path):
    """The rank's row, a function for each of its stages and no other, equal micro-batches once; only ops are long."""
    _, text = exported(tmp_path, microbatches=4, schedule="zb-h1")
    assert "    F1.0 I1.0 " in text
    assert "def stage_1_backward_weights(" in text
    assert "def stage_0" not in text
    assert text.count("def cut_1_") == 4
    assert text.count("def stage_1_forward(") == 1
    assert "# [" not in text  # nothing lies apart on a mesh of stages
    assert max(len(line) for line in text.splitlines() if " = " not in line and not line.startswith("    del")) <= 120
    compile(text, "exported", "exec")


def zeros(module):
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in module.PARAMETERS.items()}


def test_a_call_without_groups_is_one_line(tmp_path):
    args, text = exported(tmp_path, microbatches=2, schedule="1f1b")
    module = load(text, tmp_path)
    with pytest.raises(PlanError, match=r"^an exported pipeline runs under `use_groups\(groups\(\)\)`"):
        module.forward(zeros(module), args)


@pytest.mark.parametrize("pin", [{}, {"microbatches": 2}])
def test_only_what_it_was_exported_for(tmp_path, pin):
    """Before anything is computed or sent: what is cut into micro-batches would else be cut from a larger batch."""
    args, _ = inputs("gpt")
    text = export_text(build("gpt"), autopar.Mesh("1"), example_args=args, pin=pin, backward=True)
    module = load(text, tmp_path)
    parameters, first = zeros(module), next(iter(module.PARAMETERS))
    other = {**parameters, first: torch.zeros(1)}
    more = tuple(torch.cat([a, a]) for a in args)
    for given, wrong, said in (
        (parameters, more, r"args\[0\] is \(\d+, \d+\), torch.int64; this program was exported for \("),
        (parameters, args[:1], r"inputs: 1; this program takes a sequence of 2: args\[0\], args\[1\]"),
        (parameters, args[0], "inputs: one tensor; this program takes a sequence of 2"),
        (parameters, (args[0], args[1].int()), r"args\[1\] is .*, torch.int32; this program was exported for"),
        ({}, args, f"{first} is missing"),
        (other, args, rf"{first} is \(1,\), torch.float32; this program was exported for"),
    ):
        with pytest.raises(PlanError, match=said):
            module.forward(given, wrong)


def test_backward_of_a_frozen_model_is_refused():
    args, _ = inputs("gpt")
    model = build("gpt").requires_grad_(False)
    with pytest.raises(UnsupportedOpError, match="no parameter that takes a gradient"):
        export_text(model, autopar.Mesh("1"), example_args=args, pin={"microbatches": 2}, backward=True)


def test_one_long_name_is_an_argument(tmp_path):
    long = "a very long name " * 12

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.pd = nn.ParameterDict({long: nn.Parameter(torch.ones(8))})

        def forward(self, x):
            return (x * next(iter(self.pd.values()))).square().mean()

    x = torch.randn(4, 8)
    text = export_text(Named(), autopar.Mesh("1"), example_args=(x,), pin={"microbatches": 2})
    (loss,) = load(text, tmp_path).forward({f"pd.{long}": torch.ones(8)}, (x,))
    torch.testing.assert_close(loss, x.square().mean())
