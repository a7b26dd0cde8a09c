"""runtime/optimizer_form.py: Adam steps parallel parameters together, with the same numbers; what users say holds."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.optimizer_form import STEPPED


@pytest.fixture(autouse=True)
def _group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(dtype=torch.float64, count=3, ours=True):
    generator = torch.Generator().manual_seed(1)
    mesh = init_device_mesh("cpu", (1,))
    made = []
    for i in range(count):
        value = torch.randn(i + 2, 3, generator=generator, dtype=dtype)
        made.append(torch.nn.Parameter(distribute_tensor(value, mesh, [Replicate()])))
    if ours:
        STEPPED.add(made)
    return made


class Ops(TorchDispatchMode):
    """The names of what runs on local tensors."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def stepped(optimizer, steps=3):
    """The parameters after so many steps, and the ops of the last."""
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in ps:
            grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.grad = DTensor.from_local(grad, p.device_mesh, p.placements)
        with Ops() as ops:
            optimizer.step()
    return [p.to_local().detach() for p in ps], ops.names


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}])
def test_one_op_for_all_and_the_same_numbers(kind, options):
    optimizer = kind(parameters(), lr=0.1, **options)
    got, ops = stepped(optimizer)
    expected, singly = stepped(kind(parameters(ours=False), lr=0.1, **options))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    assert any(name.startswith("_fused_adam") for name in ops)
    assert not any(name.startswith("_fused_adam") for name in singly)
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"fused": False}, {"foreach": True}, {"lr": torch.tensor(0.1)}],
)
def test_what_the_user_says_holds(options):
    _, ops = stepped(torch.optim.AdamW(parameters(), **options))
    assert not any(name.startswith("_fused_adam") for name in ops)


def test_other_parameters_and_optimizers_are_left_alone():
    class Mine(torch.optim.AdamW):
        pass

    foreign = parameters(ours=False)
    for optimizer in (
        torch.optim.AdamW([*parameters(), foreign[0]]),
        torch.optim.AdamW([*parameters(), *parameters(torch.float32)]),
        torch.optim.SGD(parameters(), lr=0.1),
        Mine(parameters()),
    ):
        _, ops = stepped(optimizer)
        assert not any(name.startswith("_fused") for name in ops)


def test_sgd_updates_all_parameters_at_once():
    got, ops = stepped(torch.optim.SGD(parameters(), lr=0.1, momentum=0.9))
    expected, singly = stepped(torch.optim.SGD(parameters(ours=False), lr=0.1, momentum=0.9))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    assert "_foreach_add_" in ops
    assert not any(name.startswith("_foreach") for name in singly)


def test_steps_counted_in_float64_are_left_alone():
    """A checkpoint made under another default dtype."""
    optimizer = torch.optim.AdamW(parameters())
    stepped(optimizer)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    _, ops = stepped(optimizer)
    assert not any(name.startswith("_fused") for name in ops)


def test_a_step_that_raises_leaves_nothing_behind():
    optimizer, other = (torch.optim.AdamW(parameters()) for _ in range(2))
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        stepped(optimizer)
    stepped(other)
    assert optimizer.param_groups[0]["fused"] is None
