"""Run on each rank: train through an asynchronous pipeline, and write out the same staleness on one device.

The written-out run keeps every version of the weights. A mini-batch's micro-batches run with the version that its call
finds; each gradient waits as many updates as the schedule says for its stage, and is applied then.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import autopar
from tests.end_to_end.parity import _error as error
from tests.end_to_end.parity import full

STEPS, WIDTH, BATCH = 6, 8, 8
SCALES = (1.0, 0.5, 0.5, 2.0, 2.0, 1.0)
"""The user's loop scales the loss, differently over time."""


class Chain(nn.Module):
    """Layers one after another; the first and the last may share their weight, the last may read the first's output."""

    def __init__(self, depth=4, tied=False, skip=False, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.skip, self.dropout = skip, dropout
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x, target):
        first = None
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), self.dropout, self.training)
            first = x if first is None else first
        return (x + first if self.skip else x).sub(target).square().mean()


def build(**options):
    torch.manual_seed(0)
    return Chain(**options).double()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def run_cases(payload):
    """payload: {"cases": [[mesh, options of the model, pin, backend], ...]}. Returns: a dict for each case."""
    return [_case(*case) for case in payload["cases"]]


def _case(mesh, model, pin, backend):
    m = autopar.parallelize(build(**model), mesh, example_args=batch_of(0), pin=pin, backend=backend)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5)
    losses, handed, evaluated = [], [], None
    for step, scale in enumerate(SCALES):
        loss = m(*batch_of(step))
        (loss * scale).backward()
        losses.append(loss.item())
        handed.append({n: p.grad is not None for n, p in m.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            m.eval()
            evaluated = m(*batch_of(100)).item()
            m.train()
    found = m.full_state_dict()
    owners = {n: m._owners[m._state_names.get(n, n)] for n in found}
    stage_of = {n: owners[n][-1 if n in m._state_names else 0] for n in found}  # of a tie, the first layer or the last
    wanted = simulate(build(**model), pin["pp"], pin["microbatches"], pin["schedule"], stage_of)
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted["losses"], strict=True)),
        "params": max(error(full(found[n]), p, 1e-6) for n, p in wanted["params"].items()),
        "eval": abs(evaluated - wanted["eval"]) / wanted["eval"],
        "handed": all(
            got == (n in wanted["handed"][step]) for step, grads in enumerate(handed) for n, got in grads.items()
        ),
        "staleness": list(m.plan.predicted.get("staleness", ())),
        "in_flight": next(iter(m._cache.values())).run.most_in_flight,
        "moved": max(error(p, build(**model).state_dict()[n], 1e-6) for n, p in wanted["params"].items()),
    }


def uses(payload):
    """On two ranks: what is refused, and whether a rank can be a call ahead."""
    pin = {"pp": 2, "microbatches": 1, "schedule": "async-1f1b"}
    m = autopar.parallelize(build(), "2", example_args=batch_of(0), pin=pin, backend="eager")
    first = m(*batch_of(0))
    first.backward()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["ahead"], timedelta(seconds=60))  # the first stage is through its call before the last begins it
    m(*batch_of(1)).backward()
    store.set("ahead", "yes")
    smaller = tuple(t[:4] for t in batch_of(2))

    def refused(call):
        try:
            call()
        except autopar.AutoparError as error:
            return f"{type(error).__name__}: {error}"
        return "went through"

    arguments = {"example_args": batch_of(0), "pin": pin}
    return {
        "smaller batch": refused(lambda: m(*smaller)),
        "loss outside": refused(lambda: autopar.parallelize(build(), "2", outputs="gather", **arguments)),
        "verify": refused(lambda: autopar.verify(build(), "2", **arguments)),
        "table": str(m.plan),
        "masks": _masks(),
    }


def _masks():
    """With dropout and recomputation, and weights that stay: gradients are those of the synchronous pipeline, later."""
    runs = {}
    for schedule in ("1f1b", "async-1f1b"):
        pin = {"pp": 2, "microbatches": 1, "schedule": schedule, "recompute": "full"}
        m = autopar.parallelize(build(dropout=0.4), "2", example_args=batch_of(0), pin=pin)
        m.manual_seed(5)
        runs[schedule] = []
        for step in range(4):
            m(*batch_of(step)).backward()
            runs[schedule].append({n: full(p.grad).clone() for n, p in m.named_parameters() if p.grad is not None})
            m.zero_grad()
    later = 1 - dist.get_rank()
    pairs = zip(runs["1f1b"], runs["async-1f1b"][later:], strict=False)
    errors = [error(stale[n], g, 1e-6) for now, stale in pairs for n, g in now.items()]
    return max(errors) if len(errors) >= 3 * 2 else "too few gradients"


def behind(schedule, stages, microbatches, stage, microbatch):
    """Updates between the weights of a micro-batch and those that its gradient is applied to, as the papers say."""
    if schedule == "2bw":
        return 1
    return (microbatch + stages - 1 - stage) // microbatches


def simulate(model, stages, microbatches, schedule, stage_of):
    """The written-out run. Returns: losses as a call gives them, parameters, the names with a gradient in each step."""
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    parameters = dict(model.named_parameters())
    owner = {n: next(k for k, p in parameters.items() if p is model.get_parameter(n)) for n in names}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.2, momentum=0.5)
    waiting, losses, handed, evaluated = {}, [], [], None
    for step, scale in enumerate(SCALES):
        version = {n: model.get_parameter(n).detach().clone() for n in names}
        x, target = batch_of(step)
        total = 0.0
        for j, rows in enumerate(torch.arange(len(x)).tensor_split(microbatches)):
            leaves = {n: v.clone().requires_grad_() for n, v in version.items()}  # a tie's two ends apart
            loss = functional_call(model, leaves, (x[rows], target[rows]), tie_weights=False) * len(rows) / len(x)
            total += loss.item()
            loss.backward()
            for n in names:
                update = step + behind(schedule, stages, microbatches, stage_of[n], j)
                waiting.setdefault((update, owner[n]), []).append(leaves[n].grad)
        losses.append(total)
        for n, parameter in parameters.items():
            due = waiting.pop((step, n), None)
            parameter.grad = None if due is None else scale * sum(due)
        handed.append({n for n, p in parameters.items() if p.grad is not None})
        optimizer.step()
        if step == 3:
            with torch.no_grad():
                evaluated = model.eval()(*batch_of(100)).item()
            model.train()
    delay = max(behind(schedule, stages, microbatches, 0, j) for j in range(microbatches))
    given = [losses[max(0, step - delay)] for step in range(len(losses))]
    params = {n: model.get_parameter(n).detach() for n in names}
    return {"losses": given, "params": params, "handed": handed, "eval": evaluated}
