"""Run on each rank of a pipeline: the bytes that are kept for the backward, counted as they come and go."""

import torch

import autopar
from autopar.models import GPT, GPTConfig
from autopar.schedule.check import check

SIZES = {"vocab": 64, "context": 32, "layers": 4, "heads": 4, "width": 64, "ff_width": 256}
BATCH, SEQ = 16, 32


def run_cases(payload):
    """payload: {"pins": [...]}. Returns: for each pin the bytes of this rank's stages, and micro-batches."""
    return [_case(pin) for pin in payload["pins"]]


def _case(pin):
    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randint(0, SIZES["vocab"], (BATCH, SEQ), generator=generator) for _ in range(2))
    m = autopar.parallelize(GPT(GPTConfig(**SIZES)), autopar.Mesh(str(pin["pp"])), example_args=batch, pin=pin)
    m(*batch).backward()
    m.zero_grad()
    pipeline = next(iter(m._cache.values())).run
    known = [*(p.to_local() if hasattr(p, "to_local") else p for p in m.parameters()), *batch]
    counts = {s: _Counted(known) for s in pipeline.schedule.held(pipeline.rank)}
    for (stage, k), run in pipeline.program.run.items():
        pipeline.program.run[stage, k] = _counting(run, counts[stage])
    m(*batch)
    return {
        "measured": {s: c.most for s, c in counts.items()},
        "left": sum(c.bytes for c in counts.values()),
        "predicted": {s: m.plan.predicted["memory"]["activations"][s] for s in counts},
        "in_flight": pipeline.most_in_flight,
        "promised": check(pipeline.schedule).in_flight[pipeline.rank],
    }


def _counting(run, counted):
    def counting(*values):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, counted), lambda saved: saved.tensor):
            return run(*values)

    return counting


class _Counted:
    """Bytes of the storages that saved tensors hold, each storage once; those of `known` tensors never."""

    def __init__(self, known):
        self.ignored = {t.untyped_storage().data_ptr() for t in known}
        self.holders = {}
        self.bytes = self.most = 0

    def count(self, storage, by):
        place = storage.data_ptr()
        if place in self.ignored:
            return
        before = self.holders.get(place, 0)
        self.holders[place] = before + by
        self.bytes += storage.nbytes() * (bool(before + by) - bool(before))
        self.most = max(self.most, self.bytes)


class _Saved:
    def __init__(self, tensor, counted):
        self.tensor, self.counted = tensor, counted
        counted.count(tensor.untyped_storage(), 1)

    def __del__(self):
        self.counted.count(self.tensor.untyped_storage(), -1)
