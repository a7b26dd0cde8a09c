"""Kernels in Triton's interpreter against the ATen ops that they replace.

The reference of a half-precision group is the same ops in float32, without rounding in between but where the program
casts to half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from autopar.codegen.group import FusedGroup, run

HALF = (torch.bfloat16, torch.float16)


class InFloat32(Interpreter):
    """Runs a graph with half precision replaced by float32."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def widen(value: Any) -> Any:
            return torch.float32 if value in HALF else value

        args = tuple(widen(a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: widen(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        if "_softmax_backward_data" in str(target):
            args = (*args[:3], args[0].dtype)
        elif "_log_softmax" in str(target) or "_softmax" in str(target):
            args = (*args[:2], False)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        dtype = n.meta["val"].dtype if n.target is CAST else None
        return found.to(dtype).float() if dtype in HALF and n.all_input_nodes[0].meta["val"].dtype != dtype else found


CAST = torch.ops.aten._to_copy.default


def random_input(node: Node, generator: torch.Generator) -> Tensor:
    """A tensor like the placeholder's: numbers of a unit normal, small whole numbers, truth values."""
    fake = node.meta["val"]
    size = 1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True)) if fake.numel() else 0
    if fake.dtype.is_floating_point:
        memory = torch.randn(size, generator=generator, dtype=torch.float32)
        memory = memory.abs() if _positive(node) else memory
    elif fake.dtype == torch.bool:
        memory = torch.rand(size, generator=generator) < 0.5
    else:
        memory = torch.randint(int(_divides(node)), _least_table(node), (size,), generator=generator)
    return memory.to(fake.dtype).as_strided(fake.shape, fake.stride())


def _least_table(node: Node) -> int:
    """Indices stay inside every table that they, or what is taken out of them, are used with."""
    found = 4
    for user in node.users:
        name, args = str(user.target), user.args
        if "embedding" in name and args[1] is node:
            found = min(found, args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        elif "gather" in name and args[2] is node:
            found = min(found, args[0].meta["val"].shape[args[1]])  # type: ignore[union-attr,index]
        elif "gather" in name or "view" in name or "expand" in name:
            found = min(found, _least_table(user))
    return found


def _divides(node: Node) -> bool:
    """Is something divided by these whole numbers?"""
    return any("div" in str(u.target) and u.args[1] is node for u in node.users)


def _positive(node: Node) -> bool:
    """What a root or logarithm is taken of, maybe after an addition."""
    names = {str(u.target) for u in node.users} | {str(v.target) for u in node.users for v in u.users}
    return any(word in name for name in names for word in ("sqrt", "log.default", "log2", "log1p", "pow"))


def groups(module: GraphModule) -> list[FusedGroup]:
    """The fused groups of a graph, those with equal text once."""
    found = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            group = module.get_submodule(node.target)
            assert isinstance(group, FusedGroup)
            found.setdefault(group.code.printed.text, group)
    return list(found.values())


def check_group(group: FusedGroup, seed: int = 0) -> float:
    """The largest error of a kernel's results, as a share of what is allowed.

    Raises: AssertionError: the kernel differs from its ops by more than rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    places = [n for n in group.aten.graph.nodes if n.op == "placeholder"]
    inputs = tuple(
        torch.tensor([int(torch.randint(2**62, (), generator=generator)), 0])
        if _is_key(n)
        else random_input(n, generator)
        for n in places
    )
    wide = tuple(t.float() if t.dtype in HALF else t for t in inputs)
    expected = InFloat32(group.aten).run(*wide)
    found = run(group.code, inputs, interpret=True)
    plain = group.aten(*inputs)
    assert len(found) == len(expected) == len(plain)
    shares = []
    for out, reference, aten in zip(found, expected, plain, strict=True):
        assert (out.shape, out.dtype) == (aten.shape, aten.dtype)
        assert all(a == b or n == 1 for a, b, n in zip(out.stride(), aten.stride(), out.shape, strict=True))
        shares.append(share(out, reference, group.code.name))
    return max(shares)


def share(out: Tensor, reference: Tensor, name: str) -> float:
    """The largest error over what is allowed. float32: 1e-5 of the largest value, or of the inputs' unit size; half
    precision: on top of that one unit in the last place.

    Raises: AssertionError: it is more than 1.
    """
    if not out.dtype.is_floating_point:
        assert torch.equal(out, reference.to(out.dtype)), name
        return 0.0
    assert not reference.isnan().any(), f"{name}: the test's inputs give no number to compare with"
    finite = reference.isfinite()
    assert torch.equal(out[~finite].double(), reference[~finite].double()), f"{name}: other infinities"
    if not finite.any():
        return 0.0
    out, exact = out[finite], reference[finite].double().abs()
    allowed = 1e-5 * exact.max().clamp(min=0.1)
    if out.dtype in HALF:
        allowed = allowed + torch.finfo(out.dtype).eps * exact.clamp(min=torch.finfo(out.dtype).tiny)
    found = float(((out.double() - reference[finite].double()).abs() / allowed).max())
    assert found <= 1, f"{name}: {found:.2f} of the error that is allowed"
    return found


def _is_key(node: Node) -> bool:
    return any("dropout" in str(u.target) and u.args[1] is node for u in node.users)
