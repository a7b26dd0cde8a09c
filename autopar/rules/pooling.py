"""Pooling, resizing and sliding windows: batch and channels are cut freely, space is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.fx import Node

from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule

if TYPE_CHECKING:
    from autopar.rules.local import Local

_FIRST = (frozenset({0}),)


def _planes(space: int, *, linear: bool = False) -> Callable[[Call], Rule | None]:
    """`n c space -> n c space'` for every tensor; the last `space` dims are whole, the others alike in all."""

    def build(call: Call) -> Rule | None:
        lead = len(call.in_shapes[0]) - space
        if lead < 1 or any(
            len(s) < lead or s[:lead] != call.in_shapes[0][:lead] for s in (*call.in_shapes, *call.out_shapes)
        ):
            return None
        shapes = [*call.in_shapes, *call.out_shapes]
        batch = [f"b{d}" for d in range(lead)]
        specs = [" ".join([*batch, *(f"s{k}.{d}" for d in range(len(s) - lead))]) for k, s in enumerate(shapes)]
        count = len(call.in_shapes)
        return rule(
            f"{', '.join(specs[:count])} -> {', '.join(specs[count:])}",
            call.in_shapes,
            call.out_shapes,
            whole=" ".join(f for spec in specs for f in spec.split() if f.startswith("s")),
            filled=frozenset(batch),
            linear=_FIRST if linear else (),
            saves=() if linear else (0,),
        )

    return build


def grid_sample(call: Call) -> Rule:
    """`n c space, n space' k -> n c space'`: every channel reads the same places."""
    rank = len(call.in_shapes[0])
    read = " ".join(f"x{d}" for d in range(rank - 2))
    made = " ".join(f"y{d}" for d in range(rank - 2))
    notation = f"n c {read}, n {made} k -> n c {made}"
    filled = frozenset(f"n c {made}".split())
    return rule(notation, call.in_shapes, call.out_shapes, whole=f"{read} k", filled=filled, saves=(0, 1))


def affine_grid(call: Call) -> Rule:
    """`n i j -> n space j`."""
    space = " ".join(f"s{d}" for d in range(len(call.out_shapes[0]) - 2))
    notation = f"n i j -> n {space} k"
    whole = f"i j k {space}"
    return rule(
        notation,
        call.in_shapes,
        call.out_shapes,
        whole=whole,
        filled=frozenset("n"),
        local=_affine_grid_local,
        linear=_FIRST,
    )


def _affine_grid_local(ctx: Local) -> Node:
    return ctx.same(size=[ctx.local_size("n"), *ctx.call.arg("size")[1:]])


def windows(call: Call) -> Rule:
    """unfold, fold (im2col, col2im): `n c space <-> n (c window) places`."""
    shape, out = call.in_shapes[0], call.out_shapes[0]
    unfold = call.target._schema.name == "aten::im2col"
    batch = "n " * (len(shape) == (4 if unfold else 3))
    planes, columns = f"{batch}c h w", f"{batch}(c k) p"
    channels = shape[-3] if unfold else out[-3]
    return rule(
        f"{planes} -> {columns}" if unfold else f"{columns} -> {planes}",
        call.in_shapes,
        call.out_shapes,
        whole="h w k p",
        sizes={"c": channels},
        filled=frozenset("nc"),
        linear=_FIRST,
    )


_BY_DIMS = {
    1: "max_pool1d max_pool1d_with_indices adaptive_max_pool1d",
    2: "max_pool2d max_pool2d_with_indices adaptive_max_pool2d fractional_max_pool2d max_unpool2d",
    3: "max_pool3d max_pool3d_with_indices adaptive_max_pool3d fractional_max_pool3d max_unpool3d",
}
_BY_DIMS_LINEAR = {
    1: "avg_pool1d adaptive_avg_pool1d upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d",
    2: "avg_pool2d adaptive_avg_pool2d upsample_bilinear2d upsample_bicubic2d upsample_nearest2d"
    " _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "avg_pool3d adaptive_avg_pool3d upsample_trilinear3d upsample_nearest3d _upsample_nearest_exact3d",
}

RULES: dict[str, Callable[[Call], Rule | None]] = {
    **{name: _planes(space) for space, names in _BY_DIMS.items() for name in names.split()},
    **{name: _planes(space, linear=True) for space, names in _BY_DIMS_LINEAR.items() for name in names.split()},
    "grid_sampler": grid_sample,
    "grid_sampler_2d": grid_sample,
    "grid_sampler_3d": grid_sample,
    "affine_grid_generator": affine_grid,
    "im2col": windows,
    "col2im": windows,
}
