"""Run on each rank: torch's optimizers, schedulers, clipping and hooks on a parallel module and on one device."""

import contextlib
import functools
import math

import torch

import autopar
from tests.end_to_end.parity import full
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

STEPS = 3
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-3),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-3),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
}


def run_cases(payload):
    """Returns: errors by what was tried; refusals by name."""
    out = {"errors": {}, "refused": {}}
    for pin in ({"dp": 2, "zero": 3}, {"tp": 2}):
        for name, make in OPTIMIZERS.items():
            out["errors"][f"{name} {pin}"] = _compare(pin, lambda m, make=make: _plain(m, make))
        out["errors"][f"groups, scheduler, clipping, hooks {pin}"] = _compare(pin, _everything)
        out["errors"][f"Muon {pin}"] = _compare(pin, _muon)
    out["errors"]["kept gradients"] = _compare({"dp": 2, "zero": 1}, _kept, accumulate=2)
    for name in ("Adafactor", "Rprop"):
        for pin in ({"dp": 2, "zero": 3}, {"dp": 2, "zero": 0}):
            out["refused"][f"{name} {pin['zero']}"] = _refusal(pin, getattr(torch.optim, name))
    return out


@functools.cache
def _module(zero, degree, accumulate):
    args, kwargs = inputs("gpt")
    pin = {"tp": 2} if degree == "tp" else {"dp": 2, "zero": zero}
    return autopar.parallelize(
        build("gpt"),
        autopar.Mesh("2"),
        example_args=args,
        example_kwargs=kwargs,
        pin=pin,
        backend="eager",
        accumulate=accumulate,
    )


def _parallel(pin, accumulate=1):
    """One module a plan, as it was when it was made."""
    m = _module(pin.get("zero"), next(iter(pin)), accumulate)
    m.load_state_dict(build("gpt").state_dict())
    m.zero_grad()
    return m


def _compare(pin, train, accumulate=1):
    """The largest error of a parameter after training, and of the norms that `train` tells; a step's length is the
    least scale.
    """
    m, reference = _parallel(pin, accumulate), build("gpt")
    norms = zip(train(m) or (), train(reference) or (), strict=True)
    theirs = dict(reference.named_parameters())
    errors = [float((full(p) - theirs[n]).abs().max() / theirs[n].abs().max()) for n, p in m.named_parameters()]
    return max([*errors, *(abs(float(full(a) - b)) / float(b) for a, b in norms)])


def _call(m, step, part=slice(None)):
    args, kwargs = inputs("gpt", seed=step)
    loss_of(m(*(x[part] for x in args), **kwargs)).backward()


def _plain(m, make):
    optimizer = make(m.parameters())
    for step in range(STEPS):
        _call(m, step)
        optimizer.step()
        optimizer.zero_grad()


def _muon(m):
    """Matrices by Muon, the rest by AdamW. Its iteration is in bfloat16."""
    matrices = [p for n, p in m.named_parameters() if p.dim() == 2 and "embedding" not in n]
    rest = [p for n, p in m.named_parameters() if p.dim() != 2 or "embedding" in n]
    optimizers = torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)
    for step in range(STEPS):
        _call(m, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _everything(m):
    """Groups by name and dimension, a scheduler, clipping by the global norm, both kinds of gradient hooks."""
    decayed = [p for n, p in m.named_parameters() if p.dim() > 1 and "embedding" not in n]
    others = [p for n, p in m.named_parameters() if p.dim() <= 1 or "embedding" in n]
    seen, norms = [], []
    hooks = [
        decayed[0].register_hook(lambda grad: grad * 2),
        decayed[1].register_post_accumulate_grad_hook(lambda p: seen.append(p)),
    ]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        _call(m, step)
        norms += [torch.nn.utils.get_total_norm([p.grad for p in m.parameters()], kind) for kind in (1.0, math.inf)]
        norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    assert len(seen) == STEPS
    return norms


def _kept(m):
    """Gradients thrown away half-way in every way there is; norms read half-way.

    But for one: `_foreach_zero_` (an optimizer with foreach=True or fused=True) cannot run on parts, and raises.
    """
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=kind) for kind in (False, True)]
    halves, norms = (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)), []
    matrices = {n: p for n, p in m.named_parameters() if p.dim() == 2}
    hook = matrices[min(matrices)].register_hook(lambda grad: grad * 3)
    for step, optimizer in enumerate(optimizers * 2):
        for throw in (m, optimizer):
            for to_none in (False, True):
                _call(m, 9, halves[0])
                if optimizer is throw and step % 2 and not to_none and isinstance(m, autopar.ParallelModule):
                    with contextlib.suppress(RuntimeError):
                        throw.zero_grad(set_to_none=False)
                        raise AssertionError("torch can set parts to zero now: say so in runtime/zero.py")
                throw.zero_grad(set_to_none=to_none or (throw is optimizer and step % 2 == 1))
        for half in halves:
            _call(m, step, half)
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]))
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    hook.remove()
    return norms


def _refusal(pin, make):
    m = _parallel(pin)
    optimizer = make(m.parameters(), lr=1e-3)
    _call(m, 0)
    try:
        optimizer.step()
    except autopar.PlanError as error:
        return str(error)
    return ""
