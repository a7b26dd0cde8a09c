"""The public functions: `parallelize`, `plan`, `verify`, `with_loss`. Arguments are those of every one of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import example_of
from autopar.cost.hardware import Profile, load_profile
from autopar.cost.memory import usable_bytes
from autopar.dump import Dump
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.pins import Pins, parse_pins
from autopar.pipeline import RECOMPUTE, Prepared, carry_out, choose, lower, prepare
from autopar.plan import Plan
from autopar.runtime.check import agree, digest, share, together
from autopar.runtime.module import Lowered, ParallelModule
from autopar.runtime.parameters import OLD_PARAMETERS, shard_parameter
from autopar.runtime.process_mesh import ProcessMesh, check_world, connect
from autopar.solver.build import Settings
from autopar.solver.decide import degrees
from autopar.solver.report import mesh_of

BACKENDS = ("auto", "eager", "aot", "inductor")


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `parallelize` and `plan`, checked."""

    topology: Mesh
    profile: Profile
    settings: Settings
    outputs: str
    strict: bool
    discover: bool
    dump_dir: str | None
    recompute: tuple[str, ...] = RECOMPUTE
    """Levels of recomputation that may be chosen: `parallelize` can run "none" only."""


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
            _request(m, pin, memory, precision, optimizer, outputs, batch_dims, backend, strict, discover, dump_dir)
            for m in mesh
        ]
        if not requests:
            return []
        prepared = _prepare(model, example_args, example_kwargs, requests[0], tell)
        return [_plan_of(prepared, r, plan, tell) for r in requests]
    request = _request(
        mesh, pin, memory, precision, optimizer, outputs, batch_dims, backend, strict, discover, dump_dir
    )
    return _plan_of(_prepare(model, example_args, example_kwargs, request, tell), request, plan, tell)


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
        mesh: `autopar.Mesh("2x8", device="h100-sxm")`, or a torch `DeviceMesh` whose dims named pp, dp, tp, cp, ep pin those degrees.
        example_args, example_kwargs: one **global** batch. May be left out when `model.example_inputs()` or a transformers config says how to make one.
        plan: a `Plan` or the path of one; nothing is solved then.
        pin: decisions taken by the user: degrees (`dp`, `tp`), `zero` (0 or 3), `sp`, and parameter patterns with layouts, e.g. `{"*.up_proj.weight": {"tp": "S(0)"}}`.
        memory: bytes usable per device (`"70GiB"` or an int); default: the device's, less a reserve.
        optimizer: what the memory model must hold: "adamw", "sgd", "none", or bytes a parameter.
        outputs: "auto": a model that returns a loss gives its scalars as plain tensors and its other tensors as DTensors, a model without one plain global
            tensors; "gather": all plain and global; "shard": all DTensors.
        batch_dims: `{input path: dim}` for inputs whose batch is not dim 0 of the first tensor input.
        strict: an op without a rule is an error instead of being kept whole.
        discover: try to find the rule of such an op by running it on small shards; the plan's notes say what was found.
        dump_dir: a folder for every stage's program.
    Returns: a `ParallelModule`; make the optimizer from its parameters.
    Raises:  CaptureError, UnsupportedOpError, MeshError, PlanError, InfeasibleError, RuntimeMismatchError, on every rank; TypeError without an example.
    """
    topology, _ = topology_of(mesh)
    ensure_process_group(topology)
    world = connect_world(topology)

    def begin() -> tuple[Request, Prepared]:
        request = _request(
            mesh, pin, memory, precision, optimizer, outputs, batch_dims, backend, strict, discover, dump_dir
        )
        if request.settings.precision not in (None, "fp32"):
            raise PlanError(
                f"precision={precision!r}: this version plans in mixed precision but runs in the model's own; cast the model, e.g. model.bfloat16()"
            )
        return request, _prepare(model, example_args, example_kwargs, request, lambda stage: None)

    if topology.size == 1:
        request, prepared = begin()
        return _build_module(model, prepared, request, _plan_of(prepared, request, plan, lambda stage: None))
    request, prepared = together(begin, world)
    agree(_views(prepared), world)
    data = share(lambda: _plan_of(prepared, request, plan, lambda stage: None).to_dict(), world)
    return _build_module(model, prepared, request, Plan.from_dict(data))


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
    """A module whose forward is `loss_fn(model(*args, **kwargs))`, or `loss_fn(output, target)` when called with `target=`."""
    return _WithLoss(model, loss_fn)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        output = self.model(*args, **kwargs)
        return self.loss_fn(output) if target is None else self.loss_fn(output, target)


# steps


def _request(
    mesh: Any,
    pin: Mapping[str, Any] | None,
    memory: Any,
    precision: Any,
    optimizer: str | int,
    outputs: str,
    batch_dims: Mapping[str, int] | None,
    backend: str,
    strict: bool,
    discover: bool,
    dump_dir: str | None,
) -> Request:
    if backend not in BACKENDS:
        raise PlanError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    if backend in ("aot", "inductor"):
        raise PlanError(
            f"backend={backend!r}: this version of autopar has the eager backend only; pass backend='eager' or 'auto'"
        )
    topology, pinned = topology_of(mesh)
    pins = parse_pins({**pinned, **(pin or {})})
    profile = load_profile(topology.device)
    check_data_axis(pins, topology)
    settings = Settings(pins, usable_bytes(profile, memory), optimizer, precision_name(precision), batch_dims)
    return Request(topology, profile, settings, outputs, strict, discover, dump_dir)


def check_data_axis(pins: Pins, topology: Mesh) -> None:
    """ZeRO needs an axis to shard over: one of data parallelism, or a free one."""
    other = 1
    for role, degree in pins.degrees.items():
        other *= degree if role not in ("dp", "cp") else 1
    if pins.zero and topology.size // other == 1:
        raise PlanError(
            f"pin zero={pins.zero}: ZeRO shards over data axes, and the pins {dict(pins.given)} leave none on a mesh of {topology.size}"
        )


def topology_of(mesh: Any) -> tuple[Mesh, dict[str, int]]:
    if isinstance(mesh, Mesh):
        return mesh, {}
    if isinstance(mesh, (str, int)):
        return Mesh(mesh), {}
    if hasattr(mesh, "mesh_dim_names"):
        return Mesh.from_device_mesh(mesh)
    raise MeshError(f"a mesh is an autopar.Mesh or a torch DeviceMesh, not {type(mesh).__name__}")


def precision_name(precision: Any) -> str | None:
    """ "fp32", "bf16" or "fp16" of a name or a `MixedPrecisionPolicy`. Raises: PlanError."""
    if precision is None or isinstance(precision, str):
        if precision not in (None, "fp32", "bf16", "fp16"):
            raise PlanError(f"precision={precision!r}: must be fp32, bf16, fp16 or a MixedPrecisionPolicy")
        return precision
    dtype = getattr(precision, "param_dtype", None)
    names = {None: None, torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if not hasattr(precision, "param_dtype") or dtype not in names:
        raise PlanError(f"precision={precision!r}: must be fp32, bf16, fp16 or a MixedPrecisionPolicy")
    return names[dtype]


def _prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    request: Request,
    tell: Callable[[str], None],
) -> Prepared:
    args, made = example_of(model, args, kwargs)
    dump = Dump(request.dump_dir) if _writes_dumps() else None
    return prepare(
        model,
        args,
        made,
        name=_name(model),
        outputs=request.outputs,
        strict=request.strict,
        discover=request.discover,
        dump=dump,
        progress=tell,
    )


def _writes_dumps() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _plan_of(
    prepared: Prepared, request: Request, given: Plan | str | os.PathLike[str] | None, tell: Callable[[str], None]
) -> Plan:
    if given is None:
        return choose(
            prepared, request.topology, request.profile, request.settings, recompute=request.recompute, progress=tell
        )
    found = given if isinstance(given, Plan) else Plan.load(given)
    if tuple(found.mesh["shape"]) != request.topology.shape:
        raise PlanError(
            f"the plan is for a mesh {'x'.join(map(str, found.mesh['shape']))}, not {request.topology}; plan for this mesh, or pass that one"
        )
    carry_out(prepared, found, request.profile, request.settings)
    return found


def ensure_process_group(topology: Mesh) -> None:
    """Under torchrun, start the process group that is not there yet."""
    if topology.size > 1 and not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def connect_world(topology: Mesh) -> torch.device:
    """Check the world size before any collective; the device that collectives use."""
    if topology.size > 1:
        check_world(topology.size)
    cuda = topology.size > 1 and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _build_module(model: nn.Module, prepared: Prepared, request: Request, chosen: Plan) -> ParallelModule:
    logical = mesh_of(chosen)
    found, decisions = carry_out(prepared, chosen, request.profile, request.settings)
    mesh, program = connect(logical), prepared.program
    if logical.size > 1:
        decided = repr(sorted((k, s.options) for k, s in decisions.strategies.items()))
        agree({"plan": digest(chosen.digest), "decisions": digest(decided)}, mesh.device)
    state, persistent, shards = _shard_state(prepared, decisions.sources, mesh)
    OLD_PARAMETERS.add(p for p in model.parameters())
    lowering = _Lowering(skeleton(model), prepared, request, chosen, mesh)
    lowering.first = lower(
        prepared,
        decisions,
        logical,
        request.profile,
        mesh.coordinate,
        mesh.device,
        dump=Dump(request.dump_dir) if mesh.rank == 0 and request.dump_dir else None,
    )
    _, roles = degrees(prepared.analysis, decisions, logical, found.built.roles)
    batch_axes = tuple(a.name for a, role in zip(logical.axes, roles, strict=True) if role == "dp")
    module = ParallelModule(chosen, mesh, lowering, state, persistent, program.ties, shards, batch_axes)
    return module.train(model.training)


def _shard_state(
    prepared: Prepared, layouts: Mapping[str, Any], mesh: ProcessMesh
) -> tuple[dict[str, torch.Tensor], dict[str, bool], dict[str, Any]]:
    state: dict[str, torch.Tensor] = {}
    persistent: dict[str, bool] = {}
    shards: dict[str, Any] = {}
    for source in prepared.program.sources:
        if source.kind == "parameter":
            parts = prepared.analysis.parts[source.node]
            layout = layouts[source.node]
            state[source.path] = shard_parameter(
                prepared.program.state[source.path], parts, layout, mesh, source.trainable
            )
            shards[source.path] = (parts, layout)
        elif source.kind == "buffer":
            value = prepared.program.state[source.path]
            held = value.detach().to(mesh.device, copy=True).contiguous()
            if mesh.device_mesh is not None and not held.is_meta:
                dist.broadcast(held, 0)
            state[source.path] = held
            persistent[source.path] = source.persistent
    return state, persistent, shards


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the module to capture again later; its parameters have shapes and devices but no memory."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        if p.is_meta:
            continue
        empty = torch.empty_like(p.detach())
        empty.untyped_storage().resize_(0)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


class _Lowering:
    """Lower for a combination of inputs; the first one is ready, others are captured again and take the same plan."""

    def __init__(self, model: nn.Module, prepared: Prepared, request: Request, chosen: Plan, mesh: ProcessMesh) -> None:
        self.model, self.request, self.plan, self.mesh = model, request, chosen, mesh
        self.prepared: Prepared | None = prepared
        self.first: Lowered | None = None
        self.kinds = prepared.kinds

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Lowered:
        first, self.first = self.first, None
        if first is not None and self._matches(args, kwargs, training):
            return first
        self.model.train(training)
        prepared = prepare(
            self.model,
            args,
            kwargs,
            name=_name(self.model),
            outputs=self.request.outputs,
            strict=self.request.strict,
            discover=self.request.discover,
        )
        found, decisions = carry_out(prepared, self.plan, self.request.profile, self.request.settings)
        return lower(prepared, decisions, found.mesh, self.request.profile, self.mesh.coordinate, self.mesh.device)

    def _matches(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> bool:
        """Was the first program captured from inputs like these?"""
        assert self.prepared is not None
        program, self_prepared = self.prepared.program, self.prepared
        self.prepared = None
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        if spec != program.in_spec or training != program.training:
            return False
        values = [x for x, tensor in zip(leaves, program.in_tensors, strict=True) if not tensor]
        known = [x for x, tensor in zip(program.in_values, program.in_tensors, strict=True) if not tensor]
        if values != known or any(
            isinstance(x, torch.Tensor) != t for x, t in zip(leaves, program.in_tensors, strict=True)
        ):
            return False
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        nodes = [s.node for s in program.sources if s.kind == "input"]
        return all(
            tuple(x.shape) == self_prepared.analysis.parts[n].shape and x.dtype == self_prepared.analysis.dtypes[n]
            for x, n in zip(tensors, nodes, strict=True)
        )
