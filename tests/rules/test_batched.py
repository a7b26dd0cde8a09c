"""Linear algebra and Fourier transforms on shards of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import prove

aten, linalg, fft = torch.ops.aten, torch.linalg, torch.fft
SQUARE = (real(5, 3, 3, grad=False) + 3 * torch.eye(3, dtype=torch.float64)).requires_grad_()
_half = real(3, 2, 3, 3, grad=False)
POSITIVE = (_half @ _half.mT + 3 * torch.eye(3, dtype=torch.float64)).requires_grad_()
RIGHT = real(5, 3, 2, seed=1)
SIGNAL = real(5, 3, 6)
WAVE = torch.view_as_complex(real(5, 3, 4, 2, grad=False)).requires_grad_()

KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def one(fn: Callable, x: Tensor = SQUARE) -> tuple[Case, ...]:
    return case(lambda x: fn(x), x)


def transform(name: str) -> tuple[Case, ...]:
    fn = getattr(fft, name)
    x = WAVE if name.startswith(("irfft", "hfft")) else SIGNAL
    return case(lambda x: fn(x, dim=(1, 2)), x) if name.endswith("n") else case(lambda x: fn(x), x)


CASES: dict[str, tuple[Case, ...]] = {
    "linalg_inv": one(linalg.inv),
    "linalg_inv_ex": one(lambda x: linalg.inv_ex(x)[0]),
    "inverse": one(torch.inverse),
    "linalg_det": one(linalg.det),
    "det": one(torch.det),
    "linalg_slogdet": one(lambda x: linalg.slogdet(x)[1]),
    "slogdet": one(lambda x: torch.slogdet(x)[1]),
    "logdet": one(torch.logdet, POSITIVE),
    "linalg_cholesky": one(linalg.cholesky, POSITIVE),
    "linalg_cholesky_ex": one(lambda x: linalg.cholesky_ex(x)[0], POSITIVE),
    "cholesky_inverse": one(torch.cholesky_inverse, POSITIVE),
    "linalg_qr": one(linalg.qr),
    "linalg_svd": one(lambda x: linalg.svd(x, full_matrices=False)),
    "linalg_svdvals": one(linalg.svdvals),
    "linalg_eigh": one(linalg.eigh, POSITIVE),
    "linalg_eigvalsh": one(linalg.eigvalsh, POSITIVE),
    "linalg_eig": one(lambda x: linalg.eig(x)[0].real.sum(-1), POSITIVE),
    "linalg_eigvals": one(lambda x: linalg.eigvals(x).abs().sum(-1), POSITIVE),
    "linalg_pinv": one(linalg.pinv),
    "linalg_matrix_exp": one(linalg.matrix_exp),
    "matrix_exp": one(torch.matrix_exp),
    "linalg_matrix_power": one(lambda x: linalg.matrix_power(x, 3)),
    "matrix_power": one(lambda x: torch.matrix_power(x, 2)),
    "linalg_lu": one(linalg.lu),
    "linalg_lu_factor": one(lambda x: linalg.lu_factor(x)[0]),
    "linalg_lu_factor_ex": one(lambda x: linalg.lu_factor_ex(x)[0]),
    "linalg_solve": (
        *case(lambda a, b: linalg.solve(a, b), SQUARE, RIGHT),
        *case(lambda a, b: linalg.solve(a, b), SQUARE, real(5, 3)),
        *case(lambda a, b: linalg.solve(a, b), SQUARE, real(3)),
        *case(lambda a, b: linalg.solve(a, b), SQUARE[0].detach(), RIGHT),
        *case(lambda a, b: linalg.solve(a, b, left=False), SQUARE, real(5, 2, 3)),
    ),
    "linalg_solve_ex": case(lambda a, b: linalg.solve_ex(a, b)[0], SQUARE, RIGHT),
    "linalg_solve_triangular": case(lambda a, b: linalg.solve_triangular(a, b, upper=True), SQUARE, RIGHT),
    "triangular_solve": case(lambda a, b: aten.triangular_solve.default(b, a)[0], SQUARE, RIGHT),
    "cholesky_solve": case(lambda a, b: torch.cholesky_solve(b, a), SQUARE, RIGHT),
    **{f"fft_{kind}{dims}": transform(f"{kind}{dims}") for kind in KINDS for dims in ("", "2", "n")},
    "fft_fftshift": case(lambda x: fft.fftshift(x, dim=-1), SIGNAL),
    "fft_ifftshift": case(lambda x: fft.ifftshift(x, dim=(1, 2)), SIGNAL),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        for mesh in ("2", "3"):
            prove_op(op, each, mesh)


def test_two_axes() -> None:
    prove(lambda x: linalg.inv(x), real(4, 2, 2), mesh="2x2")
    prove(lambda x: fft.fft(x, n=5, dim=1), real(4, 3, 2), mesh="2x2")


def test_transforms_without_dims_and_with_sizes() -> None:
    """`s` counts the last dims; nothing given means all of them."""
    cut = prove(lambda x: fft.fftn(x, s=(2, 4)), SIGNAL, mesh="2").factors
    assert {name.partition(":")[2] for name in cut} == {"b0"}
    assert not prove(lambda x: fft.fftn(x), SIGNAL, mesh="2", split=False).factors
