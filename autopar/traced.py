"""Lowered graphs of a program that is not run here: traced on fake tensors, groups known by the names of their axes.

Enters: the program of one rank of any mesh. Leaves: its two graphs after all passes, and which results get a gradient.
Refused (`UnsupportedOpError`): what AOTAutograd refuses; attention for a device that this machine lacks, since which
ops it becomes is decided by the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from autopar.codegen.python_text import Traced
from autopar.compiled import Compiled
from autopar.errors import UnsupportedOpError
from autopar.mesh import LogicalMesh
from autopar.passes.lower import Graphs
from autopar.pipeline import on_device
from autopar.program import Program, record
from autopar.runtime.moves import use_groups
from autopar.runtime.transfer import AxisGroup


class _Made(Exception):
    """The graphs are made; there is nothing to run them on."""


class _Compiled(Compiled):
    """Ends when its graphs are made. fused: groups of ops become kernels, whatever this machine can run."""

    fused = False

    def told(self, graphs: Graphs) -> None:
        super().told(graphs)
        raise _Made

    def fusing(self, device: str) -> str | None:
        return "aten" if self.fused else None


def trace(
    program: Program,
    mesh: LogicalMesh,
    coordinate: tuple[int, ...],
    *,
    recompute: Mapping[str, str] | None = None,
    device: str = "cpu",
    fused: bool = False,
    loss_chunks: int = 1,
    split: bool = False,
) -> Traced:
    """The graphs of one rank.

    Args:    recompute: level by block. device: type of the device that will run them. fused: ops are joined to kernels.
             loss_chunks: parts of the rows in which logits are made. split: weight gradients may be made later.
    Raises:  UnsupportedOpError: see the module.
    """
    if device != "cpu" and not torch.cuda.is_available():
        _check_attention(program, device)
    on = torch.device(device if device == "cpu" or torch.cuda.is_available() else "cpu")
    eager = GraphModule(nn.Module(), on_device(program.graph, on))
    compiled = _Compiled(eager, program, recompute or {}, split=split, loss_chunks=loss_chunks)
    compiled.fused = fused
    groups = {a.name: AxisGroup(a.name, a.size, at) for a, at in zip(mesh.axes, coordinate, strict=True)}
    sources = tuple(zip(program.placeholders, program.sources, strict=True))
    with FakeTensorMode(allow_non_fake_inputs=True), use_groups(groups), warnings.catch_warnings():
        warnings.filterwarnings("error", message="backend='aot'")  # the refusal; what else torch warns of is no error
        values = [_fake(node.meta["val"], source.trainable, on) for node, source in sources]
        results = eager(*values)
        try:
            compiled(*values)
        except _Made:
            pass
        except UserWarning as refusal:
            raise UnsupportedOpError(str(refusal)) from None
    if not compiled.graphs:
        raise UnsupportedOpError(f"{program.name} has no parameter that takes a gradient: it has no backward graph")
    (graphs,) = compiled.graphs
    differentiable = tuple(i for i, r in enumerate(results) if isinstance(r, Tensor) and r.requires_grad)
    return Traced(graphs, differentiable, compiled.halves(graphs.backward) if split else None)


def _fake(like: Tensor, trainable: bool, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device, requires_grad=trainable)


def _check_attention(program: Program, device: str) -> None:
    for node in program.calls:
        if "scaled_dot_product" in str(node.target):
            raise UnsupportedOpError(
                f"{node.name} ({record(node).where}): attention becomes other ops on {device} than here, and this "
                f"machine has no {device}; export on one that has, without the backward, or for device='cpu'"
            )
