"""Run on each rank: an architecture on one device and as planned, compared as `verify` does, and the work divided."""

import copy
import functools
import re
import time
from statistics import fmean

import torch
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.compare import CATEGORIES, bounds_of, differences, max_errors, worst_of
from autopar.trial import Inputs, cast, train
from tests.end_to_end.architectures import ARCHITECTURES, build, inputs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
BATCHES = {torch.bfloat16: 4}
"""An error in bfloat16 is the mean over so many: the largest one of a single batch is a matter of luck, on one device
and on the mesh. Others see one batch, and a step of AdamW."""

FAINT = 1e-2
"""Gradients below this share of the model's largest are rounding errors in bfloat16 and not compared in it: the bias of
attention's keys or before a batch norm, whose true gradient is 0, would have an error above all others."""


def run_cases(payload):
    """payload: {"cases": [[name, mode, dtype, mesh, options of parallelize], ...]}. Returns: a dict for each case."""
    return [_case(*case) for case in payload["cases"]]


def _case(name, mode, dtype, mesh, options):
    started_s = time.perf_counter()
    training, dtype = mode == "train", DTYPES[dtype]
    expected, bounds, reference_flop = _reference(name, training, dtype)
    try:
        m = _parallel(name, build(name, dtype, training), dtype, mesh, options)
    except autopar.AutoparError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    trained, flop = _run(m, name, dtype)
    found = _differences(trained, expected, dtype)
    worst = worst_of([difference for each in found for difference in each], bounds)
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in m.parameters()]
    return {
        "errors": _mean(found),
        "bounds": bounds,
        "compared": {category: len(expected[0].tensors[category]) for category in CATEGORIES},
        "worst": None if worst is None else [worst.category, worst.name, worst.error],
        "loss": [expected[0].loss, trained[0].loss],
        "degrees": dict(m.plan.degrees),
        "work": flop / reference_flop,
        "share": sum(s.numel() for s in shards) / sum(p.numel() for p in m.parameters()),
        "no_rule": [note.partition(": ")[2] for note in m.plan.notes if note.startswith("kept whole, no rule")],
        "whole": _whole(m.plan),
        "seconds": time.perf_counter() - started_s,
    }


def _parallel(name, model, dtype, mesh, options):
    """The parallel module, with seed 0 for what it draws.

    options: of `parallelize`; "memory" below 1 is a share of what the best plan without that limit takes.
    """
    args, kwargs = inputs(name, dtype)
    mesh = autopar.Mesh(mesh)
    given = {**options, "batch_dims": ARCHITECTURES[name].batch_dims, "example_args": args, "example_kwargs": kwargs}
    if given.get("memory", 1) < 1:
        free = autopar.plan(model, mesh, **{**given, "memory": None})
        given["memory"] = int(given["memory"] * free.predicted["peak_memory_bytes"][0])
    m = autopar.parallelize(model, mesh, **given)
    m.manual_seed(0)
    return m


@functools.cache
def _reference(name, training, dtype):
    """(one device in float64, for bfloat16 on weights rounded to it; bounds; operations of one device)."""
    exact = torch.float64 if dtype == torch.bfloat16 else dtype
    alone = functools.partial(_alone, name, build(name, dtype, training), count=BATCHES.get(dtype, 1))
    expected, flop = alone(exact)
    single = None
    if dtype == torch.bfloat16:
        rough, _ = alone(dtype)
        single = _mean(_differences(rough, expected, dtype))
    return expected, bounds_of(dtype, expected[0].narrow, single), flop


def _alone(name, base, dtype, count):
    found = _run(cast(copy.deepcopy(base), dtype), name, dtype, count)
    if not found[0][0].random:
        return found
    # Autopar draws other numbers than torch, but the same ones on one device as on many.
    m = _parallel(name, cast(copy.deepcopy(base), dtype), dtype, "1", {"outputs": "gather"})
    return _run(m, name, dtype, count)


def _run(module, name, dtype, count=None):
    """(what each batch gave, the operations of all)."""
    count, found = count or BATCHES.get(dtype, 1), []
    with FlopCounterMode(display=False) as counter:
        for seed in range(count):
            args, kwargs = inputs(name, dtype, seed)
            found.append(train(module, Inputs(args, kwargs, torch.device("cpu")), dtype, None, int(count == 1)))
    return found, counter.get_total_flops()


def _differences(found, expected, dtype):
    """Of each batch."""
    out = []
    for mine, theirs in zip(found, expected, strict=True):
        every = differences(mine.tensors, theirs.tensors)
        if dtype == torch.bfloat16:
            sizes = {name: float(g.abs().max()) for name, g in theirs.tensors["grads"].items()}
            faint = {name for name, size in sizes.items() if size < FAINT * max(sizes.values())}
            every = [d for d in every if d.category != "grads" or d.name not in faint]
        out.append(every)
    return out


def _mean(found):
    errors = [max_errors(each) for each in found]
    return {category: fmean(e[category] for e in errors) for category in CATEGORIES}


def _whole(plan):
    """Classes of ops with operands that no axis cuts, with their number."""
    found = {}
    for entry in plan.ops.values():
        if entry["inputs"] and all(s in "IR" for s in entry["strategy"]):
            kind = re.sub(r"\..*", "", entry["class"])
            found[kind] = found.get(kind, 0) + 1
    return found
