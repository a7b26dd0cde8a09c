"""`verify`: the same model on one device and on the mesh, trained for some steps and compared.

Enters: what `parallelize` takes, a dtype and a number of steps. Leaves: a `Report`, equal on every rank.
Refused: a model without values (on meta), an unknown dtype.

Both runs take copies of the model in that dtype, the same global batch and AdamW. Gradients are the first step's.
A model that draws random numbers can't equal PyTorch's own generator on any plan: it is compared with autopar on a mesh
of one device, whose generator does not depend on the plan.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autopar.api import parallelize
from autopar.capture import example_of
from autopar.compare import Difference, Report, bounds_of, differences, max_errors, worst_of, zero_gradients
from autopar.errors import AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.precision import deep_copy, parse_precision
from autopar.program import OutputRef, Program, record
from autopar.request import topology_of
from autopar.runtime.module import ParallelModule
from autopar.runtime.process_mesh import connect_world, ensure_process_group
from autopar.schedule.build import KINDS
from autopar.trial import LOSS_FIELD, Inputs, Loss, Trained, cast, leaves, train

DTYPES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def verify(
    model: nn.Module,
    mesh: Any,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    pin: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    precision: Any = None,
    optimizer: str | int = "adamw",
    accumulate: int = 1,
    outputs: str = "auto",
    batch_dims: Mapping[str, int] | None = None,
    backend: str = "auto",
    kernels: str = "auto",
    strict: bool = False,
    discover: bool = False,
    dump_dir: str | None = None,
    loss: Loss | None = None,
    dtype: str | torch.dtype = "float64",
    steps: int = 1,
) -> Report:
    """Run a model on one device and on the mesh and compare; called on every rank, like `parallelize`.

    Args:
        loss: computes the loss of the model's output. Default: the output's field `loss`, else its only differentiable
            scalar, else the sum of squares of its floating-point tensors with fixed weights.
        dtype: "float64", "float32", "bfloat16" (or "bf16") or "float16": that of both runs; bounds depend on it.
        precision: as in `parallelize`; what it computes in takes the place of `dtype`.
        steps: AdamW steps before parameters and buffers are compared; 0 compares the forward and backward pass alone.
        others: as in `parallelize`. A mesh of one device needs no process group.
    Returns: a `Report`. "Equal" is an error of at most, in float64, 1e-9, where the loss is computed in float32 1e-6
        (parameters 1e-4); in float32 1e-5 on loss, outputs, gradients and buffers; in bfloat16, against the float64
        result, 1.5 x that of one device. The error of a tensor is its largest difference over max(its reference's
        largest magnitude, 1e-6 x the model's largest gradient); below float64 a gradient whose true value is below
        that is measured against the largest one.
    Raises:  as `parallelize`.
    """
    wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if wanted not in DTYPES.values():
        raise PlanError(f"verify dtype={dtype!r}: must be one of float64, float32, bfloat16, float16")
    asked = parse_precision(precision)
    if asked is not None and asked.compute is not None:
        wanted = asked.compute
    assert wanted is not None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise PlanError(f"verify steps={steps!r}: must be an integer of at least 0")
    values = [*model.parameters(), *model.buffers()]
    if any(value.is_meta for value in values):
        raise AutoparError("verify: the model's parameters are on meta and have no values; build it on a real device")
    topology, _ = topology_of(mesh)
    ensure_process_group(topology.size)
    device = connect_world(topology.size)
    args, kwargs = example_of(model, example_args, example_kwargs)
    base = cast(deep_copy(model), wanted).to(device)
    if topology.size > 1:
        for value in [*base.parameters(), *base.buffers()]:
            dist.broadcast(value.detach(), 0)  # rank 0's weights win, as in parallelize
    inputs = Inputs(args, kwargs, device)
    common: dict[str, Any] = {
        "pin": pin, "memory": memory, "optimizer": optimizer, "accumulate": accumulate,
        "batch_dims": batch_dims, "backend": backend, "kernels": kernels, "strict": strict, "discover": discover,
    }  # fmt: skip

    def parallel(where: Any, dt: torch.dtype, **more: Any) -> ParallelModule:
        a, k = inputs.in_dtype(dt)
        built = cast(deep_copy(base), dt)
        return parallelize(built, where, example_args=a, example_kwargs=k, **{**common, **more})

    def run(module: nn.Module, dt: torch.dtype) -> Trained:
        return train(module, inputs, dt, loss, steps)

    exact = torch.float64 if wanted in (torch.bfloat16, torch.float16) else wanted
    expected = run(cast(deep_copy(base), exact), exact)
    reference = "PyTorch on one device"
    alone = None
    if expected.random:
        # Seed 0 on both: the seed that parallelize takes by itself may differ between ranks.
        reference = "autopar on a mesh of one device, because the model draws random numbers"
        alone = Mesh("1", device=topology.device)
        expected = run(_seeded(parallel(alone, exact, pin=None, outputs="gather")), exact)
    m = _seeded(parallel(mesh, wanted, plan=plan, outputs=outputs, precision=precision, dump_dir=dump_dir))
    if KINDS[m.plan.schedule].asynchronous:
        raise PlanError(
            f"verify: schedule {m.plan.schedule} applies stale gradients and does not equal one device; pin another"
        )
    got = run(m, wanted)
    truth = expected
    if wanted == torch.float32:
        true = _seeded(parallel(alone, torch.float64, pin=None, outputs="gather")) if alone else deep_copy(base)
        truth = train(cast(true, torch.float64), inputs, torch.float64, loss, 0)
    zeros = frozenset() if wanted == torch.float64 else zero_gradients(truth.tensors)
    single = None
    if exact != wanted:
        rough = _seeded(parallel(alone, wanted, pin=None, outputs="gather")) if alone else deep_copy(base)
        single = max_errors(differences(run(rough, wanted).tensors, expected.tensors, zeros))
    found = differences(got.tensors, expected.tensors, zeros)
    if topology.size > 1:
        found = _over_ranks(found)
    bounds = bounds_of(wanted, expected.narrow, single)
    errors = max_errors(found)
    judged = [(errors[c], bound) for c, bound in bounds.items() if bound is not None]
    worst = worst_of(found, bounds) or Difference("", "", 0.0)
    return Report(
        equal=all(error <= bound for error, bound in judged),
        world_size=topology.size,
        dtype=str(wanted).removeprefix("torch."),
        loss=None if expected.loss is None or got.loss is None else (expected.loss, got.loss),
        max_error=errors,
        bounds=bounds,
        worst=worst.name,
        worst_category=worst.category,
        worst_op=_op_of(m, worst),
        worst_index=worst.index,
        worst_values=(worst.reference, worst.parallel),
        reference=reference,
        plan={
            **m.plan.degrees,
            "zero": m.plan.zero,
            "schedule": m.plan.schedule,
            "microbatches": m.plan.microbatches,
        },
    )


def _seeded(m: ParallelModule) -> ParallelModule:
    m.manual_seed(0)
    return m


def _over_ranks(mine: list[Difference]) -> list[Difference]:
    """The worst over all ranks of each tensor, so that every rank reports the same."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [dataclasses.astuple(d) for d in mine])
    worst: dict[tuple[str, str], Difference] = {}
    for other in (Difference(*d) for each in everyone for d in each):
        held = worst.get((other.category, other.name))
        if held is None or other.error > held.error:
            worst[other.category, other.name] = other
    return list(worst.values())


def _op_of(m: ParallelModule, worst: Difference) -> str:
    """`name (file:line)` of the op that made an output, or that read a parameter."""
    programs = m.programs()
    if not worst.name or not programs:
        return ""
    program = programs[0]
    made = _readers(program, worst.name) or _makers(program, worst.name)
    return ", ".join(dict.fromkeys(made)) or "unknown op"


def _readers(program: Program, name: str) -> list[str]:
    """Ops that read the parameter, buffer or input of this name; moves between layouts are looked through."""
    nodes = {s.node for s in program.sources if s.path == program.ties.get(name, name)}
    found, waiting = [], [n for n in program.placeholders if n.name in nodes]
    while waiting:
        for user in waiting.pop().users:
            if user.op != "call_function":
                continue
            if record(user).note and user.args and not record(user).where:
                waiting.append(user)
            else:
                found.append(_named(user))
    return found


def _makers(program: Program, name: str) -> list[str]:
    results = pytree.tree_leaves(program.output.args[0])
    tree = pytree.tree_unflatten(list(program.out_values), program.out_spec)
    outputs = [(path, leaf.index) for path, leaf in leaves(tree, None) if isinstance(leaf, OutputRef)]
    wanted = [i for path, i in outputs if path == name] or [
        i for path, i in outputs if name == "loss" and len(outputs) == 1
    ]
    wanted += [i for path, i in outputs if name == "loss" and path.endswith(LOSS_FIELD)]
    wanted += [i for i, sink in enumerate(program.sinks) if sink.kind == "state" and sink.path == name]
    return [_named(results[i]) for i in wanted if isinstance(results[i], torch.fx.Node)]


def _named(node: torch.fx.Node) -> str:
    known = record(node)
    return f"{known.op} ({known.where})" if known.where else known.op
