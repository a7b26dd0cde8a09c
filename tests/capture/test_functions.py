"""A user's autograd.Function is one node of the graph, and its own backward runs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import call_program, capture
from autopar.errors import CaptureError
from autopar.program import record
from autopar.user_function import function_class, op_text


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step=1.0):
        ctx.save_for_backward(x)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1.5), None


class Scale(torch.autograd.Function):
    """The new style, with a gradient that is wrong on purpose and differs from call to call by the constant."""

    @staticmethod
    def forward(x, k):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k, None


class Many(torch.autograd.Function):
    """Nested arguments, a callable, outputs that are no tensors or take no gradient."""

    @staticmethod
    def forward(ctx, x, options, weight):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        scores = options["act"](x * weight + options["bias"][0])
        kept, size = (scores > 0).double(), scores.shape[-1]
        ctx.mark_non_differentiable(kept)
        return None, scores, kept, size, scores.argmax(-1)

    @staticmethod
    def backward(ctx, nothing, g, g_kept, g_size, g_argmax):
        assert nothing is None
        assert g_size is None
        x, _ = ctx.saved_tensors
        return g * 3, None, (g * x).sum(0)


class Doubly(torch.autograd.Function):
    """Calls another Function inside."""

    @staticmethod
    def forward(ctx, x):
        return Round.apply(x, 0.5) + 1

    @staticmethod
    def backward(ctx, g):
        return g * 7


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


round_taken_before = Round.apply


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.w, self.body = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), body
        self.double()

    def forward(self, x):
        return self.body(self, self.fc(x))


def body_round(net, h):
    return Round.apply(h, 0.1) * net.w


def body_bound(net, h):
    return round_taken_before(h)


def body_new_style(net, h):
    return Scale.apply(h, 5.0) + Scale.apply(h * net.w, -1.0)


def body_many(net, h):
    nothing, scores, kept, size, best = Many.apply(h, {"act": torch.tanh, "bias": [h.detach() * 0.5]}, net.w)
    assert nothing is None
    return scores * kept * size + best.unsqueeze(-1)


def body_doubly(net, h):
    return Doubly.apply(h)


def body_no_grad(net, h):
    with torch.no_grad():
        quiet = Round.apply(h, 0.1)
    return quiet * h


def body_loop(net, h):
    for k in range(3):
        h = Scale.apply(h, float(k % 2)) * net.w
    return h


def body_view(net, h):
    return View.apply(h) * net.w


def body_same_twice(net, h):
    return Many.apply(h, {"act": torch.sin, "bias": (h,)}, net.w)[1]


BODIES = [v for k, v in dict(globals()).items() if k.startswith("body_")]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_values_and_gradients_are_the_modules_own(body):
    model, x = Net(body), torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = capture(model, (x,), {})
    assert [n for n in program.calls if function_class(n)]
    state = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    expected, found = model(x), call_program(program, (x,), {}, state)
    assert torch.equal(expected, found)
    seed = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected.backward(seed)
    found.backward(seed)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert state[name].grad is None or not state[name].grad.any()
        else:
            assert torch.equal(parameter.grad, state[name].grad)


@pytest.mark.parametrize("from_input", [False, True])
def test_reentrant_checkpoint_keeps_the_gradients_that_torch_gives(from_input):
    """Of what no input of the checkpoint needs a gradient for, torch gives none."""

    def body(net, h):
        def inside(x):
            return torch.tanh(x) * net.w

        return checkpoint(inside, h.detach() if from_input else h, use_reentrant=True) + h

    model, x = Net(body), torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = capture(model, (x,), {})
    state = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "None of the inputs have requires_grad"
        expected = model(x)
    found = call_program(program, (x,), {}, state)
    assert torch.equal(expected, found)
    expected.sum().backward()
    found.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (state[name].grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, state[name].grad)
    assert (model.w.grad is None) == from_input


def nodes_of(body):
    program = capture(Net(body), (torch.randn(3, 4, dtype=torch.float64),), {})
    return program, [n for n in program.calls if function_class(n)]


def test_one_node_with_name_line_and_class():
    program, (node,) = nodes_of(body_round)
    line = Net.forward.__code__.co_firstlineno + 1  # torch records frames of functions named forward
    assert record(node).where == f"{__file__}:{line}"
    assert record(node).op == "/Round/1"
    assert function_class(node) is Round
    assert op_text(node) == "autograd.Function Round"
    assert not [n for n in program.calls if "round" in str(n.target)]


def test_a_function_inside_another_is_part_of_it():
    _, (node,) = nodes_of(body_doubly)
    assert function_class(node) is Doubly


def test_equal_calls_share_a_number_so_that_blocks_are_equal():
    _, nodes = nodes_of(body_loop)
    numbers = [n.args[1] for n in nodes]
    assert numbers[0] == numbers[2] != numbers[1]

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Net(body_round) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    program = capture(Blocks(), (torch.randn(3, 4, dtype=torch.float64),), {})
    assert [c.blocks for c in program.classes] == [("layers.0", "layers.1", "layers.2")]


def test_outputs_without_gradient_are_detached_in_the_graph():
    program, (node,) = nodes_of(body_many)
    detached = [n for n in program.calls if "detach" in str(n.target) and n.args[0].args[:1] == (node,)]
    assert [n.args[0].args[1] for n in detached] == [1]


def test_meta_model():
    model = Net(body_round).to("meta")
    program = capture(model, (torch.randn(3, 4, dtype=torch.float64, device="meta"),), {})
    assert next(n for n in program.calls if function_class(n)).meta["val"][0].is_meta


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, net):
        return x * net.w

    @staticmethod
    def backward(ctx, g):
        return g, None


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    ("function", "more", "said"),
    [
        (Dirty, lambda net: (), "return a new tensor, without mark_dirty"),
        (Hidden, lambda net: (net,), "pass the tensor to apply"),
        (Noisy, lambda net: (), "draw them before and pass them to apply"),
    ],
    ids=["in-place", "hidden", "random"],
)
def test_refusals_name_the_line_inside_the_function(function, more, said):
    model = Net(lambda net, h: function.apply(h, *more(net)))
    with pytest.raises(CaptureError) as error:
        capture(model, (torch.randn(3, 4, dtype=torch.float64),), {})
    text = str(error.value)
    lines = range(function.forward.__code__.co_firstlineno, function.forward.__code__.co_firstlineno + 5)
    assert any(f"{__file__}:{line})" in text for line in lines)
    assert said in text
    assert function.__name__ in text
    assert "\n" not in text


def test_a_constant_table_is_no_tensor_of_the_model():
    table = torch.arange(4, dtype=torch.float64)

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + table

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    x = torch.zeros(3, 4, dtype=torch.float64)
    program = capture(Net(lambda net, h: Shift.apply(h) - h), (x,), {})
    torch.testing.assert_close(call_program(program, (x,), {}), table.expand(3, 4))


def test_apply_works_again_afterwards_and_after_an_error():
    capture(Net(body_round), (torch.randn(3, 4, dtype=torch.float64),), {})
    with pytest.raises(CaptureError):
        capture(Net(lambda net, h: Dirty.apply(h)), (torch.randn(3, 4, dtype=torch.float64),), {})
    for apply in (Round.apply, round_taken_before):
        x = torch.full((3,), 0.3, requires_grad=True)
        apply(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))
    assert copy.copy(x).grad_fn is None
