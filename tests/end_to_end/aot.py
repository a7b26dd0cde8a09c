"""Run on each rank: a model under backend="aot" and on one device, and the graphs that ran."""

from collections import Counter

import torch
from torch import nn

import autopar
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

STEPS, LEARNING_RATE = 3, 1e-3


def run_cases(payload):
    """payload: {"cases": [[model, mesh, options of parallelize], ...]}. Returns: a dict for each case."""
    return [_case(*case) for case in payload["cases"]]


def _case(name, mesh, options):
    args, kwargs = _inputs(name)
    common = {"example_args": args, "example_kwargs": kwargs}
    aot = autopar.parallelize(_model(name), autopar.Mesh(mesh), backend="aot", **common, **options)
    if name == "dropout":  # torch's generator can't be had; ours is the same for every plan and backend
        reference = autopar.parallelize(_model(name), autopar.Mesh(mesh), backend="eager", pin={"dp": 1}, **common)
        reference.manual_seed(5)
        aot.manual_seed(5)
    else:
        reference = _model(name)
    more = name in ("gpt", "dropout") and "recompute" in options.get("pin", {})
    ours, theirs = _train(aot, name, more), _train(reference, name, more)
    graphs = next(lowered.run.graphs[0] for lowered in aot._cache.values() if lowered.run.graphs)
    return {
        # one step of Adam is the least scale of a parameter: a bias whose true gradient is zero moves by rounding
        "errors": {
            what: _largest(ours[what], theirs[what], LEARNING_RATE if what == "parameters" else None) for what in theirs
        },
        "saved_bytes": graphs.saved_bytes,
        "forward": _collectives(graphs.forward),
        "backward": _collectives(graphs.backward),
        "zero": aot.plan.zero,
    }


def _collectives(module):
    names = (str(n.target).removesuffix(".default") for n in module.graph.nodes)
    sent = (n.split(".")[1] for n in names if n.startswith("_c10d_functional.") and "wait" not in n)
    return Counter(n.removesuffix("_") for n in sent)


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16))
            for _ in range(3)
        )

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return (x - y).square().mean()


def _model(name):
    if name != "dropout":
        return build(name)
    torch.manual_seed(0)
    return Dropout().double()


def _inputs(name, batch=BATCH, seed=3):
    if name != "dropout":
        return inputs(name, batch=batch, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 6, 16, dtype=torch.float64, generator=generator) for _ in range(2)), {}


def _train(m, name, more):
    """AdamW steps; gradients are the first step's. more: then a call in eval mode, and one with another batch size."""
    optimizer = torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE)
    losses, grads = [], {}
    for step in range(STEPS):
        args, kwargs = _inputs(name, seed=3 + step)
        loss = loss_of(m(*args, **kwargs))
        loss.backward()
        losses.append(loss.detach())
        grads = grads or {n: _full(p.grad) for n, p in m.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    out = {"losses": dict(enumerate(losses)), "grads": grads}
    out["parameters"] = {n: _full(p) for n, p in m.named_parameters()}
    if not more:
        return out
    args, kwargs = _inputs(name, batch=BATCH // 2)
    loss = loss_of(m(*args, **kwargs))
    loss.backward()
    out["other batch"] = {"loss": loss.detach(), **{n: _full(p.grad) for n, p in m.named_parameters()}}
    m.eval()
    with torch.no_grad():
        out["eval"] = {"loss": loss_of(m(*args, **kwargs))}
    return out


def _full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _largest(found, expected, least=None):
    """The largest error of a tensor, over the larger of its reference's magnitude and `least` (1e-6 of the largest)."""
    if set(found) != set(expected):
        return float("inf")
    least = least or 1e-6 * max(t.abs().max().item() for t in expected.values())
    errors = [(found[k] - t).abs().max().item() / max(t.abs().max().item(), least) for k, t in expected.items()]
    return max(e if e == e else float("inf") for e in errors)
