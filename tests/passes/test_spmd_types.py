"""Local programs under a second, independent type checker: `spmd_types.checker` in its local mode.

A local program is interpreted on a fake process group. Parameters and inputs get the types of their layouts (S is its
V, "varying"), each `move` runs as the checker's own collective of that row of the table, every other node as the torch
function of its ATen op, which the checker types. What it derives must be what our layouts say, axis by axis, and a
program from which a move is taken away must be refused.

What the checker can't see: S(0) and S(1) are both V, so a softmax over a sharded dim passes (`test_check.py` refuses
that), and so is the result of a contraction over shards, which we retype V to P (`SUMS`) where our layout says so.
Values that carry no gradient are neither its I nor its R to us; they take the type of the op's other operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Interpreter, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.mesh import Mesh
from autopar.models import GPT, GPTConfig
from autopar.pipeline import Prepared, carry_out, choose, lower, prepare
from autopar.program import Program, record
from autopar.request import make_request
from autopar.rules.analyse import value_of
from autopar.runtime.moves import max_over, move
from autopar.runtime.transfer import parse_placement

aten = torch.ops.aten
WORLD = 4
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.distributed._functional_collectives:FutureWarning"
)  # spmd_types'

TORCH: dict[Any, Callable[..., Any]] = {
    aten.linear.default: F.linear,
    aten.embedding.default: lambda weight, ids, *_, **__: F.embedding(ids, weight),
    aten.layer_norm.default: lambda x, shape, weight=None, bias=None, eps=1e-5, *_: F.layer_norm(
        x, shape, weight, bias, eps
    ),
    aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    aten.cross_entropy_loss.default: lambda x, t, reduction: F.cross_entropy(
        x, t, reduction={0: "none", 2: "sum"}[reduction]
    ),
    aten.gelu.default: F.gelu,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.amax.default: torch.amax,
    aten.exp.default: torch.exp,
    aten.log.default: torch.log,
    aten.neg.default: torch.neg,
    aten.reshape.default: torch.reshape,
    aten.view.default: torch.reshape,
    aten.flatten.using_ints: torch.flatten,
    aten.squeeze.dim: torch.squeeze,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.transpose.int: torch.transpose,
    aten.gather.default: torch.gather,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.arange.default: lambda end, **_: torch.arange(end),
    aten.arange.start: lambda start, end, **_: torch.arange(start, end),
}
"""The checker types torch functions; an ATen overload is an unknown function to it, in which P is refused."""

SUMS = (
    aten.linear.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.cross_entropy_loss.default,
    aten.masked_fill.Scalar,  # the rows of other ranks' vocabulary, zeroed
)
"""Ops whose sum over a factor that is cut is a part of the sum: the checker finds V, we mean P."""

MODES: dict[str, dict[str, Any]] = {
    "dp x tp": {"dp": 2, "tp": 2},
    "tp": {"tp": 4},
    "dp": {"dp": 4},
    "zero3": {"dp": 2, "tp": 2, "zero": 3},
    "sp": {"dp": 2, "tp": 2, "sp": True},
}


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


class Typed(Interpreter):
    """Runs rank 0's program under the checker and compares the types it derives with our layouts."""

    def __init__(self, program: Program, prepared: Prepared, axes: dict[str, Any], dropped: str | None = None) -> None:
        super().__init__(GraphModule(torch.nn.Module(), program.graph))
        self.axes, self.dropped = axes, dropped
        self.grads = prepared.analysis.grads
        self.compared = 0
        self.skipped: set[str] = set()
        self.carries = self._carrying(program)

    def _carrying(self, program: Program) -> set[Node]:
        """Nodes whose value takes a gradient."""
        found: set[Node] = set()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                takes = self.grads[value_of(node)]
            else:
                takes = node.op == "call_function" and any(n in found for n in node.all_input_nodes)
                takes = takes and node.target is not max_over and node.meta["val"].is_floating_point()
            if takes:
                found.add(node)
        return found

    def types_of(self, node: Node) -> dict[Any, Any] | None:
        """Our layout in the checker's words; None inside the local program of one op."""
        layout = record(node).layout
        kinds = {"I": spmd.I, "R": spmd.R, "S": spmd.V, "P": spmd.P}
        return None if layout is None else {a: kinds[p.kind] for a, p in zip(self.axes.values(), layout, strict=True)}

    def cut_on(self, node: Node) -> set[Any]:
        """Axes on which an untyped value is V: by its layout, or inside the local program of one op by its inputs."""
        types = self.types_of(node)
        if types is None:
            return set().union(*(self.cut_on(m) for m in node.all_input_nodes))
        return {axis for axis, kind in types.items() if kind is spmd.V}

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            with spmd.no_typecheck():
                value = super().run_node(n).detach().clone().requires_grad_(n in self.carries)
            return spmd.assert_type(value, self.types_of(n)) if n in self.carries else value
        if n.op == "output":
            return super().run_node(n)
        args = torch.fx.node.map_arg(n.args, self.env.__getitem__)
        kwargs = torch.fx.node.map_arg(n.kwargs, self.env.__getitem__)
        if n not in self.carries:
            return self._without_gradient(n, args, kwargs)
        if n.target is move:
            if n.name == self.dropped:
                return self._unmoved(n, args[0])
            return self._check(n, self._move(*args))
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), functools.partial(self._lend, n))
        if n.target is aten.linear.default and len(args) > 2 and args[2] is not None:
            product = self._retyped(n, F.linear(*args[:2]))
            return self._check(n, torch.add(product, args[2]))
        function = TORCH.get(n.target)
        if function is None:
            self.skipped.add(str(n.target))
            with spmd.no_typecheck():
                value = n.target(*args, **kwargs)
            return spmd.assert_type(value, self.types_of(n) or {})
        return self._check(n, function(*args, **kwargs))

    def _unmoved(self, n: Node, x: Tensor) -> Tensor:
        """The value as it was, but of the size that the move would have given it."""
        with spmd.no_typecheck():
            value = x
            for dim, size in enumerate(n.meta["val"].shape):
                value = value.narrow(dim, 0, size)
            value = value.clone()
        return spmd.assert_type(value, dict(spmd.get_local_type(x)))

    def _without_gradient(self, n: Node, args: Any, kwargs: Any) -> Tensor:
        """Ids, masks, counts: run untyped; the op that reads them beside a typed value decides what they are."""
        with spmd.no_typecheck():
            if n.target in (move, max_over):
                value = n.meta["val"]
                return torch.zeros(value.shape, dtype=value.dtype)
            return n.target(*args, **kwargs)

    def _lend(self, n: Node, leaf: Any) -> Any:
        """An untyped operand is V where it is cut itself, else I where all typed operands are I, else R."""
        if not isinstance(leaf, Tensor) or spmd.has_local_type(leaf):
            return leaf
        own = next((self.cut_on(m) for m in n.all_input_nodes if self.env[m] is leaf), set())
        typed = [spmd.get_local_type(self.env[m]) for m in n.all_input_nodes if m in self.carries]
        with spmd.no_typecheck():
            copy = leaf.detach().clone()
        types = {
            axis: spmd.V if axis in own else spmd.I if all(t[axis] is spmd.I for t in typed) else spmd.R
            for axis in self.axes.values()
        }
        return spmd.assert_type(copy, types)

    def _retyped(self, n: Node, value: Tensor) -> Tensor:
        wanted, derived = self.types_of(n), spmd.get_local_type(value)
        for axis, kind in (wanted or {}).items():
            if n.target in SUMS and kind is spmd.P and derived.get(axis) is spmd.V:
                spmd.mutate_type(value, axis, src=spmd.V, dst=spmd.P)
        return value

    def _check(self, n: Node, value: Tensor) -> Tensor:
        derived = spmd.get_local_type(self._retyped(n, value))
        for axis, wanted in (self.types_of(n) or {}).items():
            found = derived.get(axis)
            assert found is wanted, f"{n.name} ({n.target}): the checker says {found} on {axis}, our layout {wanted}"
            self.compared += 1
        return value

    def _move(self, x: Tensor, axis: str, source: str, target: str, uncut: tuple[tuple[int, ...], ...] = ()) -> Tensor:
        """A row of the table as the checker's own differentiable collective."""
        (kind, part), (to_kind, to_part) = parse_placement(source), parse_placement(target)
        flat, local = [n for dim in uncut for n in dim], []
        size = self.axes[axis].size()
        local = [n // size if j == part else n for j, n in enumerate(flat)]
        if uncut:
            x = torch.reshape(x, local)
        types = {"I": spmd.I, "R": spmd.R, "P": spmd.P}
        src = spmd.S(part) if kind == "S" else types[kind]
        dst = spmd.S(to_part) if to_kind == "S" else types[to_kind]
        if {kind, to_kind} <= {"I", "R", "P"} and "P" not in kind:
            x = spmd.convert(x, self.axes[axis], src=src, dst=dst, expert_mode=True)
        else:
            x = spmd.redistribute(x, self.axes[axis], src=src, dst=dst)
        if not uncut:
            return x
        shape, at = [], 0
        for dim in uncut:
            sizes = x.shape[at : at + len(dim)]
            shape.append(int(torch.Size(sizes).numel()))
            at += len(dim)
        return torch.reshape(x, shape)


@functools.cache
def planned(mode: str, tied: bool = True) -> tuple[Prepared, Program, Any]:
    """GPT of two layers in one of the modes: the local program of rank 0, and the mesh. Planned for GPUs: gloo has no
    reduce-scatter, so that a plan for processors adds up everywhere and takes a part.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=64, context=16, layers=2, heads=4, width=32, ff_width=64, tied=tied)).double()
    ids = torch.randint(1, 64, (8, 8))
    request = make_request(
        Mesh("4", device="a100-sxm-80gb"), MODES[mode], None, None, "adamw", "auto", None, "eager", False, False, None
    )
    prepared = prepare(model, (ids, ids), {}, name="gpt", outputs="auto")
    plan = choose(prepared, request.topology, request.profile, request.settings, recompute=("none",))
    found, decisions = carry_out(prepared, plan, request.profile, request.settings)
    lowered = lower(prepared, decisions, found.mesh, request.profile, found.mesh.coordinate(0), torch.device("cpu"))
    return prepared, lowered.program, found.mesh


def typed(mode: str, dropped: str | None = None) -> Typed:
    """Run a mode's program under the checker, perhaps without one move."""
    prepared, program, mesh = planned(mode)
    sizes = tuple(a.size for a in reversed(mesh.axes))
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(a.name for a in reversed(mesh.axes)))
    axes = {a.name: spmd.normalize_axis(device_mesh.get_group(a.name)) for a in mesh.axes}
    values = []
    for node in program.placeholders:
        like = node.meta["val"]
        values.append(
            torch.randn(like.shape, dtype=like.dtype)
            if like.is_floating_point()
            else torch.ones(like.shape, dtype=like.dtype)
        )
    interpreter = Typed(program, prepared, axes, dropped)
    with spmd.set_current_mesh(device_mesh), spmd.checker.typecheck(local=True):
        interpreter.run(*values)
    return interpreter


@pytest.mark.parametrize("mode", MODES)
def test_a_second_checker_derives_our_layouts(mode: str) -> None:
    ran = typed(mode)
    _, program, mesh = planned(mode)
    assert not ran.skipped, f"ops that the checker was not asked about: {ran.skipped}"
    with_layout = [n for n in ran.carries - set(program.placeholders) if record(n).layout is not None]
    assert ran.compared == len(mesh.axes) * len(with_layout) > 40


def moves(mode: str, source: str, target: str) -> list[str]:
    """Names of the differentiable moves of one row of the table."""
    prepared, program, _ = planned(mode)
    carries = Typed(program, prepared, {}).carries
    found = [
        n.name for n in program.graph.nodes
        if n.target is move and n in carries and (n.args[2][0], n.args[3][0]) == (source, target)
    ]  # fmt: skip
    assert found, f"no {source} -> {target} in {mode}"
    return found


@pytest.mark.parametrize(
    ("mode", "source", "target"),
    [
        ("dp x tp", "I", "R"),
        ("dp x tp", "P", "I"),
        ("dp", "I", "R"),
        ("tp", "P", "I"),
        ("zero3", "P", "I"),
        ("sp", "P", "S"),
    ],
)
def test_a_missing_move_is_refused(mode: str, source: str, target: str) -> None:
    found = moves(mode, source, target)
    for name in {found[0], found[len(found) // 2], found[-1]}:
        with pytest.raises((spmd.SpmdTypeError, AssertionError), match=r"(?i)type|the checker says"):
            typed(mode, dropped=name)
