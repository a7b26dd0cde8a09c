"""Capture keeps a model's interface: nested arguments and outputs, dataclasses, inputs that take gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture import call_program, capture
from autopar.program import OutputRef


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, pos, *, mask=None, scale: float = 1.0, extra=None, cache=None, names=("a", "b"), flag=True):
        y = self.fc(x) * scale + extra["table"][pos] if flag else x
        return {"y": y, "again": [y, x], "cache": cache, "parts": (y.sum(), None, len(names)), "mask": mask}


def test_nested_arguments_and_outputs():
    x, pos, table = torch.randn(3, 4), torch.tensor([0, 1, 1]), torch.randn(2, 4)
    # The keywords come in another order than in the signature, which is export's.
    kwargs = {"names": ("a", "b", "c"), "extra": {"n": 3, "table": table}, "scale": 0.5, "cache": None, "mask": table}
    model = Mixed()
    program = capture(model, (x, pos), kwargs)
    leaves, spec = pytree.tree_flatten(((x, pos), kwargs))
    assert program.in_spec == spec
    assert program.in_tensors == tuple(isinstance(v, torch.Tensor) for v in leaves)
    assert program.in_values == tuple(None if isinstance(v, torch.Tensor) else v for v in leaves)
    paths = [s.path for s in program.sources if s.kind == "input"]
    assert paths == ["args[0]", "args[1]", "kwargs['extra']['table']", "kwargs['mask']"]
    want, got = model(x, pos, **kwargs), call_program(program, (x, pos), kwargs)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    torch.testing.assert_close(got["y"], want["y"])
    assert got["again"][0] is got["y"]
    assert got["again"][1] is x
    assert got["mask"] is table
    assert got["parts"][1:] == (None, 3)
    assert sum(isinstance(v, OutputRef) for v in program.out_values) == 5
    assert len([s for s in program.sinks if s.kind == "user"]) == 4  # y stands twice


@dataclass
class Result:
    loss: torch.Tensor
    extra: int


def test_registered_dataclass_output():
    torch.export.register_dataclass(Result)

    class Net(nn.Module):
        def forward(self, x):
            return Result(x.sum(), 7)

    x = torch.ones(3)
    got = call_program(capture(Net(), (x,), {}), (x,), {})
    assert got == Result(torch.tensor(3.0), 7)


def test_inputs_keep_requires_grad():
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    program = capture(model, (x,), {})
    assert program.sources[-1].trainable
    assert x.grad_fn is None
    call_program(program, (x,), {}).sum().backward()
    torch.testing.assert_close(x.grad, model.weight.sum(0).expand(2, 3))


@dataclass
class Batch:
    """As users write them, unknown to torch."""

    x: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None


class TakesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, batch):
        return Batch(self.fc(batch.x) * batch.scale, mask=batch.x > 0)


def test_dataclasses_are_taken_apart_without_being_registered():
    model, given = TakesBatch(), Batch(torch.ones(3, 4), 0.5)
    program = capture(model, (given,), {})
    found, expected = call_program(program, (given,), {}), model(given)
    assert type(found) is Batch
    assert found.scale == 1.0
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.mask, expected.mask)
    assert not model._forward_hooks
