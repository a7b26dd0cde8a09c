"""The module that `parallelize` returns: called like the user's model, with the global batch, on every rank.

What enters a call: plain tensors (the global batch, equal on every rank), DTensors (from `shard`), and any other
    values. What leaves: the model's
own output structure. Each new combination of shapes, other values and train/eval mode is lowered once, with the same
plan.
"""

from __future__ import annotations

import contextlib
import copy
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from autopar.errors import PlanError, RuntimeMismatchError
from autopar.layout import Layout, Parts, shard_of
from autopar.plan import Plan
from autopar.precision import Precision
from autopar.program import OutputRef, Program
from autopar.runtime.anomaly import allow_anomaly_mode
from autopar.runtime.check import digest, same_everywhere, share, value_digest
from autopar.runtime.moves import use_groups
from autopar.runtime.optimizer_form import STEPPED
from autopar.runtime.optimizers import SHARDED
from autopar.runtime.parameters import as_dtensor, full_tensors, locals_of, place
from autopar.runtime.pipeline_state import count_norms_over_stages, full_tensors_of_stages
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.random import Draws, drawing
from autopar.runtime.zero import Lifetime, Wholes
from autopar.schedule.build import KINDS


@dataclass(frozen=True, eq=False)
class Lowered:
    """The program of this rank for one combination of inputs."""

    program: Program
    run: Callable[..., tuple[Any, ...]]
    """Called with the local values of all placeholders in order; gives the local values of all sinks."""
    sinks: Mapping[int, tuple[Parts, Layout, str]]
    """For each sink its parts, its layout, and "plain" or "shard"."""
    lifetimes: Mapping[str, Lifetime] = field(default_factory=dict)
    """Parameters that are gathered once a step, before the program runs."""


Lower = Callable[[tuple[Any, ...], dict[str, Any], bool], Lowered]
"""(args, kwargs, training) -> the lowered program; captures again when need be."""


class ParallelModule(nn.Module):
    """A distributed model with the interface of the single-device one.

    Parameters are DTensors under the model's own names, so torch's optimizers, `clip_grad_norm_` and
    `torch.distributed.checkpoint` work. Make the optimizer after `parallelize`, from this module's parameters.
    Gradients are
    complete after every `backward()`. On a mesh of one device parameters are plain tensors.
    """

    plan: Plan

    def __init__(
        self,
        plan: Plan,
        mesh: ProcessMesh,
        lower: Lower,
        state: Mapping[str, torch.Tensor],
        persistent: Mapping[str, bool],
        ties: Mapping[str, str],
        shards: Mapping[str, tuple[Parts, Layout]],
        batch_axes: tuple[str, ...],
        random: bool = False,
        precision: Precision | None = None,
        accumulate: int = 1,
        owners: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """random: the program draws random numbers; its seed is rank 0's `torch.initial_seed()` of now.
        owners: in a pipeline, the ranks of it that hold each parameter; the others are not in `state`.
        """
        super().__init__()
        self.plan = plan
        self._owners = dict(owners or {}) if mesh.line is not None else {}
        self._asynchronous = mesh.line is not None and KINDS[plan.schedule].asynchronous
        self._mesh, self._lower, self._shards, self._batch_axes = mesh, lower, shards, batch_axes
        self._cache: dict[Any, Lowered] = {}
        self._first = True
        self._memory: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._precision = precision or Precision()
        self._wholes = Wholes(mesh, accumulate)
        self._random = random
        self._draws = Draws(
            share(torch.initial_seed, mesh.device) if mesh.device_mesh is not None else torch.initial_seed()
        )
        self._state_names = dict(ties)
        for name, value in state.items():
            place(self, name, value, persistent=persistent.get(name, True))
        for alias, name in ties.items():
            if name in state:
                place(self, alias, state[name], persistent=persistent.get(name, True))
        self._refuse_replaced(dict(self.named_parameters()))
        if mesh.line is not None:
            count_norms_over_stages(self, mesh.line, self._owners)
        SHARDED.add(self.parameters())
        STEPPED.add(self.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Parameters, buffers and draws of its own (an average of weights, a target network) on the same ranks, with
        the same programs. Parameters start without gradients and hooks, as those of any copied module.
        """
        shared = (self.plan, self._mesh, self._lower, self._shards, self._precision)
        memo.update({id(each): each for each in shared})
        for parameter in self.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        # a pipeline's program remembers the calls that are on their way
        lowered = dict(self._cache) if self._mesh.line is None else {}
        wholes = Wholes(self._mesh, self._wholes.accumulate, keep=False)
        memo[id(self._cache)], memo[id(self._wholes)] = lowered, wholes
        other = memo[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        if self._mesh.line is not None:
            count_norms_over_stages(other, self._mesh.line, self._owners)
        SHARDED.add(other.parameters())
        STEPPED.add(other.parameters())
        return other

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelModule:
        """What `to`, `cpu`, `double` and the like call: parameters stay what and where the plan says."""
        for name, held in (*self.named_parameters(), *self.named_buffers()):
            value = fn(held.detach())
            if (value.dtype, value.device.type) != (held.dtype, held.device.type):
                raise PlanError(
                    f"{name}: {held.dtype} on {held.device.type} cannot become {value.dtype} on {value.device.type} in "
                    "a parallel module: convert the model before autopar.parallelize, or pass precision="
                )
        return self

    # calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call. Plain tensors are the global batch; the result has the model's own structure."""
        if torch.is_anomaly_enabled():
            allow_anomaly_mode()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._agree(leaves, spec)
        leaves = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        leaves = [leaf.to(self._mesh.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        leaves = self._precision.inputs(leaves)
        lowered = self._lowered(leaves, spec)
        program = lowered.program
        inputs = iter([leaf for leaf, tensor in zip(leaves, program.in_tensors, strict=True) if tensor])
        values = self._values(lowered, inputs)
        with use_groups(self._mesh.groups), drawing(self._draws.next(self.training)):
            results = lowered.run(*values)
        self._update_state(program, results)
        outputs = [self._output(lowered, results, v) if isinstance(v, OutputRef) else v for v in program.out_values]
        return pytree.tree_unflatten(outputs, program.out_spec)

    def _values(self, lowered: Lowered, inputs: Iterator[torch.Tensor]) -> list[torch.Tensor | None]:
        """What the program computes with, source by source; None for a parameter of other stages."""
        sources = lowered.program.sources
        written = {sink.path for sink in lowered.program.sinks if sink.kind == "state"}
        held = {s.path: _find(self, s.path) for s in sources if s.kind != "input"}
        stored = {path: value for path, value in held.items() if value is not None}
        self._refuse_replaced(stored)
        local = dict(zip(stored, locals_of(list(stored.values())), strict=True))
        once = {p: (stored[p], local[p], life) for p, life in lowered.lifetimes.items() if p in local}
        local.update(self._wholes.tensors(once))
        values: list[torch.Tensor | None] = []
        for source in sources:
            if source.kind == "input":
                values.append(next(inputs))
            elif source.path in local or source.path in self._owners:
                value = local.get(source.path)
                # what is kept for the backward must outlive the write
                values.append(value.clone() if value is not None and source.path in written else value)
            else:
                values.append(lowered.program.state[source.path].to(self._mesh.device))
        return values

    def _refuse_replaced(self, stored: Mapping[str, torch.Tensor]) -> None:
        """torch lets `p.data = value` pass on a DTensor, and goes on with the old values."""
        for path, parameter in stored.items():
            if isinstance(parameter, DTensor):
                memory = parameter.untyped_storage()._cdata
                known, before = self._memory.get(path, (None, memory))
                if known is None or known() is not parameter:
                    self._memory[path] = weakref.ref(parameter), memory
                elif memory != before:
                    raise PlanError(
                        f"{path}: p.data = ... (as nn.utils.vector_to_parameters does) leaves the values of a DTensor "
                        "as they were; write them in place, under torch.no_grad(): p.copy_(...)"
                    )

    def _lowered(self, leaves: list[Any], spec: Any) -> Lowered:
        key = (self.training, str(spec), tuple(map(_described, leaves)))
        if key not in self._cache:
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            self._cache[key] = self._lower(args, kwargs, self.training)
            self._random = self._random or draws_numbers(self._cache[key].program)
        return self._cache[key]

    def _agree(self, leaves: list[Any], spec: Any) -> None:
        """Before anything is gathered: do all ranks see the same shapes? In the first call: the same values, too?"""
        if self._mesh.device_mesh is None:
            return
        key = (self.training, str(spec), tuple(map(_described, leaves)))
        if self._asynchronous:
            if key in self._cache:
                return  # to compare would be to wait for the last stage
            if self.training and any(training for training, *_ in self._cache):
                raise PlanError(
                    f"schedule {self.plan.schedule}: an asynchronous pipeline trains on batches of one shape, since "
                    f"gradients of earlier calls are on their way; leave out a smaller last batch. Here: {_short(key)}"
                )
        mine = [digest(re.sub(r" at 0x[0-9a-f]+", "", str(key)))]  # where an object lies in memory says nothing
        if self._first:
            mine += [value_digest(x) for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
        if not same_everywhere(digest(str(mine)), self._mesh.device):
            what = "shape, dtype, mode or value" if self._first else "shape, dtype, mode or other arguments"
            raise RuntimeMismatchError(
                f"the inputs of this call differ between ranks in {what}; pass the same global batch on every "
                f"rank, or each rank's own part, of equal size, through m.shard(batch). Here "
                f"(rank {self._mesh.rank}): {_short(key)}"
            )
        self._first = False

    def _update_state(self, program: Program, results: tuple[Any, ...]) -> None:
        """Keep what forward wrote to buffers and parameters; each rank has the whole new value."""
        with torch.no_grad():
            for sink, value in zip(program.sinks, results, strict=True):
                held = _find(self, sink.path) if sink.kind == "state" else None
                if isinstance(held, DTensor):
                    parts, layout = self._shards[sink.path]
                    mine = shard_of(value, parts, layout, self._mesh.logical.sizes, self._mesh.coordinate)
                    held.to_local().copy_(mine)
                elif held is not None:
                    held.copy_(value)

    def _output(self, lowered: Lowered, results: tuple[Any, ...], ref: OutputRef) -> Any:
        parts, layout, kind = lowered.sinks[ref.index]
        value = self._precision.outputs(results[ref.index])
        return (
            as_dtensor(value, parts, layout, self._mesh)
            if kind == "shard" and self._mesh.device_mesh is not None
            else value
        )

    # state

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Plain tensors under the original names, ties kept; a collective call: every rank must make it."""
        held = {k: v for k, v in self.state_dict(keep_vars=True).items() if k != _EXTRA}
        if self._mesh.line is None:
            return full_tensors(held)
        shapes = {path: parts.shape for path, (parts, _) in self._shards.items()}
        return full_tensors_of_stages(held, shapes, self._state_names, self._owners, self._mesh.line)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Accepts this module's own (DTensor) state dict and the single-device model's full one."""
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._random:
            destination[prefix + _EXTRA] = self._draws.to_tensor()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Also as part of a larger module. A state dict without seed and counters (the single-device model's) leaves
        ours as they are.
        """
        saved = state_dict.pop(prefix + _EXTRA, None)
        if saved is not None:
            self._draws.load(saved)
        held = self.state_dict(keep_vars=True)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name, value = key.removeprefix(prefix), state_dict[key]
            mine, stored = held.get(name), self._state_names.get(name, name)
            if mine is None and stored in self._owners:
                del state_dict[key]  # of another stage
            elif isinstance(mine, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                parts, layout = self._shards[stored]
                if tuple(value.shape) == parts.shape:
                    there = value.to(mine.to_local().device)  # the host's memory, where it is offloaded
                    local = shard_of(there, parts, layout, self._mesh.logical.sizes, self._mesh.coordinate)
                    state_dict[key] = as_dtensor(local.clone(), parts, layout, self._mesh)
        self.parameters_changed()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # data

    def shard(self, batch: Any) -> Any:
        """Turn this rank's own part of a batch (any nest of tensors, batch in dim 0) into DTensors that a call
        accepts.
        """
        if self._mesh.device_mesh is None:
            return batch
        names = self._mesh.device_mesh.mesh_dim_names or ()
        from torch.distributed.tensor import Replicate

        placements = [Shard(0) if name in self._batch_axes else Replicate() for name in names]
        mesh = self._mesh.device_mesh
        return pytree.tree_map_only(
            torch.Tensor, lambda t: DTensor.from_local(t.to(self._mesh.device), mesh, placements), batch
        )

    def sampler(self, dataset: Any, **options: Any) -> Any:
        """A `DistributedSampler` that gives each rank its own part of the batch, for use with `shard`."""
        from torch.utils.data.distributed import DistributedSampler

        index, count = 0, 1
        for axis, at in zip(self._mesh.logical.axes, self._mesh.coordinate, strict=True):
            if axis.name in self._batch_axes:
                index, count = index * axis.size + at, count * axis.size
        return DistributedSampler(dataset, num_replicas=count, rank=index, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls made inside need not reduce their gradients: at ZeRO level 1 those are added up whole and reduced in
        the first backward of a call made outside; until then `.grad` is this rank's part of a sum. Other levels reduce
        in each backward. The sums are the same.
        """
        before, self._wholes.sync = self._wholes.sync, False
        try:
            yield
        finally:
            self._wholes.sync = before

    def parameters_changed(self) -> None:
        """Say that parameters were changed otherwise than by an optimizer's step, by `load_state_dict`, or in place one
        by one (`p.clamp_(...)`): at ZeRO levels 1 and 2 gathered copies are kept, and a write through `p.data` or
        `torch._foreach_*` cannot be seen.
        """
        self._wholes.drop()

    def manual_seed(self, seed: int) -> None:
        """Seed autopar's own randomness (dropout and the like) and count calls from 0; the same seed on every rank."""
        self._draws = Draws(int(seed))

    def programs(self) -> tuple[Program, ...]:
        """This rank's programs, one for each combination of shapes, other values and mode that was called."""
        return tuple(lowered.program for lowered in self._cache.values())

    def print_readable(self) -> str:
        """Print this rank's lowered programs, and return the text."""
        texts = [str(program.graph) for program in self.programs()]
        print("\n\n".join(texts))
        return "\n\n".join(texts)


_EXTRA = "_extra_state"
"""torch's name for what a module keeps beside tensors: here the seed and the numbers of calls."""


def draws_numbers(program: Program) -> bool:
    """Does this program draw random numbers?"""
    return any(node.target is torch.ops.autopar.key.default for node in program.graph.nodes)


def _find(root: nn.Module, path: str) -> torch.Tensor | None:
    """The parameter or buffer of that name, None for a constant of the captured program."""
    *folders, leaf = path.split(".")
    at: nn.Module | None = root
    for name in folders:
        at = at._modules.get(name) if at is not None else None
    if at is None:
        return None
    found = at._parameters.get(leaf)
    return found if found is not None else at._buffers.get(leaf)


def _described(leaf: Any) -> tuple[Any, ...]:
    """What decides which program runs; of a DTensor its local shape, since ranks know no other before they talk."""
    if isinstance(leaf, DTensor):
        placements = tuple(map(str, leaf.placements))
        return (tuple(leaf.to_local().shape), leaf.dtype, leaf.requires_grad, placements)
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return (type(leaf).__name__, repr(leaf))


def _short(key: Any) -> str:
    text = f"training={key[0]}, inputs {[d for d in key[2]]}"
    return text if len(text) < 300 else text[:297] + "..."
