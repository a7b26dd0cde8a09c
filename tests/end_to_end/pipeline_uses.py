"""Run on each rank: what a training loop does with a pipeline beside plain steps; errors or facts by name."""

import importlib
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from tests.end_to_end import pipeline, pipeline_memory
from tests.end_to_end.parity import _error as error
from tests.end_to_end.parity import full
from tests.end_to_end.pipeline_models import build, inputs

PIN = {"pp": 2, "microbatches": 4}


def everything(payload):
    """On two ranks, in one start of them: what `run_cases` of both files, `uses` and `save_and_load` return."""
    return {
        "parity": pipeline.run_cases(payload),
        "memory": pipeline_memory.run_cases(payload),
        "uses": uses(payload),
        "checkpoint": save_and_load(payload),
    }


def uses(payload):
    """On two ranks. Returns: {use: largest relative error, or a line of text}."""
    args, _ = inputs("gpt")
    single = build("gpt")
    m = autopar.parallelize(build("gpt"), "2", example_args=args, pin=PIN)
    return {
        "scaled": _scaled(m, single, args),
        "another batch": _another(m, single),
        "eval": _eval(m, single, args),
        "sharded batch": _sharded(m, single, args),
        "loaded": _loaded(m, single),
        "twice": _twice(m, args),
        "input gradient": _input_gradient(),
        "another output": _another_output(),
        "dropout": _dropout(),
        "handed over": _handed_over(m, args),
        "scaler": _grad_scaler(),
        "together": _together(m, args),
        "unasked": _unasked(),
    }


def _compare(m, single):
    reference = {n: p.grad for n, p in single.named_parameters()}
    largest = max(g.abs().max() for g in reference.values())
    found = max(error(full(p.grad), reference[n], 1e-6 * largest) for n, p in m.named_parameters())
    m.zero_grad()
    single.zero_grad()
    return found


def _unasked():
    """Nothing pinned: the planner takes stages where it finds them faster."""
    torch.manual_seed(0)
    single = autopar.models.build("gpt-tiny", batch=8, seq=64, device="cpu").double()
    args, _ = single.example_inputs()
    model = autopar.models.build("gpt-tiny", batch=8, seq=64, device="cpu").double()
    model.load_state_dict(single.state_dict())
    m = autopar.parallelize(model, "2", example_args=args)
    assert m.plan.degrees["pp"] == 2, m.plan.degrees
    m(*args).backward()
    single(*args).backward()
    return _compare(m, single)


def _scaled(m, single, args):
    """Loss scaling: seeded with the last gradient, rescaled by the new one; and a step whose scale is infinite."""
    worst = 0.0
    for scale in (1024.0, 1024.0, 512.0, float("inf"), 3.0):
        (m(*args) * scale).backward()
        if scale == float("inf"):
            m.zero_grad()
            continue
        (single(*args) * scale).backward()
        worst = max(worst, _compare(m, single))
    return worst


def _another(m, single):
    """The last batch of an epoch is smaller, and does not divide evenly."""
    args, _ = inputs("gpt", batch=7, seed=5)
    m(*args).backward()
    single(*args).backward()
    return _compare(m, single)


def _eval(m, single, args):
    m.eval()
    single.eval()
    loss, expected = m(*args), single(*args)
    m.train()
    single.train()
    return "differentiable" if loss.requires_grad else (abs(loss - expected) / expected).item()


def _sharded(m, single, args):
    m(*m.shard(args)).backward()
    single(*args).backward()
    return _compare(m, single)


def _loaded(m, single):
    """A single-device state goes in, and comes out."""
    state = {n: v + 0.5 for n, v in single.state_dict().items()}
    m.load_state_dict(state)
    found = m.full_state_dict()
    m.load_state_dict(single.state_dict())
    return max(error(found[n], v, 1e-6) for n, v in state.items()) if found.keys() == state.keys() else "names"


def _twice(m, args):
    loss = m(*args)
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except autopar.AutoparError as problem:
        return str(problem)
    finally:
        m.zero_grad()
    return "went through"


def _input_gradient():
    args, kwargs = inputs("mixed")
    x = args[0].clone().requires_grad_()
    y = args[0].clone().requires_grad_()
    pin = {"pp": 2, "microbatches": 3}
    m = autopar.parallelize(build("mixed"), "2", example_args=(x, args[1]), example_kwargs=kwargs, pin=pin)
    m(x, args[1], **kwargs)["loss"].backward()
    build("mixed")(y, args[1], **kwargs)["loss"].backward()
    return error(x.grad, y.grad, 1e-6)


def _another_output():
    args, kwargs = inputs("mixed")
    m = autopar.parallelize(build("mixed"), "2", example_args=args, example_kwargs=kwargs, pin=PIN)
    out = m(*args, **kwargs)
    try:
        full_sum = out["states"].sum()
        (full_sum.full_tensor() if hasattr(full_sum, "full_tensor") else full_sum).backward()
    except (autopar.AutoparError, RuntimeError) as problem:
        return str(problem)
    return "went through"


class _Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x.square().mean()


def _dropout():
    """Every micro-batch draws its own part of one mask, the smaller last one, too."""
    torch.manual_seed(0)
    model = _Dropping().double()
    x = torch.randn(14, 16, dtype=torch.float64)
    report = autopar.verify(model, "2", example_args=(x,), pin={"pp": 2, "microbatches": 5}, steps=2)
    return 0.0 if report.equal else str(report)


def _handed_over(m, args):
    """Gradients are taken over, not copied."""
    loss = m(*args)
    call = loss.grad_fn.call
    pointers = {g.data_ptr() for g in call.grads.values() if g is not None}
    loss.backward()
    taken = [p.grad.to_local().data_ptr() in pointers for p in m.parameters()]
    m.zero_grad()
    return f"{sum(taken)} of {len(taken)}"


def _together(m, args):
    """All parameters are updated together where nothing else was chosen. Returns: by choice, were they?"""
    module = importlib.import_module("torch.optim.adam")
    found, real = {}, module._fused_adam
    for choice in (None, False):
        optimizer = torch.optim.AdamW(m.parameters(), foreach=choice)
        m(*args).backward()
        with mock.patch.object(module, "_fused_adam", wraps=real) as together:
            optimizer.step()
        optimizer.zero_grad()
        found[str(choice)] = [together.called, optimizer.param_groups[0]["foreach"]]
    return found


def _grad_scaler():
    """torch's own, with a step in which a gradient of the second stage alone is infinite: all stages leave it out.

    Returns: the largest error of the parameters to those of two plain steps.
    """
    args, _ = inputs("gpt")
    single, m = build("gpt"), autopar.parallelize(build("gpt"), "2", example_args=args, pin=PIN)
    plain, optimizer = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (single, m))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for spoiled in (False, True, False):
        scaler.scale(m(*args)).backward()
        if spoiled and dist.get_rank() == 1:
            next(m.parameters()).grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not spoiled:
            single(*args).backward()
            plain.step()
            plain.zero_grad()
    if scaler.get_scale() != 128.0:
        return f"scale {scaler.get_scale()}"
    found = m.full_state_dict()
    return max(error(found[n], p, 1e-6) for n, p in single.state_dict().items())


def save_and_load(payload):
    """A checkpoint of torch's own kind from a pipeline into another layout. payload: {"path"}."""
    import torch.distributed.checkpoint as dcp

    args, _ = inputs("gpt-tied")
    one = autopar.parallelize(build("gpt-tied"), "2", example_args=args, pin=PIN)
    two = autopar.parallelize(build("gpt-tied"), "2", example_args=args, pin={"dp": 2, "zero": 3})
    with torch.no_grad():
        for p in one.parameters():
            p.add_(1.0)
    wanted = one.full_state_dict()
    dcp.save({"model": one.state_dict()}, checkpoint_id=payload["path"])
    state = {"model": two.state_dict()}
    dcp.load(state, checkpoint_id=payload["path"])
    two.load_state_dict(state["model"])
    found = two.full_state_dict()
    return max(error(found[n], v, 1e-6) for n, v in wanted.items()) if found.keys() == wanted.keys() else "names"
