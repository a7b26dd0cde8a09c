"""The module that `parallelize` returns: called like the user's model, with the global batch, on every rank.

What enters a call: plain tensors (the global batch, equal on every rank), DTensors (from `shard`), and any other
    values. What leaves: the model's
own output structure. Each new combination of shapes, other values and train/eval mode is lowered once, with the same
plan.
"""

from __future__ import annotations

import contextlib
import copy
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
from autopar.runtime.check import of_all, same_everywhere, share
from autopar.runtime.key import Key, digest_of, key_of, short
from autopar.runtime.loading import localize
from autopar.runtime.moves import use_groups
from autopar.runtime.optimizer_form import STEPPED
from autopar.runtime.optimizers import SHARDED
from autopar.runtime.parameters import Stored, as_dtensor, full_tensors, locals_of, place
from autopar.runtime.pipeline_state import count_norms_over_stages, full_tensors_of_stages
from autopar.runtime.process_mesh import ProcessMesh
from autopar.runtime.random import Draws, drawing
from autopar.runtime.tree import Changes, as_normal, changes, names_of, plant, prune, refuse_conversion
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


Lower = Callable[[tuple[Any, ...], dict[str, Any], bool, Changes, tuple[str, ...]], Lowered]
"""(args, kwargs, training, changes of parts, parameters no longer frozen) -> the lowered program; captures again when
need be."""


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
        model: nn.Module | None = None,
        trainable: Mapping[str, bool] | None = None,
        modes: Callable[[bool], Mapping[str, bool] | None] = lambda training: None,
    ) -> None:
        """random: the program draws random numbers; its seed is rank 0's `torch.initial_seed()` of now.
        owners: in a pipeline, the ranks of it that hold each parameter; the others are not in `state`.
        model: whose tree of modules this one takes over. trainable: by parameter, had it a gradient at the capture?
        modes: what the model's own `train` makes of a mode, by path, if it has one.
        """
        super().__init__()
        self.plan = plan
        self._owners = dict(owners or {}) if mesh.line is not None else {}
        self._asynchronous = mesh.line is not None and KINDS[plan.schedule].asynchronous
        self._mesh, self._lower, self._shards, self._batch_axes = mesh, lower, shards, batch_axes
        self._cache: dict[Any, Lowered] = {}
        self._first = True
        self._stored = Stored()
        self._precision = precision or Precision()
        self._wholes = Wholes(mesh, accumulate)
        self._random = random
        self._draws = Draws(
            share(torch.initial_seed, mesh.device) if mesh.device_mesh is not None else torch.initial_seed()
        )
        self._state_names, self._trainable, self._modes = dict(ties), dict(trainable or {}), modes
        self._parts = plant(self, model) if model is not None else ()
        self._names = tuple(names_of(model)) if model is not None else ()
        for name, value in state.items():
            place(self, name, value, persistent=persistent.get(name, True))
        for alias, name in ties.items():
            if name in state:
                place(self, alias, state[name], persistent=persistent.get(name, True))
        prune(self._parts)
        self._stored.refuse_replaced(dict(self.named_parameters()))
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

    def __getstate__(self) -> Any:
        raise PlanError(
            "a parallel module belongs to its process group and cannot be pickled: save m.full_state_dict(), or "
            "m.state_dict() by torch.distributed.checkpoint"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelModule:
        refuse_conversion(self, fn)
        return self

    def share_memory(self) -> ParallelModule:
        raise PlanError("a parallel module's shards cannot be moved to shared memory: each process holds its own")

    def train(self, mode: bool = True) -> ParallelModule:
        """As the model's own `train` does, where it has one."""
        super().train(mode)
        own = self._modes(mode) or {}
        for path, part in self._parts:
            part.training = own.get(path, part.training)
        return self

    # calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own call. Plain tensors are the global batch; the result has the model's own structure."""
        if torch.is_anomaly_enabled():
            allow_anomaly_mode()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = self._agree(leaves, spec)
        leaves = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        leaves = [leaf.to(self._mesh.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        leaves = self._precision.inputs(leaves)
        lowered = self._lowered(key, leaves, spec)
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
        self._stored.refuse_replaced(stored)
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

    def _lowered(self, key: Key, leaves: list[Any], spec: Any) -> Lowered:
        if key not in self._cache:
            with torch.inference_mode(False), torch.enable_grad():  # the program serves every later call, too
                args, kwargs = pytree.tree_unflatten(as_normal(leaves), spec)
                self._cache[key] = self._lower(args, kwargs, self.training, *key[3:])
            self._random = self._random or draws_numbers(self._cache[key].program)
        return self._cache[key]

    def _agree(self, leaves: list[Any], spec: Any) -> Key:
        """Before anything is gathered: do all ranks see the same shapes? In the first call: the same values, too?

        Returns: what decides which program runs.
        """
        at = {name: p.requires_grad for name in self._trainable if (p := _find(self, name)) is not None}
        unfrozen = tuple(name for name, now in at.items() if now and not self._trainable[name])
        key = key_of(self.training, spec, leaves, changes(self._parts), unfrozen)
        if self._mesh.device_mesh is None:
            return key
        if self._asynchronous:
            if key in self._cache:
                if self._wholes.may_have_changed():
                    self._wholes.drop()
                return key  # to compare would be to wait for the last stage
            if self.training and any(training for training, *_ in self._cache):
                raise PlanError(
                    f"schedule {self.plan.schedule}: an asynchronous pipeline trains on batches of one shape, since "
                    f"gradients of earlier calls are on their way; leave out a smaller last batch. Here: {short(key)}"
                )
        told = key[:4] if self._mesh.line is not None else (*key, at)  # stages hold different parameters
        mine = digest_of(told, leaves if self._first else ())
        flags = bool(unfrozen), self._wholes.may_have_changed()
        same, anywhere, written = same_everywhere(mine, self._mesh.device, *flags)
        if not same:
            what = "value" if self._first else "other arguments"
            raise RuntimeMismatchError(
                f"the inputs of this call differ between ranks in shape, dtype, mode, requires_grad or {what}; pass "
                f"the same global batch on every rank, or each rank's own part, of equal size, through "
                f"m.shard(batch). Here (rank {self._mesh.rank}): {short(key)}"
            )
        self._first = False
        if written:
            self._wholes.drop()
        return (*key[:4], of_all(unfrozen)) if anywhere and self._mesh.line is not None else key

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
        other = {k: v for k, v in held.items() if not isinstance(v, torch.Tensor)}  # extra states
        held = {k: v for k, v in held.items() if k not in other}
        if self._mesh.line is None:
            return {**full_tensors(held), **other}
        shapes = {path: parts.shape for path, (parts, _) in self._shards.items()}
        found = full_tensors_of_stages(held, shapes, self._state_names, self._owners, self._mesh.line)
        return {**{name: found[name] for name in self._names if name in found}, **found, **other}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Accepts this module's own (DTensor) state dict and the single-device model's full one."""
        found = super().load_state_dict(state_dict, strict=strict, assign=assign)
        SHARDED.add(self.parameters())  # assign=True makes new ones
        STEPPED.add(self.parameters())
        return found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._random:
            destination[prefix + _EXTRA] = self._draws.to_tensor()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Also as part of a larger module. A state dict without seed and counters (the single-device model's) leaves
        ours as they are.
        """
        saved = state_dict.get(prefix + _EXTRA)
        if isinstance(saved, torch.Tensor) and saved.dtype == torch.int64 and saved.shape == (3,):  # else the model's
            self._draws.load(state_dict.pop(prefix + _EXTRA))
        held = self.state_dict(keep_vars=True)
        names = (*self._owners, *(alias for alias, name in self._state_names.items() if name in self._owners))
        elsewhere = [name for name in names if name not in held]
        assign = metadata.get("assign_to_params_buffers", False)
        absent, wrong = localize(
            state_dict, prefix, held, self._shards, self._state_names, elsewhere, self._mesh, assign
        )
        missing.extend(absent)
        errors.extend(wrong)
        self.parameters_changed()
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

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
        by one (`p.clamp_(...)`, `p.data.copy_(...)`): at ZeRO levels 1 and 2 gathered copies are kept, and a write by
        `torch._foreach_*`, or through `p.to_local().data`, cannot be seen.
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
