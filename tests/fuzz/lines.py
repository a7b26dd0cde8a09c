"""One-line steps, by rule family, as text with fields.

Fields: {x} a value; {y} another of its shape; {w} a parameter of its shape; {d}, {e} two of its dims and {n} the size
of {d}; {k} an index and {k1} < {k2} bounds in {d}; {r} a small positive number; {m} a mask of its shape; {c} its last
size (dim -1), {p} a parameter of that size; {i} ids in [0, n), one dim; {s} its shape.
A prefix `2:` wants at least two dims, `3-4:` three or four. A line that doesn't fit its value is refused by torch and
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.draw import Drawing, Skip

LINES: dict[str, str] = {
    "pointwise": """
        torch.tanh({x}) | F.gelu({x}) | torch.relu({x}) | torch.sigmoid({x}) | F.silu({x}) | F.softplus({x})
        torch.sin({x}) * 2 | torch.cos({x}) | torch.exp(-{x}.square()) | {x}.abs() | -{x} | torch.log1p({x}.square())
        torch.rsqrt(1 + {x}.square()) | torch.erf({x}) | F.elu({x}) | F.leaky_relu({x}, 0.1) | {x}.clamp(-1, {r})
        F.mish({x}) | F.hardswish({x}) | F.logsigmoid({x}) | torch.reciprocal(2 + {x}.square()) | {x} ** 2 | {x} + {y}
        {x} + {y} | {x} * {y} | {x} - {y} | {x} / (1 + {y}.square()) | torch.maximum({x}, {y})
        torch.minimum({x}, {y}) | torch.atan2({x}, 2 + {y}.square()) | torch.where({m}, {x}, {y})
        torch.lerp({x}, {y}, 0.3) | torch.addcmul({x}, {y}, {w}, value=0.5) | torch.hypot({x}, 1 + {y})
        {x} * {w} + {x} | {x} + {p} | {x} * {p} | {x} * 0.5 + 1 | 1 - {x} | ({x} > {y}).double() * {x}
        {x}.masked_fill({m}, 0.3) | F.glu({x}, {d}) | F.prelu({x}, torch.full((1,), 0.25)) | {x}.detach() * {y}
        {x} + {x}.detach() | torch.add({x}, {y}, alpha=0.7) | torch.sub({x}, {y}, alpha=2) | {x}.sign() * {y}
        torch.view_as_real(torch.complex({x}, {y}) * torch.complex({y}, {x})).sum(-1) | {x}.lt(0.2).to(torch.float64)
        torch.complex({x}, {y}).abs() | {x}.mul(2).add(1).sigmoid() | {x}.round() + {x} | {x}.to(torch.float64) * {r}
    """,
    "view": """
        {x}.transpose({d}, {e}) | {x}.unsqueeze({d}) | {x}.flatten() | 2: {x}.flatten(0, 1) | 2: {x}.flatten(-2)
        2: {x}.mT | {x}.movedim({d}, {e}) | {x}.reshape(-1) * 1 | {x}.unflatten({d}, (2, -1))
        {x}.unflatten(-1, (-1, 2)) | {x}.unsqueeze(0).expand(3, *{s}) | {x}.unsqueeze(1) + {x}.unsqueeze(1)
        {x}.repeat(2, *([1] * len({s}))) | {x}.repeat_interleave(2, {d}) | torch.tile({x}, (2,))
        2: torch.rot90({x}, 1, ({d}, {e})) | {x}.swapaxes({d}, {e}).contiguous()
        {x}.unflatten({d}, (2, -1)).transpose(-1, {d}) | {x}.view_as({y}) | {x}.unflatten(0, (2, -1)).flatten(0, 1)
        {x}.unsqueeze(-1).squeeze(-1) | {x}.broadcast_to(2, *{s}) | {x}.clone()
        3: {x}.permute(2, 0, 1, *range(3, len({s}))) | 3: {x}.transpose(0, 1).flatten(1) | {x}.reshape(2, -1)
        3: {x}.unflatten(-1, (2, -1)).transpose(1, 2).flatten(-2) | 2: {x}.t() | {x}.ravel()
        {x}.reshape_as({y}).mul(2) | {x}.unflatten(-1, (-1, 4)) | 4-4: F.pixel_unshuffle({x}, 2)
        4-4: F.pixel_shuffle({x}, 2) | torch.broadcast_tensors({x}, {x}[:1])[1] * {x}
    """,
    "pieces": """
        torch.cat([{x}, {y}], {d}) | torch.cat([{x}, {y}, {x}], {d}) | torch.stack([{x}, {y}], {d})
        {x}.chunk(2, {d})[0] | {x}.chunk(2, {d})[1] * 2 | {x}.narrow({d}, {k1}, {k2} - {k1}) | {x}.select({d}, {k})
        {x}[..., :{k2}] | {x}[{k1}:] | {x}[..., -1] | {x}[..., ::2] | {x}.unbind({d})[{k}] | {x}.split({k2}, {d})[0]
        {x}.tensor_split(2, {d})[-1] | torch.slice_scatter({x}, {y}.narrow({d}, {k1}, {k2} - {k1}), {d}, {k1}, {k2})
        torch.hstack([{x}, {y}]) | torch.select_scatter({x}, {y}.select({d}, {k}), {d}, {k})
        torch.vstack([{x}, {y}]) | {x}[None] | {x}.split([{k2}, {n} - {k2}], {d})[1]
        torch.cat([{x}.narrow({d}, {k}, {n} - {k}), {x}.narrow({d}, 0, {k})], {d})
        torch.cat(list({x}.chunk(2, {d}))[::-1], {d}) | torch.stack({x}.unbind({d}), {e})
    """,
    "shift": """
        F.pad({x}, (1, 0)) | F.pad({x}, (1, 2), value=0.5) | 2: F.pad({x}, (0, 0, 1, 1)) | {x}.roll(1, {d})
        {x}.flip({d}) | 2: {x}.roll((1, 1), ({d}, {e})) | 2: {x}.tril() | 2: {x}.triu(1) | {x}.unfold({d}, 2, 1)
        {x}.unfold({d}, 2, 2) | 2: {x}.diagonal(0, {d}, {e}) | torch.diag_embed({x})
        2-3: F.pad({x}, (1, 1), mode='reflect') | F.pad({x}, (-1, 0)) | 3-4: F.pad({x}, (1, 1, 0, 0))
        2-3: F.pad({x}, (1, 0), mode='replicate') | 2-3: F.pad({x}, (1, 1), mode='circular')
        F.pad({x}, (1, 0))[..., :-1]
    """,
    "reduction": """
        {x}.sum({d}) | {x}.mean({d}) | {x}.sum({d}, keepdim=True) + {x} | {x}.mean({d}, True) * {x} | {x}.amax({d})
        {x}.amin({d}, True) - {x} | {x}.max({d}).values | {x}.min({d})[0] | (1 + {x}.tanh() * 0.1).prod({d})
        {x}.sum() | 2: {x}.mean(({d}, {e})) | {x}.mean() * {x} | ({x} > 0.3).any({d}).to(torch.float64)
        {x}.median({d})[0] | ({x} > -1).all({d}).double() | {x}.argmax({d}).double()
        F.one_hot({x}.argmax({d}), {n}).double() | {x}.nansum({d}) | 2: {x}.sum(({d}, {e}), keepdim=True) * 0.1 + {x}
        {x}.amax() | {x}.max() * {x} | {x}.kthvalue(1, {d})[0] | torch.count_nonzero({x} > 0, {d}).double()
        torch.aminmax({x}, dim={d})[0] | {x}.quantile(0.3, {d}) | {x}.argmin()
    """,
    "variance": """
        {x}.var({d}) | {x}.std({d}, unbiased=False) | {x}.norm(dim={d}) | torch.linalg.vector_norm({x}, 3, {d})
        torch.var_mean({x}, {d}, correction=0)[0] + 1 | {x} / (1e-3 + {x}.norm(dim={d}, keepdim=True)) | {x}.norm()
        ({x} - {x}.mean({d}, True)) / ({x}.var({d}, keepdim=True) + 0.1).sqrt() | F.normalize({x}, dim={d})
        {x}.var() | 2: torch.linalg.matrix_norm({x}) | torch.std_mean({x}, {d}, keepdim=True)[1] * {x}
        {x}.norm(1, {d})
    """,
    "softmax": """
        torch.softmax({x}, {d}) | {x}.softmax(-1) | F.log_softmax({x}, {d}) | torch.logsumexp({x}, {d})
        {x}.softmax(-1) * {y} | F.softmin({x}, {d}) | torch.softmax({x} * 3, {d}) @ {x}.mT
        torch.logsumexp({x}, {d}, True) - {x} | 2: torch.logsumexp({x}, ({d}, {e})) | F.log_softmax({x}, -1).exp()
    """,
    "scan": """
        {x}.cumsum({d}) | (1 + 0.1 * {x}.tanh()).cumprod({d}) | {x}.cummax({d})[0] | {x}.sort({d})[0]
        {x}.topk({k2}, {d})[0] | {x}.gather({d}, {x}.argsort({d})) | {x}.logcumsumexp({d}) | {x}.diff(dim={d})
        {x}.sort({d}, descending=True)[0] | {x}.gather({d}, {x}.topk({k2}, {d})[1]) | torch.cummin({x}, {d}).values
        torch.bucketize({x}, torch.arange(3.0) - 0.77) * {x}
    """,
    "scatter": """
        {x}.index_add({d}, {i}, {y}) | {x}.scatter_add({d}, {x}.argsort({d}), {y}) | {x}.index_fill({d}, {i}, 0.5)
        {x}.scatter({d}, {x}.argmax({d}, True), 0.5) | {x}.index_put(({i},), {p}, accumulate=True)
        {x}.index_copy({d}, {i}, {y}) | {x}.scatter_reduce({d}, {x}.argsort({d}), {y}, 'sum')
        {x}.scatter_reduce({d}, {x}.argsort({d}), {y}, 'amax')
        torch.zeros_like({x}).scatter({d}, {x}.topk({k2}, {d})[1], 1.0) * {y}
        {x}.scatter_add({d}, {x}.argsort({d}) // 2, {y})
        {x}.scatter_reduce({d}, {x}.argsort({d}), {y}, 'mean', include_self=False)
    """,
    "indexing": """
        {x}.index_select({d}, {i}) | {x}[{i}] | {x}.gather({d}, {x}.argsort({d}))
        torch.take_along_dim({x}, {x}.argmax({d}, True), {d}) | F.embedding({i}, {x}) | {x}[..., {i} % {c}]
        2: {x}[:, {i} % {x}.shape[1]] | {x}[torch.arange({x}.shape[0]), {x}.flatten(1).argmax(1) % {x}.shape[1]]
        2-2: F.embedding({i} % {x}.shape[0], {x}) | {x}[{i} % {x}.shape[0], None]
    """,
    "contraction": """
        2: {x} @ {y}.mT | 2: {x}.mT @ {y} | 2: torch.matmul({x}, {y}.transpose(-1, -2)) / 2
        3-3: torch.bmm({x}, {y}.mT) | torch.einsum('...i,...i->...', {x}, {y}) | {x} @ {p} | torch.inner({x}, {p})
        1-1: torch.outer({x}, {y}) | 2-2: torch.cdist({x}, {y} + 3) | 2-2: torch.addmm({w}.mT @ {w}, {x}.mT, {y})
        3-3: torch.einsum('bsd,btd->bst', {x}, {y}) | 3-3: torch.einsum('bsd,btd->dst', {x}, {y})
        3-3: torch.baddbmm({x} @ {y}.mT, {y}, {x}.mT, beta=0.5) | 1-1: torch.dot({x}, {y})
        2-2: torch.tensordot({x}, {y}, ([{d}], [{d}])) | 3-3: torch.einsum('abc,abd->acd', {x}, {y})
        torch.linalg.vecdot({x}, {y}, dim={d}) | 4-4: torch.einsum('bhsd,bhtd->bhst', {x}, {y}) * 0.5
        2-2: torch.mm({x}, {y}.t())
    """,
    "pooling": """
        3-3: F.max_pool1d({x}, 2) | 3-3: F.avg_pool1d({x}, 2, 1) | 3-3: F.adaptive_avg_pool1d({x}, 2)
        4-4: F.max_pool2d({x}, 2) | 4-4: F.avg_pool2d({x}, 2) | 3-3: F.interpolate({x}, scale_factor=2)
        3-3: F.interpolate({x}, scale_factor=2, mode='linear')
        4-4: F.interpolate({x}, scale_factor=2, mode='bilinear') | 4-4: F.adaptive_avg_pool2d({x}, 1)
        3-3: F.adaptive_max_pool1d({x}, 2) | 3-3: F.max_pool1d({x}, 3, 1, 1) | 4-4: F.unfold({x}, 2)
        3: F.max_pool1d({x}.flatten(2), 2) | 2: F.avg_pool1d({x}.unsqueeze(0).flatten(2), 2)
    """,
    "batched": """
        torch.fft.fft({x}).real | torch.fft.rfft({x}, dim={d}).abs()
        torch.fft.irfft(torch.fft.rfft({x}, dim={d}), n={n}, dim={d})
        3: torch.linalg.inv({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[-2]))
        3: torch.linalg.det({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[-2]))
        3: torch.linalg.cholesky({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[-2]))
        3: torch.matrix_exp({x} @ {x}.mT * 0.05)
        3: torch.linalg.solve({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[-2]), {y})
        3: torch.logdet({x} @ {x}.mT * 0.1 + torch.eye({x}.shape[-2])) | 2: torch.fft.fft2({x}).abs()
        torch.fft.fftshift({x}, {d}) | 3: torch.linalg.eigvalsh({x} @ {x}.mT)
    """,
    "random": """
        F.dropout({x}, 0.3, self.training) | F.dropout({x}, 0.5, True) | {x} * torch.rand_like({x})
        {x} + 0.1 * torch.randn_like({x}) | {x} * torch.bernoulli(torch.full_like({x}, 0.4))
        F.dropout({x} + {y}, 0.2, self.training)
    """,
}  # fmt: skip


class _Fields(dict):
    """Fields are drawn when a line first names them."""

    def __init__(self, g: Drawing, least: int, most: int) -> None:
        self.g = g
        x = g.pick(least=least, most=most)
        shape = g.shape(x)
        dims = g.rng.sample(range(len(shape)), len(shape))
        d, e = dims[0], dims[-1]
        n = shape[d]
        k2 = g.rng.randint(1, n)
        super().__init__(
            x=x, d=g.rng.choice((d, d - len(shape))) if g.rng.random() < 0.2 else d, e=e, n=n, k2=k2,
            k1=g.rng.randint(0, k2 - 1), k=g.rng.randint(0, n - 1), s=shape, c=shape[-1], r=g.rng.choice((0.5, 1.3)),
        )  # fmt: skip

    def __missing__(self, key: str) -> Any:
        g, x = self.g, self["x"]
        shape = g.shape(x)
        made = {
            "y": lambda: g.like(x),
            "w": lambda: g.param(*shape),
            "p": lambda: g.param(shape[-1]),
            "m": lambda: f"({g.like(x)} > 0.1)",
            "i": lambda: g.ids(self["n"], self["n"] if g.rng.random() < 0.7 else 2),
        }[key]()
        self[key] = made
        return made


def _template(line: str) -> Callable[[Drawing], str]:
    """A line of the table as a template."""
    before, colon, text = line.partition(": ")
    least, most = 1, 5
    if colon and before.replace("-", "").isdigit():
        low, dash, high = before.partition("-")
        least, most = int(low), int(high) if dash else 5
    else:
        text = line

    def run(g: Drawing) -> str:
        return g.emit(text.format_map(_Fields(g, least, most)))

    return run


def templates() -> dict[str, list[Callable[[Drawing], Any]]]:
    """By family, one template for each line of the table."""
    return {
        family: [_template(part.strip()) for row in table.strip().splitlines() for part in row.split(" | ")]
        for family, table in LINES.items()
    }


__all__ = ["LINES", "Skip", "templates"]
