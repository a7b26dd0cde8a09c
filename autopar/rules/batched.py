"""Ops on each matrix or signal of a batch: linear algebra, Fourier transforms. Only batch dims are cut."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.rules.call import Call
from autopar.rules.rule import Rule, rule


def _matrices(*cores: int) -> Callable[[Call], Rule | None]:
    """Input k has `cores[k]` whole dims at its end and leading batch dims, which are broadcast."""

    def build(call: Call) -> Rule | None:
        if len(call.in_shapes) != len(cores) or any(len(s) < c for s, c in zip(call.in_shapes, cores, strict=True)):
            return None
        return _with_batch(call, list(cores))

    return build


def _with_batch(call: Call, core: list[int]) -> Rule | None:
    lead = max(len(s) - c for s, c in zip(call.in_shapes, core, strict=True))
    if any(len(s) < lead for s in call.out_shapes):
        return None
    core = [*core, *(len(s) - lead for s in call.out_shapes)]
    specs = [" ".join(["...", *(f"w{k}.{d}" for d in range(c))]) for k, c in enumerate(core)]
    whole = " ".join(f for spec in specs for f in spec.split()[1:])
    count = len(call.in_shapes)
    return rule(
        f"{', '.join(specs[:count])} -> {', '.join(specs[count:])}",
        call.in_shapes,
        call.out_shapes,
        whole=whole,
        filled=frozenset(f"e{d}" for d in range(lead)),
        saves=tuple(range(count)),
        saves_output=True,
    )


def solve(call: Call) -> Rule | None:
    """`... n n, ... n k -> ... n k`, or `... n n, ... n -> ... n` where the right side is a batch of vectors."""
    a, b = call.in_shapes
    left = bool(call.arg("left", True))
    vector = len(b) == 1 or (len(a) - 1 == len(b) and b == a[:-1])
    if not left:
        return None if vector else _with_batch(call, [2, 2])
    return _with_batch(call, [2, 1 if vector else 2])


def _transform(last: int | None) -> Callable[[Call], Rule | None]:
    """Fourier transforms over `dim`; without it over the last `last` dims, or all (or the last ones that `s` gives)."""

    def build(call: Call) -> Rule | None:
        rank = len(call.in_shapes[0])
        dim = call.arg("dim")
        if dim is None:
            s = call.arg("s")
            dim = list(range(rank))[-(len(s) if s else last or rank) :]
        at = {int(d) % rank for d in ([dim] if isinstance(dim, int) else dim)}
        left = " ".join(f"x{d}" if d in at else f"b{d}" for d in range(rank))
        right = " ".join(f"y{d}" if d in at else f"b{d}" for d in range(rank))
        whole = " ".join(f"x{d} y{d}" for d in at)
        n = math.prod(call.in_shapes[0])
        flop = 5.0 * n * math.log2(max(2, math.prod(call.in_shapes[0][d] for d in at)))
        filled = frozenset(f"b{d}" for d in range(rank))
        return rule(
            f"{left} -> {right}",
            call.in_shapes,
            call.out_shapes,
            whole=whole,
            filled=filled,
            linear=(frozenset({0}),),
            flop=flop,
        )

    return build


_ONE_MATRIX = (
    "linalg_inv linalg_inv_ex inverse linalg_det det linalg_slogdet slogdet logdet linalg_cholesky linalg_cholesky_ex"
    " linalg_qr linalg_svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals linalg_pinv"
    " linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_lu linalg_lu_factor linalg_lu_factor_ex"
    " cholesky_inverse"
)
_ONE_DIM = "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"
_TWO_DIMS = "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2"
_ALL_DIMS = "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift"

RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys(_ONE_MATRIX.split(), _matrices(2)),
    **dict.fromkeys("linalg_solve linalg_solve_ex".split(), solve),
    **dict.fromkeys("linalg_solve_triangular cholesky_solve triangular_solve".split(), _matrices(2, 2)),
    **dict.fromkeys(_ONE_DIM.split(), _transform(1)),
    **dict.fromkeys(_TWO_DIMS.split(), _transform(2)),
    **dict.fromkeys(_ALL_DIMS.split(), _transform(None)),
}
