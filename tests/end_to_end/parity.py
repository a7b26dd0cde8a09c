"""Run on each rank: train a model as planned and on one device; measure what differs and how the work was divided."""

import functools
import re

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import autopar
from tests.end_to_end.small_models import build, inputs, loss_of

STEPS, LEARNING_RATE = 3, 1e-3


def run_cases(payload):
    """payload: {"cases": [[model, mesh, options of parallelize], ...]}. Returns: a dict for each case."""
    return [_case(*case) for case in payload["cases"]]


def _case(model, mesh, options):
    reference, options = _reference(model), dict(options)
    options["pin"] = {"pp": 1, "microbatches": 1, **options.get("pin", {})}  # all parameters, and a batch, on each rank
    args, kwargs = inputs(model)
    example = {"example_args": args, "example_kwargs": kwargs}
    if "memory_share" in options:  # of what the best plan would take, so that another one must be found
        best = autopar.plan(build(model), autopar.Mesh(mesh), **example, pin=options["pin"])
        memory = [int(options.pop("memory_share") * best.predicted["peak_memory_bytes"][0])]
        dist.broadcast_object_list(memory)  # how far a search goes depends on the time it takes
        options["memory"] = memory[0]
    try:
        m = autopar.parallelize(build(model), autopar.Mesh(mesh), **example, **options)
        found = _train(m, model)
    except autopar.AutoparError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    largest = max(g.abs().max() for g in reference["grads"].values())
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in m.parameters()]
    return {
        "losses": [abs(a - b) / abs(b) for a, b in zip(found["losses"], reference["losses"], strict=True)],
        "grads": {n: _error(found["grads"][n], g, 1e-6 * largest) for n, g in reference["grads"].items()},
        "params": {n: _error(found["params"][n], p, 1e-6 * largest) for n, p in reference["params"].items()},
        "names": sorted(found["params"]) == sorted(reference["params"]),
        "degrees": dict(m.plan.degrees),
        "zero": m.plan.zero,
        "sequence_cut": sorted(n for n, op in m.plan.ops.items() if op["outputs"] and _cuts_sequence(m.plan, n, op)),
        "local": sum(s.numel() for s in shards),
        "total": sum(p.numel() for p in m.parameters()),
        "flop": found["flop"],
        "reference_flop": reference["flop"],
    }


@functools.cache
def _reference(model):
    return _train(build(model), model)


def _train(module, model):
    """Operations of a call, then three AdamW steps; gradients are those of the first."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    out = {"losses": [], "flop": _flop(module, model)}
    for step in range(STEPS):
        args, kwargs = inputs(model, seed=step)
        loss = loss_of(module(*args, **kwargs))
        loss.backward()
        out["losses"].append(loss.item())
        if not step:
            out["grads"] = {n: full(p.grad) for n, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    out["params"] = {n: full(p) for n, p in module.named_parameters()}
    return out


def _flop(module, model):
    """Apart from the steps that are compared: under the counter torch takes attention apart, and rounds otherwise."""
    args, kwargs = inputs(model, seed=0)
    module(*args, **kwargs)  # lowered here: a mode that observes does not see the first call
    with FlopCounterMode(display=False) as counter:
        loss_of(module(*args, **kwargs)).backward()
    module.zero_grad()
    return counter.get_total_flops()


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _cuts_sequence(plan, name, op):
    """Is this a sum with the residual [batch, sequence, width] whose sequence a tensor axis cuts?"""
    cut = any(p == "S(1)" and a["role"] == "tp" for p, a in zip(op["outputs"][0], plan.axes, strict=True))
    return cut and re.search(r"(layers|h)\.\d+/add/\d+$", name) is not None


def _error(found, expected, least):
    """NaN and a wrong shape are infinite errors."""
    if found.shape != expected.shape:
        return float("inf")
    error = ((found - expected).abs().max() / expected.abs().max().clamp(min=float(least))).item()
    return error if error == error else float("inf")
