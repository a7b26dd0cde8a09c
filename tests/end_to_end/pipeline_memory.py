"""Run on each rank of a pipeline: the bytes kept for the backward, counted as they come and go, and of gradients held
between the call and `backward()`.
"""

import contextlib
from unittest import mock

import torch

import autopar
from autopar.models import GPT, GPTConfig
from autopar.runtime.pipeline_step import Step
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
    with _deferred(counts):
        loss = m(*batch)
    memory, depth = m.plan.predicted["memory"], pipeline.schedule.depth  # replicas have the same stages
    states = sum(memory["parameters_gradients_optimizer"][s % depth] for s in counts)
    return {
        "measured": {s: c.most for s, c in counts.items()},
        "left": sum(c.bytes for c in counts.values()),
        "predicted": {s: memory["activations"][s % depth] for s in counts},
        "gradients": _bytes(loss.grad_fn.call.grads.values()),
        "predicted_gradients": states / 4,  # float32: weights, gradients, two moments
        "in_flight": pipeline.most_in_flight,
        "promised": check(pipeline.schedule).in_flight[pipeline.rank],
    }


@contextlib.contextmanager
def _deferred(counts):
    """Counts what weight gradients that are computed later hold until then, too."""
    first, second = Step.input_gradient, Step.weight_gradient

    def count(step, stage, k, by):
        for later in step.held[stage, k].later:
            for tensor in later.held:
                if isinstance(tensor, torch.Tensor):
                    counts[stage].count(tensor.untyped_storage(), by)

    def input_gradient(step, stage, k):
        first(step, stage, k)
        count(step, stage, k, 1)

    def weight_gradient(step, stage, k):
        count(step, stage, k, -1)
        second(step, stage, k)

    with (
        mock.patch.object(Step, "input_gradient", input_gradient),
        mock.patch.object(Step, "weight_gradient", weight_gradient),
    ):
        yield


def _counting(run, counted):
    def counting(*values):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, counted), lambda saved: saved.tensor):
            return run(*values)

    counting.splits = getattr(run, "splits", False)
    return counting


def _bytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


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
