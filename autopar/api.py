"""The public functions: `parallelize`, `plan`, `verify`, `with_loss`. Arguments are those of every one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.assemble import build_module
from autopar.capture import example_of
from autopar.errors import PlanError
from autopar.pipeline import Prepared, carry_out, choose, dump_plan, prepare
from autopar.plan import Plan
from autopar.precision import check_device, masters, skeleton
from autopar.request import Request, make_request, topology_of
from autopar.runtime.check import agree, digest, share, together
from autopar.runtime.module import ParallelModule
from autopar.runtime.process_mesh import connect_world, ensure_process_group
from autopar.runtime.tree import as_normal


@torch.inference_mode(False)  # a loop may plan inside either: what is made here is to be trained
@torch.enable_grad()
def plan(
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
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Plan a model on a mesh; needs no process group, no GPU and no real weights.

    Args:
        mesh: a `Mesh`, a torch `DeviceMesh`, or a list of meshes (one capture, a list of plans).
        example_args, example_kwargs: one global batch; see `parallelize` for the other arguments.
        progress: told the name of each stage as it begins.
    Returns: a `Plan`; for a list of meshes a list of plans.
    Raises:  CaptureError, UnsupportedOpError, MeshError, PlanError, InfeasibleError; TypeError without an example.
    """
    tell = progress or (lambda stage: None)
    if isinstance(mesh, (list, tuple)):
        requests = [
            make_request(
                m, pin, memory, precision, optimizer, outputs, batch_dims, backend, strict, discover, dump_dir, kernels
            )
            for m in mesh
        ]
        if not requests:
            return []
        prepared = _prepare(model, example_args, example_kwargs, requests[0], tell)
        return [_plan_of(prepared, r, plan, tell) for r in requests]
    request = make_request(
        mesh, pin, memory, precision, optimizer, outputs, batch_dims, backend, strict, discover, dump_dir, kernels
    )
    prepared = _prepare(model, example_args, example_kwargs, request, tell)
    chosen = _plan_of(prepared, request, plan, tell)
    if dump_dir is not None and request.dump is not None:
        dump_plan(prepared, chosen, request.profile, request.settings, request.dump)
    return chosen


@torch.inference_mode(False)  # a loop may plan inside either: what is made here is to be trained
@torch.enable_grad()
def parallelize(
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
) -> ParallelModule:
    """Turn a single-device model into a distributed one that trains with the same loop and the same numbers.

    Args:
        model: any module that `torch.export` takes; its parameters may be on meta.
        mesh: `autopar.Mesh("2x8", device="h100-sxm")`, or a torch `DeviceMesh` whose dims named pp, dp, tp, cp, ep pin
            those degrees.
        example_args, example_kwargs: one **global** batch. May be left out when `model.example_inputs()` or a
            transformers config says how to make one.
        plan: a `Plan` or the path of one; nothing is solved then.
        pin: decisions taken by the user: degrees (`pp`, `dp`, `tp`), `zero` (0 to 3), `sp`, `schedule`,
            `microbatches`, `virtual_stages`, `stages` (how many blocks each has, or their names), `offload`
            ("optimizer": master shards and optimizer states in host memory, "parameters": nothing stays on the
            device; `m.parameters()` are host tensors then, and an optimizer updates them there), and parameter
            patterns with layouts, e.g. `{"*.up_proj.weight": {"tp": "S(0)"}}`. The schedules "async-1f1b" and "2bw"
            apply stale gradients and give the loss some calls late: see `autopar.runtime.pipeline_asynchronous`.
        memory: bytes usable per device (`"70GiB"` or an int); default: the device's, less a reserve.
        optimizer: what the memory model must hold: "adamw", "sgd", "none", or bytes a parameter.
        precision: "fp32", "bf16", "fp16" (compute in it, fp32 master weights and reduction) or a
            `torch.distributed.fsdp.MixedPrecisionPolicy`.
        outputs: "auto": a model that returns a loss gives its scalars as plain tensors and its other tensors as
            DTensors, a model without one plain global
            tensors; "gather": all plain and global; "shard": all DTensors.
        accumulate: micro-batches that the training loop adds up in a step; at ZeRO level 1 gradients are reduced in
            every such backward; until then `.grad` is a part (`Partial`).
        batch_dims: `{input path: dim}` for inputs whose batch is not dim 0 of the first tensor input.
        strict: an op without a rule is an error instead of being kept whole.
        discover: try to find the rule of such an op by running it on small shards; the plan's notes say what was found.
        backend: "aot" (forward and backward as explicit graphs, our passes and kernels), "inductor" (the same graphs
            compiled by Inductor), "eager" (the rewritten program under autograd, op by op); "auto" is "aot".
        kernels: "auto": generated kernels on GPUs; "on": elsewhere, too, in Triton's interpreter, which is slow; "off".
        dump_dir: a folder for every stage's program.
    Returns: a `ParallelModule`; make the optimizer from its parameters.
    Raises:  CaptureError, UnsupportedOpError, MeshError, PlanError, InfeasibleError, RuntimeMismatchError, on every
        rank; TypeError without an example.
    """
    topology, _ = topology_of(mesh)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise PlanError(f"accumulate={accumulate!r}: must be an integer of at least 1")
    ensure_process_group(topology.size)
    world = connect_world(topology.size)

    def begin() -> tuple[Request, Prepared]:
        request = make_request(
            mesh, pin, memory, precision, optimizer, outputs, batch_dims, backend, strict, discover, dump_dir, kernels
        )
        check_device(request.precision, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if request.backend == "eager":
            if request.settings.pins.recompute not in (None, "none"):
                raise PlanError(
                    f"pin recompute={request.settings.pins.recompute!r}: only backend='aot' recomputes; pass it"
                )
            request = replace(request, recompute=("none",))
        return request, _prepare(model, example_args, example_kwargs, request, lambda stage: None)

    if topology.size == 1:
        request, prepared = begin()
        chosen = _plan_of(prepared, request, plan, lambda stage: None)
        return build_module(model, prepared, request, chosen, accumulate)
    request, prepared = together(begin, world)
    agree(_views(prepared), world)
    data = share(lambda: _plan_of(prepared, request, plan, lambda stage: None).to_dict(), world)
    return build_module(model, prepared, request, Plan.from_dict(data), accumulate)


def _views(prepared: Prepared) -> dict[str, int]:
    """What must be equal on all ranks before they plan."""
    program, parts = prepared.program, prepared.analysis.parts
    inputs = [(parts[s.node].shape, prepared.analysis.dtypes[s.node]) for s in program.sources if s.kind == "input"]
    return {
        "version of torch": digest(torch.__version__),
        "model (names and shapes)": digest(
            repr(sorted((s.path, s.kind, parts[s.node].shape) for s in program.sources if s.kind != "input"))
        ),
        "example inputs (shapes and dtypes)": digest(repr(inputs)),
    }


def with_loss(model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> nn.Module:
    """A module whose forward is `loss_fn(model(*args, **kwargs))`, or `loss_fn(output, target)` when called with
    `target=`.
    """
    return _WithLoss(model, loss_fn)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        output = self.model(*args, **kwargs)
        return self.loss_fn(output) if target is None else self.loss_fn(output, target)


# steps


def _prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    request: Request,
    tell: Callable[[str], None],
) -> Prepared:
    args, made = as_normal(example_of(model, args, kwargs))
    precision = request.precision
    if precision is not None:
        args, made = precision.inputs((args, made))
    prepared = prepare(
        model if precision is None else skeleton(model, precision),
        args,
        made,
        name=type(model).__name__,
        outputs=request.outputs,
        strict=request.strict,
        discover=request.discover,
        dump=request.dump,
        progress=tell,
    )
    if precision is not None:
        prepared.program.state.update(masters(model, prepared.program.state, precision))
    return prepared


def _plan_of(
    prepared: Prepared, request: Request, given: Plan | str | os.PathLike[str] | None, tell: Callable[[str], None]
) -> Plan:
    if given is None:
        return choose(
            prepared,
            request.topology,
            request.profile,
            request.settings,
            recompute=request.recompute,
            outputs=request.outputs,
            dump=request.dump,
            progress=tell,
        )
    found = given if isinstance(given, Plan) else Plan.load(given)
    if tuple(found.mesh["shape"]) != request.topology.shape:
        raise PlanError(
            f"the plan is for a mesh {'x'.join(map(str, found.mesh['shape']))}, not {request.topology}; plan for "
            "this mesh, or pass that one"
        )
    carry_out(prepared, found, request.profile, request.settings)
    return found
