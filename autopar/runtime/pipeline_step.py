"""One call of a pipeline on one rank: runs the events of a schedule and keeps what they give.

Enters: the program, this rank's values, the events. Leaves: the outputs of each micro-batch, and gradients in the
leaves that stand for the parameters. A message that does not come in time, or a partner that is gone, raises a
`RuntimeMismatchError` that names the action this rank waits at and what it waits for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RuntimeMismatchError
from autopar.runtime.backward_split import Later, inputs_only
from autopar.runtime.pipeline_program import PipelineProgram, StageValues, Value
from autopar.runtime.pipeline_rounds import Event, Message
from autopar.runtime.process_mesh import Line
from autopar.schedule.table import Action

STALL_S = 600.0
"""A message that is not there after so many seconds will not come. AUTOPAR_STALL_S overrides it."""


def stall_s() -> float:
    return float(os.environ.get("AUTOPAR_STALL_S", STALL_S))


@dataclass
class _Held:
    """What the backward of one stage and micro-batch needs."""

    leaves: list[tuple[int, Value, torch.Tensor]]
    outputs: tuple[Any, ...]
    roots: Sequence[torch.Tensor] = ()
    seeds: Sequence[torch.Tensor] = ()
    later: Sequence[Later] = ()


Seed = Callable[[int, int], torch.Tensor | None]
"""(sink, micro-batch) -> the gradient that its value begins with, None for none."""


class Step:
    """See the module docstring. leaves: by path, the tensor that stands for each value here; gradients gather there."""

    def __init__(
        self,
        program: PipelineProgram,
        line: Line | None,
        placement: Sequence[int],
        leaves: Mapping[str, torch.Tensor],
        *,
        keep: bool,
    ) -> None:
        self.program, self.line, self.placement, self.leaves, self.keep = program, line, placement, leaves, keep
        self.rank = line.index if line is not None else 0
        self.inbox: dict[Message, list[torch.Tensor]] = {}
        self.outbox: dict[Message, list[torch.Tensor]] = {}
        self.pending: dict[Message, list[Any]] = {}
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.held: dict[tuple[int, int], _Held] = {}
        self.results: dict[int, dict[int, torch.Tensor]] = {}
        """By sink, by micro-batch."""
        self.in_flight = self.most_in_flight = 0
        self.seed: Seed = lambda sink, microbatch: None
        self.at: Action | None = None
        self.device = next((v.device for v in leaves.values()), torch.device("cpu"))
        self.ahead = self.device.type == "cpu"
        """Receives are posted an action early, in the same order: what comes in meanwhile need not be waited for. A
        batch on GPUs must hold what its partners' batches hold."""

    def run(self, events: Iterable[Event], seed: Seed | None = None) -> None:
        if seed is not None:
            self.seed = seed
        row = tuple(events)
        for i, event in enumerate(row):
            if event.action is None:
                self.exchange(event.messages)
                continue
            if self.ahead:
                for coming in itertools.takewhile(lambda e: e.action is None, row[i + 1 :]):
                    self.exchange([m for m in coming.messages if self.placement[m.target] == self.rank])
            self.at = event.action
            self.act(event.action)
        self.settle()

    def settle(self) -> None:
        """Wait for what this rank has sent."""
        for work, _ in self.sending:
            self.wait(work, "its own sends")
        self.sending.clear()

    def stage(self, index: int, k: int) -> StageValues:
        return self.program.stages[k % len(self.program.stages)][index]

    def function(self, index: int, k: int) -> Callable[..., tuple[Any, ...]]:
        return self.program.run[index, k % len(self.program.stages)]

    def leaves_of(self, k: int) -> Mapping[str, torch.Tensor]:
        """The values that a micro-batch runs with."""
        return self.leaves

    def act(self, action: Action) -> None:
        if action.work == "F":
            self.forward(action.stage, action.microbatch)
        elif action.work == "B":
            self.backward(action.stage, action.microbatch)
        elif action.work == "I":
            self.input_gradient(action.stage, action.microbatch)
        else:
            self.weight_gradient(action.stage, action.microbatch)

    # work

    def forward(self, index: int, k: int) -> None:
        stage = self.stage(index, k)
        leaves: list[tuple[int, Value, torch.Tensor]] = []
        taken = {s: self.take(Message(k, "F", s, index)) for s in dict.fromkeys(s for s, _ in stage.receives)}
        for source, value in stage.receives:
            tensor = taken[source].pop(0)
            if value.grad and self.keep:
                tensor = tensor.detach().requires_grad_()
            leaves.append((source, value, tensor))
        held = self.leaves_of(k)
        inputs = [held[s.path] for s in stage.sources]
        if stage.cuts is not None:
            with torch.no_grad():
                inputs += stage.cuts.run(*(held[path] for path in stage.cuts.paths))
        outputs = self.function(index, k)(*inputs, *(t for _, _, t in leaves))
        for (value, readers), output in zip(stage.sends, outputs, strict=False):
            for reader in readers:
                self.outbox.setdefault(Message(k, "F", index, reader), []).append(output.detach())
            assert tuple(output.shape) == value.shape, f"{value.name}: {tuple(output.shape)}, not {value.shape}"
        for sink, output in zip(stage.sinks, outputs[len(stage.sends) :], strict=True):
            if isinstance(output, torch.Tensor):
                self.results.setdefault(sink, {})[k] = output.detach()
        if self.keep:
            self.held[index, k] = _Held(leaves, outputs)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.hand_over(stage, k, "F")

    def backward(self, index: int, k: int) -> None:
        stage, held = self.stage(index, k), self.held.pop((index, k))
        self.in_flight -= 1
        roots, seeds = self.roots(stage, held, k)
        wanted = [t for _, v, t in held.leaves if v.grad] + self.parameters(stage, k)
        if roots and wanted:
            torch.autograd.backward(roots, seeds, inputs=wanted)
        del roots, seeds
        self.give_back(stage, k, held, [t.grad for _, v, t in held.leaves if v.grad])

    def input_gradient(self, index: int, k: int) -> None:
        stage, held = self.stage(index, k), self.held[index, k]
        held.roots, held.seeds = self.roots(stage, held, k)
        wanted = [t for _, v, t in held.leaves if v.grad]
        grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if held.roots and wanted:
            splits = getattr(self.function(index, k), "splits", False)
            keep = bool(self.parameters(stage, k)) and not splits
            deferred: contextlib.AbstractContextManager[list[Later]] = (
                inputs_only() if splits else contextlib.nullcontext([])
            )
            with deferred as later:
                grads = torch.autograd.grad(held.roots, wanted, held.seeds, retain_graph=keep, allow_unused=True)
            if splits:
                held.later, held.roots, held.seeds = later, (), ()
        held.outputs = ()
        self.give_back(stage, k, held, grads)

    def weight_gradient(self, index: int, k: int) -> None:
        stage, held = self.stage(index, k), self.held.pop((index, k))
        self.in_flight -= 1
        wanted, leaves = self.parameters(stage, k), self.leaves_of(k)
        if held.roots and wanted:
            torch.autograd.backward(held.roots, held.seeds, inputs=wanted)
        for later in held.later:
            for position, gradient in later.gradients().items():
                leaf = leaves[stage.sources[position].path]
                if leaf.requires_grad:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def parameters(self, stage: StageValues, k: int) -> list[torch.Tensor]:
        leaves = self.leaves_of(k)
        return [leaves[s.path] for s in stage.sources if leaves[s.path].requires_grad]

    def roots(self, stage: StageValues, held: _Held, k: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs with their gradients: what their readers sent back, and the seeds of the model's own outputs."""
        roots, seeds = [], []
        back = {
            r: self.take(Message(k, "B", r, stage.index))
            for r in dict.fromkeys(r for v, readers in stage.sends if v.grad for r in readers)
        }
        for (value, readers), output in zip(stage.sends, held.outputs, strict=False):
            if value.grad:
                for reader in readers:
                    received = back[reader].pop(0)
                    if output.requires_grad:
                        roots.append(output)
                        seeds.append(received)
        for sink, output in zip(stage.sinks, held.outputs[len(stage.sends) :], strict=True):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                gradient = self.seed(sink, k)
                if gradient is not None:
                    roots.append(output)
                    seeds.append(gradient.to(output.dtype).expand(output.shape))
        return roots, seeds

    def give_back(self, stage: StageValues, k: int, held: _Held, grads: Sequence[torch.Tensor | None]) -> None:
        found = iter(grads)
        for source, value, tensor in held.leaves:
            if value.grad:
                gradient = next(found)
                gradient = torch.zeros_like(tensor) if gradient is None else gradient
                self.outbox.setdefault(Message(k, "B", stage.index, source), []).append(gradient)
        held.leaves = []
        self.hand_over(stage, k, "B")

    # messages

    def hand_over(self, stage: StageValues, k: int, kind: str) -> None:
        """Messages between two stages of this rank go at once."""
        for message in [m for m in self.outbox if m.source == stage.index and m.microbatch == k and m.kind == kind]:
            if self.placement[message.target] == self.rank:
                self.inbox[message] = self.outbox.pop(message)

    def exchange(self, messages: Sequence[Message]) -> None:
        """One batch of sends and receives."""
        assert self.line is not None or all(self.placement[m.source] == self.placement[m.target] for m in messages)
        operations: list[dist.P2POp] = []
        places: list[tuple[Message | None, torch.Tensor]] = []
        for message in messages:
            source, target = self.placement[message.source], self.placement[message.target]
            if source == target or self.line is None:
                continue
            if source == self.rank:
                for tensor in self.outbox.pop(message):
                    tensor = tensor.contiguous()
                    if tensor.numel():
                        operations.append(dist.P2POp(dist.isend, tensor, self.line.ranks[target]))
                        places.append((None, tensor))
            elif message not in self.inbox:  # not awaited yet
                buffers = [self.buffer(v) for v in self.values(message)]
                self.inbox[message] = buffers
                for buffer in buffers:
                    if buffer.numel():
                        operations.append(dist.P2POp(dist.irecv, buffer, self.line.ranks[source]))
                        places.append((message, buffer))
        if not operations:
            return
        works = self.guard(lambda: dist.batch_isend_irecv(operations), "a batch of messages")
        if len(works) != len(operations):  # one work for the whole batch (NCCL)
            works = [works[-1]] * len(operations)
        for work, (expected, tensor) in zip(works, places, strict=True):
            if expected is None:
                self.sending.append((work, tensor))
            else:
                self.pending.setdefault(expected, []).append(work)

    def values(self, message: Message) -> Sequence[Value]:
        """What a message carries, in order; the same on both sides."""
        if message.kind == "F":
            return self.stage(message.target, message.microbatch).values_from(message.source)
        source = self.stage(message.source, message.microbatch)
        return [v for v in source.values_from(message.target) if v.grad]

    def buffer(self, value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=self.device)

    def take(self, message: Message) -> list[torch.Tensor]:
        for work in self.pending.pop(message, []):
            self.wait(work, str(message))
        assert message in self.inbox, f"no {message} here"
        return self.inbox.pop(message)

    def wait(self, work: Any, what: str) -> None:
        self.guard(lambda: work.wait(timedelta(seconds=stall_s())), what)

    def guard(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except RuntimeError as error:
            said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise RuntimeMismatchError(
                f"pipeline rank {self.rank} waited at action {self.at} for {what}, and it did not come within "
                f"{stall_s():g} s or its rank is gone; look for the first error among the ranks ({said:.160})"
            ) from None
