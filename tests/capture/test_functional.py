"""In-place writes leave the graph; values, gradients and buffers stay those of the eager model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopar.capture import capture, run_program
from autopar.capture.functional import writes
from autopar.errors import CaptureError


class Net(nn.Module):
    """One linear layer, one buffer, and a body given by the test."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("seen", torch.arange(4, dtype=torch.float64))
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def compare(model, *args, tolerance=1e-12, program=None):
    """Eager and captured: outputs, gradients and buffers; returns the program."""
    eager = copy.deepcopy(model)
    program = program or capture(model, args, {})
    program.graph.lint()
    assert not [n for n in program.calls if writes(n)]
    expected = pytree.tree_leaves(eager(*[a.clone() for a in args]))
    found, buffers = run_program(program, program.state, list(args))
    for want, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    if any(t.requires_grad for t in expected):
        sum(t.square().sum() for t in expected if t.requires_grad).backward()
        sum(t.square().sum() for t in found if t.requires_grad).backward()
    for (name, want), got in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(buffers.get(name, got), want, rtol=tolerance, atol=tolerance)
        assert (want.grad is None) == (got.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=tolerance, atol=tolerance)
    for name, want in eager.named_buffers():
        now = buffers.get(name, program.state[name])
        torch.testing.assert_close(now, want.detach(), rtol=tolerance, atol=tolerance)
        assert not now.requires_grad
    return program


def relu_in_place(self, x):
    return F.relu(self.linear(x), inplace=True)


def write_to_base_seen_through_view(self, x):
    y = self.linear(x)
    view = y[1:]
    y.mul_(2)
    return view + 1


def write_through_view_seen_in_base(self, x):
    y = self.linear(x) * 1
    y[0, 1:3] = x[0, :2]
    y[:, 0].add_(1)
    y.t()[3].zero_()
    y.view(-1)[2:4].fill_(0.5)
    return y


def write_to_chunk(self, x):
    y = x * 1  # torch forbids this where a gradient flows
    first, second = y.chunk(2, dim=-1)
    second.mul_(first)
    y.unbind(0)[1].neg_()
    a, b = y.split([1, 3], dim=1)
    b += a
    return self.linear(y), first, second


def write_through_permute(self, x):
    y = self.linear(x).reshape(-1, 2, 2) * 1
    y.permute(2, 0, 1)[0].mul_(3)
    y.transpose(0, 1).diagonal(dim1=0, dim2=2).sub_(1)
    return y.squeeze(0)


def fill_fresh(self, x):
    out = torch.zeros(6, 4, dtype=x.dtype)
    out[: x.shape[0]] = self.linear(x)
    out.clamp_(min=-0.1)
    return out


def complex_through_views(self, x):
    z = torch.zeros(3, 4, 4, dtype=torch.complex128)
    y = torch.complex(self.linear(x), x)
    z[:, 1:3, :] = y[:, None]
    z[..., -1] *= y
    torch.diagonal(z, 0, -2, -1).add_(y)
    z.transpose(0, 1)[1].mul_(1j)
    z.mT[1][0] = y[0].conj()
    return torch.view_as_real(z)


def masked_and_indexed(self, x):
    y = self.linear(x) * 1
    y.masked_fill_(x > 0, 0.25)
    y[torch.tensor([0, 1])] = 2.0
    y.index_add_(0, torch.tensor([1, 1]), x[:2])
    keep = x > 0
    keep |= x < -1
    keep.logical_not_()
    return y * keep


def keeps_dtype(self, x):
    y = torch.ones(3, 4, dtype=torch.float32)
    y.add_(x.detach())
    y.copy_(self.linear(x)[:1])
    return y


def write_to_input(self, x):
    x += 1
    return self.linear(x), x


def buffer_by_name(self, x):
    self.seen = self.seen * 0.5 + x.mean(0)
    return self.linear(x) * self.seen


def buffer_in_place_under_no_grad(self, x):
    y = self.linear(x)
    with torch.no_grad():
        self.seen.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y + self.seen


def buffer_written_through_view(self, x):
    y = self.linear(x)
    self.seen[1:3].copy_(y.detach()[0, :2])
    return y * self.seen


def buffer_written_as_out(self, x):
    y = self.linear(x)
    with torch.no_grad():
        torch.div(y.mean(0), 2, out=self.seen)
        self.seen.copy_(F.normalize(self.seen, dim=0, out=self.seen))
        total = torch.add(x[0], x[1], alpha=3, out=torch.empty(4, dtype=x.dtype))
    return y * self.seen + total


def powers_and_diagonal(self, x):
    y = (x.abs() + 1).pow_(x).float_power_(torch.full_like(x, 2.0))  # no gradient: each power keeps its result
    z = (x @ x.T).fill_diagonal_(0.5)
    rows = torch.arange(6).view(3, 2).fill_diagonal_(7)
    return self.linear(x) * y, z, rows.floor_divide_(torch.tensor([2, 3]))


def parameter_written_before_its_use(self, x):
    with torch.no_grad():
        self.linear.weight.mul_(0.9).clamp_(-0.3, 0.3)
        self.linear.bias[1:].fill_(0.25)
    return self.linear(x)


BODIES = [
    relu_in_place, write_to_base_seen_through_view, write_through_view_seen_in_base, write_to_chunk,
    write_through_permute, fill_fresh, complex_through_views, masked_and_indexed,
    keeps_dtype, write_to_input, buffer_by_name,
    buffer_in_place_under_no_grad, buffer_written_through_view, buffer_written_as_out,
    powers_and_diagonal, parameter_written_before_its_use,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_equals_eager(body):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    compare(Net(body), x)


@pytest.mark.parametrize("name", ["bernoulli_", "uniform_", "exponential_", "normal_", "cauchy_", "geometric_"])
def test_draws_in_place_keep_their_defaults(name):
    given = (0.25,) if name == "geometric_" else ()
    program = capture(
        Net(lambda self, x: self.linear(x) * getattr(x.new_empty(3, 1), name)(*given)), (torch.ones(3, 4),), {}
    )
    assert any(name[:-1] in str(node.target) for node in program.calls)
    run_program(program, program.state, [torch.ones(3, 4, dtype=torch.float64)])


def test_caller_keeps_its_tensor():
    x = torch.zeros(3, 4, dtype=torch.float64)
    model = Net(write_to_input)
    program = capture(model, (x,), {})
    run_program(program, program.state, [x])
    assert not x.any()


class Norms(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn2 = nn.BatchNorm2d(3, **options)
        self.fc = nn.Linear(3, 5)
        self.bn1 = nn.BatchNorm1d(5, affine=False)

    def forward(self, x):
        return self.bn1(self.fc(self.bn2(self.conv(x)).amax((2, 3))))


@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_keeps_the_mean_of_the_samples_statistics(training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    model[1].running_mean.normal_()
    program = compare(model.double().train(training), torch.randn(4, 2, 5, 6, dtype=torch.float64))
    written = {s.path for s in program.sinks if s.kind == "state"}
    assert written == (
        {"1.running_mean", "1.running_var"} | {n for n in written if "tracked" in n} if training else set()
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "eps": 1e-2}, {"track_running_stats": False}], ids=str)
def test_batch_norm(training, options):
    torch.manual_seed(0)
    model = Norms(**options).double().train(training)
    program = compare(model, torch.randn(4, 2, 5, 5, dtype=torch.float64))
    names = [n.target.name() for n in program.calls if isinstance(n.target, torch._ops.OpOverload)]
    assert names.count("aten::batch_norm") == 2
    written = {s.path for s in program.sinks if s.kind == "state"}
    tracked = [n for n, _ in model.named_buffers()]
    assert written == (set(tracked) if training else set())


def test_second_step_continues_from_the_new_buffers():
    torch.manual_seed(0)
    model = Norms().double()
    program = capture(model, (x := torch.randn(4, 2, 5, 5, dtype=torch.float64),), {})
    _, buffers = run_program(program, program.state, [x])
    _, buffers = run_program(program, {**program.state, **buffers}, [x * 2])
    model(x), model(x * 2)
    for name, want in model.named_buffers():
        torch.testing.assert_close(buffers[name], want)
    assert int(buffers["bn1.num_batches_tracked"]) == 2


def no_grad_value(self, x):
    y = self.linear(x)
    with torch.no_grad():
        scale = y.abs().amax()
        with torch.enable_grad():
            inner = self.linear(x) * scale
    return y / scale + inner


def written_through_detach(self, x):
    y = self.linear(x)
    seen = y[:, :2]
    y.detach()[:, 1:].mul_(2)
    own = (y * 1).detach()
    own[0] = 3
    return y.sin() + seen.sum() + own


def written_under_no_grad(self, x):
    y = self.linear(x)
    row = y[1]
    with torch.no_grad():
        y.clamp_(min=-0.1)
        y[:, 0].add_(row.sum())
        inside = y.exp().sum()
    return y * y + row.cos() * inside


def detached(self, x):
    y = self.linear(x)
    return y * y.detach() + x.detach()


@pytest.mark.parametrize(
    "body", [no_grad_value, detached, written_through_detach, written_under_no_grad], ids=lambda b: b.__name__
)
def test_gradients_stop_where_the_user_stops_them(body):
    program = compare(Net(body), torch.randn(3, 4, dtype=torch.float64))
    assert any(n.target is torch.ops.aten.detach.default for n in program.calls)


def expanded_write(self, x):
    y = x[:1].expand(3, 4)
    y.as_strided((3,), (1,)).add_(1)
    return y


def test_refused_with_the_line():
    line = Net.forward.__code__.co_firstlineno + 1  # export records the lines of forward methods only
    with pytest.raises(CaptureError, match=rf"test_functional\.py:{line}\)") as error:
        capture(Net(expanded_write), (torch.randn(3, 4, dtype=torch.float64),), {})
    assert "\n" not in str(error.value)


def test_no_write_leaves_ops_as_they_are():
    model = Net(lambda self, x: F.dropout(F.layer_norm(self.linear(x), (4,)), 0.5))
    program = capture(model, (torch.randn(3, 4, dtype=torch.float64),), {})
    assert [n.target.name() for n in program.calls] == ["aten::linear", "aten::layer_norm", "aten::dropout"]
