"""Run on each of two ranks: loops that users write around a module, with the parallel module and with one device's.

Each takes the module and gives what it saw by name: numbers, losses, gradients, parameters.
"""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from tests.end_to_end.parity import full

PINS = {
    "zero 1": {"dp": 2, "zero": 1},
    "zero 3": {"dp": 2, "zero": 3, "recompute": "full"},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.double()

    def forward(self, x, y):
        """A loss, and a penalty that `down` has no part in."""
        inner = F.gelu(self.norm(self.up(x)))
        return F.mse_loss(self.down(inner), y), inner.square().mean()


def batch(seed, size=8):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=g).double(), torch.randn(size, 4, generator=g).double()


@functools.cache
def _made(pin):
    return autopar.parallelize(Net(), autopar.Mesh("2"), example_args=batch(0), pin=PINS[pin])


def loss_of(m, seed, size=8):
    return m(*batch(seed, size))[0]


def parallel(pin):
    m = _made(pin)
    m.load_state_dict(Net().state_dict())
    m.zero_grad()
    return m


def run_cases(payload):
    """Returns: {"errors": {case and pin: largest error}, "refused": {case: what was raised}}"""
    errors = {f"{name}, {pin}": error(loop, pin) for pin in PINS for name, loop in LOOPS.items()}
    return {"errors": errors, "refused": {name: refusal(change) for name, change in REFUSED.items()}}


def error(loop, pin):
    found, expected = loop(parallel(pin)), loop(Net())
    assert found.keys() == expected.keys()
    return max(float((full(v) - full(expected[k])).abs().max()) for k, v in found.items())


def train(m, optimizer, seed, size=8):
    loss = loss_of(m, seed, size)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def sgd(m):
    return torch.optim.SGD(m.parameters(), lr=0.1)


def state(m):
    return dict(m.named_parameters())


def averaged(m):
    """torch's averages of weights, used between steps: they are written by `torch._foreach_lerp_`."""
    optimizer, out = sgd(m), {}
    average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        train(m, optimizer, step)
        average.update_parameters(m)
        with torch.no_grad():
            out[f"loss {step}"] = loss_of(average, 9)
    return {**out, **state(average)}


def copied(m):
    """A copy trains on its own."""
    train(m, sgd(m), 0)
    other = copy.deepcopy(m)
    mine, theirs = sgd(m), torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(2):
        train(m, mine, step)
        train(other, theirs, step + 5)
    return {**state(m), **{f"copy.{n}": p for n, p in state(other).items()}}


def written(m):
    """Weights kept small after each step, by hand, and told to nobody."""
    optimizer, out = torch.optim.AdamW(m.parameters(), lr=0.1), {}
    for step in range(3):
        out[f"loss {step}"] = train(m, optimizer, step)
        with torch.no_grad():
            for p in m.parameters():
                p.clamp_(-0.1, 0.1)
        out[f"then {step}"] = loss_of(m, 9)
    return out


def retained(m):
    """Two backwards of one forward."""
    loss = loss_of(m, 0)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    return {n: p.grad for n, p in m.named_parameters()}


def watched(m):
    """Under detect_anomaly, which looks for NaN in each gradient."""
    with torch.autograd.detect_anomaly():
        loss_of(m, 0).backward()
    return {n: p.grad for n, p in m.named_parameters()}


def last_of_one(m):
    """The last batch has one sample, fewer than there are ranks."""
    optimizer = sgd(m)
    losses = {f"loss {size}": train(m, optimizer, size, size) for size in (8, 1, 8)}
    return {**losses, **state(m)}


def one_of_two(m):
    """Backward of the penalty alone: `down` has no gradient then, and AdamW leaves it and its moments as they are."""
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.5)
    for step, which in enumerate((0, 1, 0)):
        m(*batch(step))[which].backward()
        assert (m.down.weight.grad is None) == (which == 1)
        optimizer.step()
        optimizer.zero_grad()
    return state(m)


def moved(m):
    """To where it is, as what it is."""
    m.cpu().to(torch.float64)
    return {"loss": train(m, sgd(m), 0), **state(m)}


class Larger(nn.Module):
    """The module is a part of an eager one, with a head that it does not know."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, y):
        return (self.inner(x, y)[0] * self.scale,)


def part_of_a_larger_one(m):
    """It takes one device's whole state dict, after copies were gathered."""
    larger, donor = Larger(m), Larger(Net())
    train(larger, sgd(larger), 0)
    train(donor, sgd(donor), 1)
    larger.load_state_dict(donor.state_dict())
    return {"loss": train(larger, sgd(larger), 2), **state(larger)}


LOOPS = {
    f.__name__: f
    for f in (averaged, copied, written, retained, watched, last_of_one, one_of_two, moved, part_of_a_larger_one)
}


def replaced(m):
    nn.utils.vector_to_parameters(torch.cat([full(p).reshape(-1) for p in m.parameters()]), m.parameters())


def fused(make):
    def step(m):
        loss_of(m, 0).backward()
        make(m.parameters(), lr=0.1, fused=True).step()

    return step


REFUSED = {
    "replaced": replaced,
    "float": nn.Module.float,
    "SGD": fused(torch.optim.SGD),
    "Adagrad": fused(torch.optim.Adagrad),
}


def refusal(change):
    m = autopar.parallelize(Net(), autopar.Mesh("2"), example_args=batch(0), pin=PINS["zero 1"], backend="eager")
    try:
        change(m)
        m(*batch(0))
    except autopar.PlanError as error:
        return str(error)
    return ""
