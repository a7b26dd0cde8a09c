"""The local program as lowered graphs: traced into a forward and a backward graph when gradients are first wanted.

Enters: the program of one rank. Leaves: a function of its flat inputs. Without gradients the program runs op by op, as
under "eager". Refused by AOTAutograd: one warning names the op and the user's line, and the program runs op by op.
"""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from autopar.capture.explain import is_user_file
from autopar.codegen.load import mode_of
from autopar.dump import Dump
from autopar.dump_lowered import backward_text, forward_text, kernels_text
from autopar.passes.chunk_loss import ChunkLoss
from autopar.passes.drop_views import DropViews
from autopar.passes.fill_buckets import FillBuckets
from autopar.passes.fuse import Fuse
from autopar.passes.inline import Inline
from autopar.passes.lower import Graphs, Partition, PassError, boxed, decompositions_of, lower_to_graphs
from autopar.passes.merge_collectives import MergeCollectives, MergeGathers
from autopar.passes.overlap import Overlap, Prefetch
from autopar.passes.reuse import Reuse
from autopar.passes.split_backward import SplitBackward
from autopar.passes.stream_cross_entropy import StreamCrossEntropy
from autopar.program import Program, record
from autopar.repeated import Repeats
from autopar.runtime.backward_split import Split, splittable
from autopar.runtime.unused import leave_unused
from autopar.user_function import op_text

PASSES = (DropViews().run, MergeCollectives().run, MergeGathers().run, Overlap().run, Prefetch().run)
"""What is done to each of the two graphs, in this order."""


class Compiled:
    """A local program as lowered graphs where gradients are wanted; op by op where not. Dumped when first called."""

    def __init__(
        self,
        eager: GraphModule,
        program: Program,
        recompute: Mapping[str, str],
        dump: Dump | None = None,
        kernels: str = "auto",
        backend: str = "aot",
        split: bool = False,
        loss_chunks: int = 1,
    ) -> None:
        """recompute: level by block. backend: "aot", or "inductor", which compiles both graphs. split: the backward can
        leave the gradients of weights for later (see `runtime.backward_split`).
        kernels: "auto" (on GPUs), "on" (elsewhere in Triton's interpreter), "off".
        loss_chunks: parts of the rows in which logits are made.
        """
        self.eager, self.program, self.recompute, self.dump = eager, program, recompute, dump
        self.kernels, self.backend, self.split = kernels, backend, split and backend == "aot"
        self.loss_chunks = loss_chunks if self.backend == "aot" and not self.split else 1
        self.graphs: list[Graphs] = []
        self.trained: dict[tuple[bool, ...], Callable[..., Any]] = {}
        """By which inputs take a gradient; `eager` where AOTAutograd refused."""
        self.apart = ""
        """Why equal blocks were not lowered once for all, but one by one; the dump says it."""

    def __call__(self, *values: torch.Tensor) -> Any:
        wanted = tuple(v.requires_grad for v in values)
        if not torch.is_grad_enabled() or not any(wanted):
            return self.eager(*values)
        if wanted in self.trained:
            return self.trained[wanted](*values)
        blocks = Repeats(self.program.graph, decompositions_of(self.backend == "inductor"))
        if blocks.places:
            try:
                return self._lowered(wanted, values, blocks)
            except NotLowered as refused:  # the whole program is traced then, and what is refused in it is told
                self.apart = _said(refused.__cause__ or refused)
        try:
            return self._lowered(wanted, values, None)
        except NotLowered as refused:
            warnings.warn(str(refused), stacklevel=2)
            self.trained[wanted] = self.eager
            return self.eager(*values)

    def _lowered(self, wanted: tuple[bool, ...], values: Sequence[torch.Tensor], blocks: Repeats | None) -> Any:
        """Lower and run; equal blocks are traced once when they are given.

        Raises: NotLowered: AOTAutograd refuses the program.
        """
        # the interpreter hands each node's record on to the traced nodes; calling the module would lose it
        interpreter = _Following(self.eager, graph=None if blocks is None else blocks.graph)
        made = len(self.graphs)
        run = self._lowering(interpreter.run, values[0].device.type, blocks)
        try:
            with warnings.catch_warnings(), _unobserved(), nullcontext() if blocks is None else blocks.known():
                # anomaly mode, in which AOTAutograd traces, tells of a refusal in a warning of many lines
                warnings.filterwarnings("ignore", "Error detected in")
                # torch asks each input for its gradient; where warnings are errors, that would be a refusal
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                results = run(*values)
        except Exception as error:
            if len(self.graphs) > made:  # it was lowered: the error is one of running it
                raise
            raise NotLowered(_refusal(error, interpreter.at)) from error
        if self.backend == "aot":
            _keep_saved(results)
        read = self.graphs[-1].read
        leave_unused(results, read)

        def used(*values: torch.Tensor) -> Any:
            results = run(*values)
            leave_unused(results, read)
            return results

        self.trained[wanted] = used if len(results) > 1 else run
        return results

    def _lowering(self, run: Callable[..., Any], device: str, blocks: Repeats | None) -> Callable[..., Any]:
        """A function that lowers `run` on its first call."""
        parameters = frozenset(i for i, s in enumerate(self.program.sources) if s.kind == "parameter")
        mode = self.fusing(device) if self.backend == "aot" else None
        cut, inductor = Partition(parameters, self.recompute), self.backend == "inductor"
        passes = PASSES if mode is None else (*PASSES, Fuse(mode).run)
        if not inductor and not self.split:  # Inductor reuses memory itself; a split graph is run in another order
            passes = (*passes, FillBuckets().run, Reuse().run)
        late = self.split_backward if self.split else None
        early = () if mode is None and self.loss_chunks == 1 else (StreamCrossEntropy().run,)
        if self.loss_chunks > 1:
            early = (*early, ChunkLoss(self.loss_chunks).run)
        if blocks is not None:
            early = (Inline(blocks.places).run, *early)
        return lower_to_graphs(run, cut, passes, self.told, inductor, late, early)

    @property
    def splits(self) -> bool:
        """Does the backward leave weight gradients for later when it is asked to?"""
        return self.split and self.eager not in self.trained.values()

    def halves(self, backward: GraphModule) -> tuple[GraphModule, GraphModule, Split]:
        """The backward for what was received, and the rest of it for the weights."""
        weights = [i for i, s in enumerate(self.program.sources) if s.kind != "received"]
        return SplitBackward(weights).run(backward)

    def split_backward(self, backward: GraphModule) -> Callable[[list[Any]], Any]:
        first, second, shape = self.halves(backward)
        return splittable(boxed(backward), boxed(first), boxed(second), shape)

    def fusing(self, device: str) -> str | None:
        """How fused groups run on a device; None: nothing is fused."""
        return mode_of(self.kernels, device)

    def told(self, graphs: Graphs) -> None:
        self.graphs.append(graphs)
        if self.dump is not None:
            for which, text in (("forward", forward_text), ("backward", backward_text)):
                why = f"# equal blocks are traced one by one: {self.apart}\n" if self.apart else ""
                self.dump.write(f"lower_{which}", None, extra=why + text(graphs, self.program, self.dump.axes))
            printed = kernels_text(graphs)
            if printed:
                self.dump.write("fuse", None, extra=printed)


def _unobserved() -> AbstractContextManager[Any]:
    """Without the user's dispatch modes (a flop counter, a memory tracker): traced under one, ops fall into others."""
    return getattr(torch.utils._python_dispatch, "_disable_current_modes", nullcontext)()


def _keep_saved(results: Sequence[Any]) -> None:
    """Allow `backward(retain_graph=True)`: AOTAutograd refuses it, since a compiler may write into what is saved; no
    pass of ours does.
    """
    for value in results:
        made_by = getattr(getattr(value, "grad_fn", None), "_forward_cls", None)
        if hasattr(made_by, "metadata"):
            made_by.metadata.bw_donated_idxs = []


class NotLowered(Exception):
    """AOTAutograd refuses a program; the message is one line."""


class _Following(Interpreter):
    """Remembers the node it is at, or the last one when the whole forward has been run."""

    at: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.at = n
        return super().run_node(n)


def _said(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__


def _refusal(error: Exception, at: Node | None) -> str:
    """One line: which op, where in the user's code, what AOTAutograd says; or which error is ours."""
    if isinstance(error, PassError):
        return (
            f"backend='aot': a pass failed: {_said(error.__cause__ or error)}; this is a fault of autopar, and this "
            "program runs op by op, as under backend='eager'"
        )
    inside = [frame for frame in _frames(error) if is_user_file(frame[0]) and "/autopar/" not in frame[0]]
    if at is not None and at.op == "call_function":
        what = f"{op_text(at)} ({record(at).where or record(at).op})"
    elif inside:
        file, line, name = inside[-1]
        what = f"the backward in {name} ({file}:{line}, `{linecache.getline(file, line).strip()}`)"
    else:
        what = "the backward"
    return (
        f"backend='aot': AOTAutograd refuses {what}: {_said(error)}; "
        "this program runs op by op, as under backend='eager'"
    )


def _frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of the traceback, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, trace.tb_lineno, code.co_qualname
        trace = trace.tb_next
