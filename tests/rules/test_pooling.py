"""Pooling, resizing and windows: planes are cut, space is not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import prove

aten = torch.ops.aten
PLANES = {1: real(3, 3, 5), 2: real(3, 5, 4, 3), 3: real(3, 3, 3, 2, 3)}
SINGLE = {1: real(3, 5), 2: real(3, 4, 3), 3: real(3, 2, 2, 3)}


def pool(name: str, dims: int) -> tuple[Case, ...]:
    """Batched (with indices where there are any) and a single sample."""
    fn = getattr(F, name)
    if name.startswith("adaptive"):
        return (*case(lambda x: fn(x, 2), PLANES[dims]), *case(lambda x: fn(x, 2), SINGLE[dims]))
    return (*case(lambda x: fn(x, 2, padding=1), PLANES[dims]), *case(lambda x: fn(x, 2), SINGLE[dims]))


def with_indices(dims: int, adaptive: bool = False) -> tuple[Case, ...]:
    fn = getattr(F, f"{'adaptive_' if adaptive else ''}max_pool{dims}d")
    return case(lambda x: fn(x, 2, return_indices=True), PLANES[dims])


def unpool(dims: int) -> tuple[Case, ...]:
    fn = getattr(F, f"max_unpool{dims}d")
    places = torch.arange(0, 2 * 2**dims, 2).expand(3, 3, -1).reshape(3, 3, *[2] * dims)
    return case(lambda x, where: fn(x, where, 2), real(3, 3, *[2] * dims), places)


def fractional(dims: int) -> tuple[Case, ...]:
    op = getattr(aten, f"fractional_max_pool{dims}d").default
    samples = real(3, 5, dims, grad=False).sigmoid()
    return case(lambda x, s: op(x, [2] * dims, [2] * dims, s), real(3, 5, *[4] * dims), samples)


def resize(mode: str, dims: int, **options: object) -> tuple[Case, ...]:
    size = (3, 4, 2)[:dims]
    by_size = case(lambda x: F.interpolate(x, size=size, mode=mode, **options), PLANES[dims])
    if options.get("antialias"):
        return by_size
    return (*by_size, *case(lambda x: F.interpolate(x, scale_factor=2.0, mode=mode, **options), PLANES[dims]))


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
CASES: dict[str, tuple[Case, ...]] = {
    **{f"max_pool{d}d": pool(f"max_pool{d}d", d) for d in PLANES},
    **{f"max_pool{d}d_with_indices": with_indices(d) for d in PLANES},
    **{f"adaptive_max_pool{d}d": with_indices(d, adaptive=True) for d in PLANES},
    **{f"avg_pool{d}d": pool(f"avg_pool{d}d", d) for d in PLANES},
    **{f"adaptive_avg_pool{d}d": pool(f"adaptive_avg_pool{d}d", d) for d in PLANES},
    **{f"max_unpool{d}d": unpool(d) for d in (2, 3)},
    **{f"fractional_max_pool{d}d": fractional(d) for d in (2, 3)},
    **{f"upsample_nearest{d}d": resize("nearest", d) for d in PLANES},
    **{f"_upsample_nearest_exact{d}d": resize("nearest-exact", d) for d in PLANES},
    **{f"upsample_{mode}{d}d": resize(mode, d) for d, mode in LINEAR.items()},
    "upsample_bicubic2d": resize("bicubic", 2, align_corners=True),
    "_upsample_bilinear2d_aa": resize("bilinear", 2, antialias=True),
    "_upsample_bicubic2d_aa": resize("bicubic", 2, antialias=True),
    "grid_sampler": (
        *case(lambda x, g: F.grid_sample(x, g, align_corners=False), PLANES[2], real(3, 3, 2, 2)),
        *case(
            lambda x, g: F.grid_sample(x, g, align_corners=True, padding_mode="border"), PLANES[3], real(3, 2, 2, 1, 3)
        ),
    ),
    "grid_sampler_2d": case(lambda x, g: aten.grid_sampler_2d.default(x, g, 0, 0, False), PLANES[2], real(3, 3, 2, 2)),
    "grid_sampler_3d": case(
        lambda x, g: aten.grid_sampler_3d.default(x, g, 0, 0, False), PLANES[3], real(3, 2, 2, 1, 3)
    ),
    "affine_grid_generator": (
        *case(lambda x: F.affine_grid(x, (3, 2, 4, 2), align_corners=False), real(3, 2, 3)),
        *case(lambda x: F.affine_grid(x, (3, 2, 4, 2, 3), align_corners=True), real(3, 3, 4)),
    ),
    "im2col": (
        *case(lambda x: F.unfold(x, 2, padding=1), PLANES[2]),
        *case(lambda x: F.unfold(x, 2), real(3, 3, 3)),
    ),
    "col2im": (
        *case(lambda x: F.fold(x, (3, 3), 2), real(3, 20, 4)),
        *case(lambda x: F.fold(x, (3, 3), 2), real(12, 4)),
    ),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        for mesh in ("2", "3"):
            prove_op(op, each, mesh)


@pytest.mark.parametrize("op", ["max_pool2d_with_indices", "avg_pool2d", "im2col"])
def test_two_axes(op: str) -> None:
    prove_op(op, CASES[op][0], "2x2")


def test_no_rank_is_left_without_a_plane() -> None:
    """Pooling refuses empty dims: four planes on three ranks would be two, two and none."""
    four = real(4, 4, 4)
    assert not prove(lambda x: F.max_pool2d(x, 2), four, mesh="3", split=False).ops
    assert prove(lambda x: F.max_pool2d(x, 2), four, mesh="4").ops == {"max_pool2d"}
