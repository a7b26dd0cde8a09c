"""Run on each of two ranks: what users do around a module between its steps, with the parallel module and with one
device's; and what they should not do.

`EQUAL`: functions of a module and a way to remake it, which give what they saw by name. `REFUSED`: what is raised.
"""

import functools
import io
import pickle
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from tests.end_to_end.loops import batch
from tests.end_to_end.parity import full

ZERO1, ZERO3, TENSOR = {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}
PIPELINE = {"pp": 2, "microbatches": 2}


class Counted(nn.Linear):
    """Keeps something beside tensors."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Net(nn.Module):
    """The weight of `tied` is another name of `up`'s, and stands between others of its own order."""

    def __init__(self, norm=nn.BatchNorm1d, p=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.tied = nn.Linear(6, 16), nn.Linear(6, 16)
        self.tied.weight = self.up.weight
        self.norm, self.drop, self.down = norm(16), nn.Dropout(p), Counted(16, 4)
        self.again = self.norm
        self.register_buffer("scale", torch.full((16,), 0.5))
        self.double()

    def forward(self, x, y):
        inner = self.drop(F.gelu(self.norm(self.up(x) + self.tied(x)) * self.scale))
        return F.mse_loss(self.down(inner), y)


class KeptStill(Net):
    """Its batch norm is never trained."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def made(model, pin, **options):
    return autopar.parallelize(model, options.pop("mesh", "2"), example_args=batch(0), pin=pin, **options)


def step(m, seed, size=8, make=torch.optim.SGD):
    loss = m(*batch(seed, size))
    loss.backward()
    make([p for p in m.parameters() if p.requires_grad], lr=0.1).step()
    m.zero_grad()
    return float(loss)


def evaluated(m):
    """Another mode and shape first seen where no gradient can be, then trained on."""
    seen = {}
    for name, mode in (("train", True), ("eval", False)):
        m.train(mode)
        with torch.inference_mode():
            seen[name] = float(full(m(*batch(1, 6))))
    m.train()
    return {**seen, "after": step(m, 2, 6), "smaller": step(m, 3, 5)}


def partly_in_eval(m):
    """`norm` was put into eval mode before `parallelize`; a last batch is smaller; then it is trained, and put back."""
    seen = [step(m, 0), step(m, 1, 6)]
    for module in m.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train()
    seen.append(step(m, 2))
    m.norm.eval()
    return dict(enumerate([*seen, step(m, 3)]))


def other_attributes(m):
    """Dropout is switched off, and the norm's momentum changed, after `parallelize`."""
    m.drop.p, m.norm.momentum = 0.0, 0.5
    return {"losses": torch.tensor([step(m, 0), step(m, 1, 6)])}


def own_train(m):
    seen = [step(m, 0), step(m.train(), 1, 6)]
    m.eval()
    return dict(enumerate([*seen, float(full(m(*batch(2)))), step(m.train(), 3)]))


def unfrozen(m):
    """Parameters that were frozen when the model was captured are trained from the second step on, others frozen."""
    seen = [step(m, 0)]
    for name, p in m.named_parameters():
        p.requires_grad_(name != "down.bias")
    return dict(enumerate([*seen, step(m, 1), step(m, 2, 6)]))


def swapped(m):
    """An average is swapped in for an evaluation and out again, by `p.data`."""
    average, seen = [p.detach().clone() for p in m.parameters()], []
    for i in range(3):
        seen.append(step(m, i))
        with torch.no_grad():
            for p, a in zip(m.parameters(), average, strict=True):
                a.lerp_(p, 0.3)
        own = [p.detach().clone() for p in m.parameters()]
        for values in (average, own):
            for p, value in zip(m.parameters(), values, strict=True):
                p.data.copy_(value)
            with torch.no_grad():
                seen.append(float(full(m(*batch(9)))))
    return dict(enumerate(seen))


def frozen_first(m):
    """Nothing is trained in the first call; then two micro-batches are added up."""
    m.requires_grad_(False)
    m(*batch(0))
    m.requires_grad_(True)
    for i in range(2):
        m(*batch(i)).backward()
    assert not any("Partial" in str(getattr(p.grad, "placements", "")) for p in m.parameters())
    return {n: p.grad for n, p in m.named_parameters()}


def names(m):
    """Names in the model's order; what a loop finds by class and by index."""
    found = [*m.state_dict(), *(n for n, _ in m.named_modules()), *(n for n, _ in m.named_parameters())]
    assert [n for n, module in m.named_modules() if isinstance(module, nn.BatchNorm1d)] == ["norm"]
    assert m.state_dict()["down._extra_state"] == {"calls": 3}
    m.load_state_dict(m.state_dict())
    return dict.fromkeys(found, 0.0)


def still(model):
    model.norm.eval()
    return model


def half_frozen(model):
    model.up.requires_grad_(False)
    model.tied.requires_grad_(False)
    return model


def layer_norm():
    return Net(nn.LayerNorm)


EQUAL = {
    "evaluated, zero 1": (evaluated, Net, ZERO1),
    "evaluated, pipeline": (evaluated, layer_norm, PIPELINE),
    "partly in eval": (partly_in_eval, lambda: still(Net()), ZERO3),
    "other attributes": (other_attributes, lambda: Net(p=0.5), TENSOR),
    "own train": (own_train, lambda: KeptStill().train(), ZERO1),
    "unfrozen, zero 0": (unfrozen, lambda: half_frozen(Net()), {"dp": 2, "zero": 0}),
    "unfrozen, zero 3": (unfrozen, lambda: half_frozen(Net()), ZERO3),
    "unfrozen, pipeline": (unfrozen, lambda: half_frozen(layer_norm()), PIPELINE),
    "swapped": (swapped, Net, ZERO1),
    "frozen first": (frozen_first, Net, ZERO1),
    "names": (names, Net, ZERO1),
}


def run_cases(payload):
    """Returns: {"equal": {case: largest error}, "said": {case: what was raised, or ""}, "across": {pin: error}}"""
    return {
        "equal": {name: error(*case) for name, case in EQUAL.items()},
        "said": {name: said(case) for name, case in SAID.items()},
        "across": {f"{pin} from {other}": across(pin, other) for pin, other in ACROSS},
        "resumed": resumed(),
    }


def error(loop, make, pin):
    model = make()
    with torch.inference_mode(loop is evaluated):  # where it is made must not matter
        m = made(model, pin, accumulate=2 if loop is frozen_first else 1)
    reference = make()
    found, expected = loop(m), loop(reference)
    found |= {n: v for n, v in m.full_state_dict().items() if isinstance(v, torch.Tensor)}
    expected |= {n: v for n, v in reference.state_dict().items() if isinstance(v, torch.Tensor)}
    assert list(found) == list(expected), f"{list(found)} {list(expected)}"
    return max(abs(distance(v, expected[k])) for k, v in found.items())


def distance(found, expected):
    if isinstance(found, torch.Tensor):
        return float((full(found) - full(expected)).abs().max())
    return found - expected


def said(case):
    try:
        case()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


@functools.cache
def of_layer_norm(pin):
    return made(layer_norm(), dict(pin))


def with_state(pin, change, **options):
    """Load one device's state, changed."""

    def load():
        state = layer_norm().state_dict()
        change(state)
        of_layer_norm(tuple(pin.items())).load_state_dict(state, **options)

    return load


def whole_optimizer_state():
    model = layer_norm()
    m, optimizer = made(layer_norm(), ZERO3), torch.optim.AdamW(model.parameters())
    model(*batch(0)).backward()
    optimizer.step()
    mine = torch.optim.AdamW(m.parameters())
    mine.load_state_dict(optimizer.state_dict())
    m(*batch(0)).backward()
    mine.step()


def groups_of_another_stage():
    """As torch.distributed.checkpoint puts together what is saved from a pipeline without flattening."""
    m = made(layer_norm(), PIPELINE)
    optimizer = torch.optim.AdamW(m.parameters())
    del optimizer.param_groups[0]["lr"]
    m(*batch(0)).backward()
    optimizer.step()


def frozen_on_one_rank():
    m = made(layer_norm(), ZERO1)
    m.up.weight.requires_grad_(dist.get_rank() == 0)
    m(*batch(0)).backward()


def on_meta(model):
    with torch.device("meta"):
        empty = model()
    m, reference = made(empty, ZERO3), model()
    m.load_state_dict(reference.state_dict())
    assert abs(m(*batch(0)) - reference(*batch(0))) < 1e-12


class Fleeting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("once", torch.ones(16), persistent=False)


def of(change):
    return lambda: change(of_layer_norm(tuple(ZERO1.items())))


SAID = {
    "pickled": of(pickle.dumps),
    "saved": of(lambda m: torch.save(m, io.BytesIO())),
    "shared": of(lambda m: m.share_memory()),
    "called": of(lambda m: m.up(torch.ones(1, 6))),
    "hooked": of(lambda m: m.up.register_forward_hook(print)),
    "halved": of(lambda m: m.up.half()),
    "activated": of(lambda m: setattr(m.drop, "p", torch.tensor(0.5))),
    "missing": with_state(PIPELINE, lambda state: state.pop("down.weight")),
    "missing tied": with_state(PIPELINE, lambda state: state.pop("tied.weight")),
    "wrong shape": with_state(PIPELINE, lambda state: state.update({"down.weight": torch.zeros(3)})),
    "no tensor": with_state(PIPELINE, lambda state: state.update({"down.weight": "text"})),
    "extra state": with_state(ZERO3, lambda state: state.update({"_extra_state": {"epoch": 3}})),
    "other dtype": with_state(TENSOR, lambda state: state.update({"up.bias": torch.zeros(16)}), assign=True),
    "optimizer of one device": whole_optimizer_state,
    "optimizer of another stage": groups_of_another_stage,
    "frozen on one rank": frozen_on_one_rank,
    "on meta": lambda: on_meta(layer_norm),
    "on meta, not persistent": lambda: on_meta(Fleeting),
}

ACROSS = [(ZERO3, TENSOR), (TENSOR, ZERO1), (PIPELINE, ZERO3), ({}, TENSOR)]


def across(pin, other):
    """The state dict of a module on another mesh, as it is and assigned."""
    worst = 0.0
    for assign in (False, True):
        m = made(layer_norm(), pin, mesh="2" if pin else "1")
        source = made(layer_norm(), other)
        with torch.no_grad():
            for p in source.parameters():
                p.mul_(1.5)
        m.load_state_dict(source.state_dict(), assign=assign)
        found, expected = m.full_state_dict(), source.full_state_dict()
        values = [(found[n], v) for n, v in expected.items() if isinstance(v, torch.Tensor)]
        values.append((m(*batch(0)).detach(), source(*batch(0)).detach()))
        worst = max([worst, *(float((a - b).abs().max()) for a, b in values)])
    return worst


def resumed():
    """A pipeline with dropout, parallelized in eval mode, saved in the middle and gone on with in another plan, the
    optimizer's states flattened. Returns: the largest difference of losses and parameters.
    """
    flat, folder = StateDictOptions(flatten_optimizer_state_dict=True), [None]
    if dist.get_rank() == 0:
        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    def start(pin):
        torch.manual_seed(len(pin))  # the seed is restored, too
        m = made(Net(nn.LayerNorm, p=0.5).eval(), pin).train()
        groups = [[p for p in m.parameters() if (p.dim() > 1) == decayed] for decayed in (True, False)]
        groups = [{"params": g, "weight_decay": 0.1 * (not i), "lr": 0.1 / (i + 1)} for i, g in enumerate(groups)]
        return m, torch.optim.AdamW(groups)

    def train(m, optimizer, seeds):
        out = []
        for seed in seeds:
            loss = m(*batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(float(loss))
        return out

    m, optimizer = start(PIPELINE)
    train(m, optimizer, range(2))
    state = {"model": m.state_dict(), "optimizer": get_optimizer_state_dict(m, optimizer, options=flat)}
    dcp.save(state, checkpoint_id=folder[0])
    losses, worst = train(m, optimizer, range(2, 4)), 0.0
    for pin in (PIPELINE, ZERO3):
        other, theirs = start(pin)
        state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, theirs, options=flat)}
        dcp.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state["model"])
        set_optimizer_state_dict(other, theirs, state["optimizer"], options=flat)
        found = train(other, theirs, range(2, 4))
        values, expected = other.full_state_dict(), m.full_state_dict()
        errors = [float((values[n] - v).abs().max()) for n, v in expected.items() if isinstance(v, torch.Tensor)]
        worst = max([worst, *errors, *(abs(a - b) for a, b in zip(losses, found, strict=True))])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return worst
