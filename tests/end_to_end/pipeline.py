"""Run on each rank: train a model as a pipeline and on one device; what differs, and how the stages lie."""

import functools

import torch
import torch.distributed as dist

import autopar
from tests.end_to_end.parity import _error as error
from tests.end_to_end.parity import full
from tests.end_to_end.pipeline_models import build, inputs, loss_of

STEPS, LEARNING_RATE = 3, 1e-3


def run_cases(payload):
    """payload: {"cases": [[model, mesh, batch, options of parallelize], ...]}. Returns: a dict for each case."""
    return [run_case(*case) for case in payload["cases"]]


def run_case(model, mesh, batch, options, evaluate=True):
    """evaluate: the loss in eval mode, too, which the model is captured and lowered again for."""
    reference = _reference(model, batch)
    args, kwargs = inputs(model, batch)
    try:
        m = autopar.parallelize(build(model), autopar.Mesh(mesh), example_args=args, example_kwargs=kwargs, **options)
        found = _train(m, model, batch, evaluate)
    except autopar.AutoparError as problem:
        return {"refused": f"{type(problem).__name__}: {problem}"}
    whole = m.full_state_dict()
    params = {n: whole[n] for n in reference["params"]}
    grads = {}
    for mine in _everyone(found["grads"]):
        grads |= mine
    largest = max(g.abs().max() for g in reference["grads"].values())
    return {
        "losses": [abs(a - b) / abs(b) for a, b in zip(found["losses"], reference["losses"], strict=True)],
        "norms": [abs(a - b) / abs(b) for a, b in zip(found["norms"], reference["norms"], strict=True)],
        **({"eval": abs(found["eval"] - reference["eval"]) / abs(reference["eval"])} if evaluate else {}),
        "grads": {n: error(grads.get(n, torch.zeros(())), g, 1e-6 * largest) for n, g in reference["grads"].items()},
        "params": {n: error(params[n], p, LEARNING_RATE) for n, p in reference["params"].items()},
        "held": len(found["grads"]),
        "degrees": dict(m.plan.degrees),
        "in_flight": next(iter(m._cache.values())).run.most_in_flight,
    }


def _everyone(grads):
    """The gradients of all ranks, by name."""
    if not dist.is_initialized():
        return [grads]
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, grads)
    return out


@functools.cache
def _reference(model, batch):
    return _train(build(model), model, batch)


def _train(module, model, batch, evaluate=True):
    """AdamW steps with accumulation of two halves and clipping, on another batch each; then a loss in eval mode."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    out = {"losses": [], "norms": []}
    for step in range(STEPS):
        args, kwargs = inputs(model, batch, seed=step)
        loss = loss_of(module(*args, **kwargs))
        (loss / 2).backward()
        if step == 1:
            (loss_of(module(*args, **kwargs)) / 2).backward()
        if not step:
            out["grads"] = {n: full(p.grad).clone() for n, p in module.named_parameters(remove_duplicate=False)}
        out["losses"].append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        out["norms"].append(float(full(norm)))
        optimizer.step()
        optimizer.zero_grad()
    if not hasattr(module, "full_state_dict"):
        out["params"] = {n: full(p) for n, p in module.named_parameters(remove_duplicate=False)}
    if not evaluate:
        return out
    module.eval()
    with torch.no_grad():
        out["eval"] = loss_of(module(*args, **kwargs)).item()
    return out
