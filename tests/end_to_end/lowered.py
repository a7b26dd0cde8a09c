"""Run on each rank: ZeRO level x recomputation x accumulation x precision or offload under backend="aot", against one
device.
"""

import contextlib
import itertools
import time

import torch
from torch.distributed.tensor import DTensor

import autopar
from tests.end_to_end.parity import full
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

STEPS, LEARNING_RATE = 3, 1e-3
FACTORS = {
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "accumulate": (1, 2),
    "precision": ("own", "bf16", "offload"),
}
PRODUCT = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]


def pairwise(product=PRODUCT):
    """Few of the combinations, in which any two values of two factors meet: greedily the one with most new pairs."""

    def pairs(case):
        return set(itertools.combinations(case.items(), 2))

    missing, chosen = set().union(*map(pairs, product)), []
    while missing:
        chosen.append(max(product, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def run_cases(payload):
    """payload: {"mesh": text, "cases": [a dict of a value for each factor, ...]}"""
    references = {}
    return [_case(payload["mesh"], case, references) for case in payload["cases"]]


def _case(mesh, case, references):
    started = time.perf_counter()
    halves = case["accumulate"]
    args, kwargs = inputs("gpt", batch=BATCH // halves)
    bf16 = case["precision"] == "bf16"
    m = autopar.parallelize(
        build("gpt").float() if bf16 else build("gpt"),
        autopar.Mesh(mesh),
        example_args=args,
        example_kwargs=kwargs,
        pin={
            "dp": autopar.Mesh(mesh).size,
            "zero": case["zero"],
            "recompute": case["recompute"],
            "offload": "parameters" if case["precision"] == "offload" else "none",
        },
        backend="aot",
        accumulate=halves,
        precision="bf16" if bf16 else None,
    )
    optimizer = torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE)
    saved = SavedBytes(m)
    found = _train(m, optimizer, halves, saved)
    key = (halves, bf16)
    if key not in references:
        reference = build("gpt").to(torch.bfloat16) if bf16 else build("gpt")
        references[key] = _train(reference, torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE), halves)
    exact_key = (halves, False)
    if exact_key not in references:
        reference = build("gpt")
        references[exact_key] = _train(reference, torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE), halves)
    graphs = next(lowered.run.graphs[0] for lowered in m._cache.values() if lowered.run.graphs)
    return {
        **case,
        "errors": _errors(found, references[exact_key]),
        "rough": _errors(references[key], references[exact_key]),
        "zero of plan": m.plan.zero,
        "bytes": _bytes(m, optimizer, found["held"]),
        "predicted": m.plan.predicted["memory"],
        "saved_bytes": graphs.saved_bytes,
        "saved_in_run": saved.total,
        "seconds": round(time.perf_counter() - started, 1),
    }


class SavedBytes:
    """Bytes that autograd keeps of one forward beside parameters, their gathered copies and the inputs: each memory
    once.
    """

    def __init__(self, module):
        self.module, self.total = module, 0

    def known(self, inputs):
        wholes = [w.value for w in self.module._wholes._held.values() if w.value is not None]
        tensors = [*inputs, *wholes, *(_local(p.detach()) for p in self.module.parameters())]
        return {t.untyped_storage().data_ptr() for t in tensors}

    @contextlib.contextmanager
    def watch(self, inputs):
        kept = {}  # storages themselves, so that no memory is used twice while we look

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        known = self.known(inputs)  # by now: parameters are gathered in the call
        self.total = sum(storage.nbytes() for where, storage in kept.items() if where not in known)


def _train(m, optimizer, halves, saved=None):
    """Gradients of the first step, losses, and parameters after three; each step adds up micro-batches.
    saved: is told what the last forward keeps.
    """
    out = {"losses": []}
    for step in range(STEPS):
        for i in range(halves):
            args, kwargs = inputs("gpt", batch=BATCH // halves, seed=10 * step + i)
            last = saved is not None and step == STEPS - 1
            with saved.watch(args) if last else contextlib.nullcontext():
                loss = loss_of(m(*args, **kwargs))
            (loss / halves).backward()
            out["losses"].append(float(loss.detach()))
        out.setdefault("grads", {n: full(p.grad).double() for n, p in m.named_parameters()})
        out["held"] = sum(_local(p.grad).numel() * _local(p.grad).element_size() for p in m.parameters())
        optimizer.step()
        optimizer.zero_grad()
    out["parameters"] = {n: full(p).double() for n, p in m.named_parameters()}
    return out


def _errors(found, exact):
    """Of losses, gradients, parameters; a gradient that is truly zero counts over the largest one."""
    largest = max(float(g.abs().max()) for g in exact["grads"].values())
    sizes = {n: float(g.abs().max()) for n, g in exact["grads"].items()}
    grads = [
        float((found["grads"][n] - g).abs().max()) / (sizes[n] if sizes[n] > 1e-6 * largest else largest)
        for n, g in exact["grads"].items()
    ]
    moved = [  # one step is the least scale where the gradient is rounding alone
        float((found["parameters"][n] - p).abs().max()) / max(float(p.abs().max()), LEARNING_RATE)
        for n, p in exact["parameters"].items()
        if sizes[n] > 1e-6 * largest
    ]
    losses = [abs(a - b) / abs(b) for a, b in zip(found["losses"], exact["losses"], strict=True)]
    return {"losses": max(losses), "grads": max(grads), "parameters": max(moved)}


def _bytes(m, optimizer, gradients):
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    return {
        "weights": sum(_local(p).numel() * _local(p).element_size() for p in m.parameters()),
        "gradients": gradients,
        "optimizer": sum(_local(t).numel() * _local(t).element_size() for t in states),
    }


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
