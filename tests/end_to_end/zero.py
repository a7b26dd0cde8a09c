"""Run on each rank: ZeRO levels against one device, with the collectives and bytes of a step counted."""

import contextlib
from collections import Counter

import torch

import autopar
from autopar.runtime import transfer, zero
from tests.end_to_end.parity import full
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

STEPS, LEARNING_RATE = 3, 1e-3


def run_cases(payload):
    """payload: {"cases": [[model, mesh, pin, backend, how micro-batches are added up], ...]}"""
    return [_case(*case) for case in payload["cases"]]


def _case(name, mesh, pin, backend, how):
    args, kwargs = inputs(name, batch=BATCH // 2)
    accumulate = {"accumulate": 2}.get(how, 1)
    m = autopar.parallelize(
        build(name),
        autopar.Mesh(mesh),
        example_args=args,
        example_kwargs=kwargs,
        pin=pin,
        backend=backend,
        accumulate=accumulate,
    )
    reference = build(name)
    with _counting() as counts:
        errors = _train(m, reference, name, how)
    shards = [p.to_local() for p in m.parameters()]
    return {
        "errors": errors,
        "zero": m.plan.zero,
        "levels": Counter(entry["zero"] for entry in m.plan.params.values()),
        "gathers": counts["gather"] / STEPS,
        "scatters": counts["scatter"] / STEPS,
        "collectives": counts["collective"] / STEPS,
        "share": sum(s.numel() for s in shards) / sum(p.numel() for p in m.parameters()),
        "gathered": m.plan.predicted["memory"]["gathered_and_loss"],
    }


@contextlib.contextmanager
def _counting():
    """Values that are gathered and scattered, and the collectives that carry them."""
    counts, together, one, bucket = Counter(), zero.transfer_together, transfer.transfer, transfer._start

    def counted(values, moves):
        counts.update("gather" if move[2] == "R" else "scatter" for move in moves)
        return together(values, moves)

    def sent(call):
        def sends(*args):
            counts["collective"] += 1
            return call(*args)

        return sends

    zero.transfer_together, transfer.transfer, transfer._start = counted, sent(one), sent(bucket)
    try:
        yield counts
    finally:
        zero.transfer_together, transfer.transfer, transfer._start = together, one, bucket


def _train(m, reference, name, how):
    """Two micro-batches a step, against one batch of both. Returns: the largest error of gradients, of parameters."""
    mine, theirs = (torch.optim.AdamW(x.parameters(), lr=LEARNING_RATE) for x in (m, reference))
    grads = 0.0
    for step in range(STEPS):
        halves = [inputs(name, batch=BATCH // 2, seed=10 * step + i) for i in range(2)]
        for i, (args, kwargs) in enumerate(halves):
            with m.no_sync() if how in ("no_sync", "never synced") and not i else contextlib.nullcontext():
                if how == "never synced" and i:
                    break
                loss = loss_of(m(*args, **kwargs))
            (loss / 2).backward()
            if how != "never synced" or not i:
                (loss_of(reference(*args, **kwargs)) / 2).backward()
        if how != "never synced":  # there the optimizer's own hook reduces
            largest = max(p.grad.abs().max() for p in reference.parameters())
            for (_, p), (_, q) in zip(m.named_parameters(), reference.named_parameters(), strict=True):
                grads = max(grads, _error(full(p.grad), q.grad, 1e-6 * largest))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(m.named_parameters(), reference.named_parameters(), strict=True)
    return {"grads": grads, "parameters": max(_error(full(p), q.detach(), LEARNING_RATE) for (_, p), (_, q) in pairs)}


def _error(found, expected, least):
    return ((found - expected).abs().max() / max(float(expected.abs().max()), float(least))).item()


def run_changes(payload):
    """Losses after parameters changed in each way. Returns: {way: (loss of the parallel model, of one device)}."""
    args, kwargs = inputs("gpt")
    m = autopar.parallelize(
        build("gpt"), autopar.Mesh("2"), example_args=args, example_kwargs=kwargs, pin={"dp": 2, "zero": 2}
    )
    reference, out = build("gpt"), {}

    def losses(way):
        out[way] = (loss_of(m(*args, **kwargs)).item(), loss_of(reference(*args, **kwargs)).item())

    with torch.inference_mode():
        losses("in inference mode")
    loss_of(m(*args, **kwargs)).backward()  # what was gathered there serves training
    m.zero_grad()
    reference.load_state_dict({n: 1.1 * t for n, t in reference.state_dict().items()})
    m.load_state_dict(reference.state_dict())
    losses("loaded")
    with torch.no_grad():
        for p, q in zip(m.parameters(), reference.parameters(), strict=True):
            p.data.to_local().data.mul_(0.9)
            q.mul_(0.9)
    m.parameters_changed()
    losses("announced")
    for x in (m, reference):
        optimizer = torch.optim.SGD(x.parameters(), lr=0.1)
        loss_of(x(*args, **kwargs)).backward()
        optimizer.step()
    losses("stepped")
    return out
