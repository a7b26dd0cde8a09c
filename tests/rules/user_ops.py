"""Ops and Functions such as a user writes; not one has a rule of autopar's."""

from __future__ import annotations

import torch


class RootMeanSquare(torch.autograd.Function):
    """`x / rms(x) * w` over the last dim, with its own backward."""

    @staticmethod
    def forward(ctx, x, w):
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, w, scale)
        return x * scale * w

    @staticmethod
    def backward(ctx, g):
        x, w, scale = ctx.saved_tensors
        inner = (g * w * x).mean(-1, keepdim=True)
        return scale * (g * w - x * scale.square() * inner), (g * x * scale).flatten(0, -2).sum(0)


class SignGradient(torch.autograd.Function):
    """A backward that is not linear in the gradient: a part of a gradient would give another sign."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g.sign()


class Halves(torch.autograd.Function):
    """Two outputs: one along with the rows, one summed over them."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp(), x.square().sum(0)

    @staticmethod
    def backward(ctx, g, g_sum):
        (x,) = ctx.saved_tensors
        return g * x.exp() + 2 * x * g_sum


@torch.library.custom_op("autopar_tests::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor, scale: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = scale * (x @ w.t())
    return out if bias is None else out + bias


@product.register_fake
def _product_fake(x, w, scale, bias=None):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.scale, ctx.has_bias = inputs[2], inputs[3] is not None


def _product_backward(ctx, g):
    x, w = ctx.saved_tensors
    bias = g.flatten(0, -2).sum(0) if ctx.has_bias else None
    return ctx.scale * g @ w, ctx.scale * g.flatten(0, -2).t() @ x.flatten(0, -2), None, bias


product.register_autograd(_product_backward, setup_context=_save)


@torch.library.custom_op("autopar_tests::roll_rows", mutates_args=())
def roll_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows depend on their neighbours; columns do not. No autograd formula."""
    return x.roll(1, 0) + x


@roll_rows.register_fake
def _roll_rows_fake(x):
    return torch.empty_like(x)
