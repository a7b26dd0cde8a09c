"""Run on each rank: states in host memory give the very numbers that they give on the device, and leave the device."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.end_to_end.parity import full
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

STEPS, HALVES, LEARNING_RATE = 2, 2, 1e-2
WORDS = ("none", "optimizer", "parameters")
SOME = [
    ["2", {"dp": 2, "zero": 3}, "aot", "bf16"],
    ["2", {"dp": 2, "zero": 2}, "aot", None],
    ["2", {"pp": 2, "microbatches": 2}, "aot", None],
]


class Copies(TorchDispatchMode):
    """Counts copies between host and device, the bytes of gradients among them, and copies that share memory."""

    def __init__(self):
        super().__init__()
        self.fetches = self.puts = self.put_bytes = self.shared = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.autopar.fetch.default, torch.ops.autopar.put.default):
            self.shared += out.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
            back = func is torch.ops.autopar.put.default
            self.fetches, self.puts = self.fetches + (not back), self.puts + back
            self.put_bytes += out.nbytes if back else 0
        return out


def run_cases(payload):
    """payload: {"cases": [[mesh, pin, backend, precision], ...]}. Returns: for each case what each word gives."""
    return [_case(*case) for case in payload["cases"]]


def _case(mesh, pin, backend, precision):
    found = {word: _train(mesh, {**pin, "offload": word}, backend, precision) for word in WORDS}
    kept = found["none"]["tensors"]
    for told in found.values():
        told["differ"] = sum(not torch.equal(a, b) for a, b in zip(told.pop("tensors"), kept, strict=True))
    return found


def _train(mesh, pin, backend, precision):
    args, kwargs = inputs("gpt", batch=BATCH // HALVES)
    model = build("gpt").float() if precision else build("gpt")
    m = autopar.parallelize(
        model, autopar.Mesh(mesh), example_args=args, example_kwargs=kwargs, pin=pin, backend=backend,
        precision=precision,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE)
    tensors, copies, host, device = [], Copies(), 0, 0
    for step in range(STEPS):
        last = step == STEPS - 1  # the first call is lowered, which a mode would be in the way of
        for half in range(HALVES):
            args, kwargs = inputs("gpt", batch=BATCH // HALVES, seed=10 * step + half)
            if last and not half:
                copies.__enter__()
            loss = loss_of(m(*args, **kwargs))
            (loss / HALVES).backward()
            tensors.append(loss.detach())
        if last:
            copies.__exit__(None, None, None)
        host = sum(_local(p.grad).nbytes for p in m.parameters())
        tensors.append(full(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)))
        device = sum(w.value.nbytes for w in m._wholes._held.values() if w.value is not None)
        optimizer.step()
        optimizer.zero_grad()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    host += sum(_local(t).nbytes for t in (*m.parameters(), *states))
    return {
        "tensors": [*tensors, *(full(p) for p in m.parameters())],
        "parameters": len(list(m.parameters())),
        "fetches": copies.fetches,
        "puts": copies.puts,
        "shared": copies.shared,
        "put bytes": copies.put_bytes / HALVES,
        "host bytes": host,
        "device bytes": device,
        "after step": sum(w.value is not None for w in m._wholes._held.values()),
        "predicted": {k: _mine(m, v) for k, v in m.plan.predicted["memory"].items()},
        "step": m.plan.predicted["breakdown_s"]["optimizer"],
    }


def _mine(m, figure):
    """What is predicted for this rank, whose stage in a pipeline has a figure of its own."""
    return figure[m._mesh.line.index] if isinstance(figure, (list, tuple)) else figure


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
