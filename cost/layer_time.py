"""Seconds of a transformer layer, its embedding and its head, from sizes.

Enters: a `Transformer`, a `Shard`, a hardware `Profile`. Leaves: a `Pass` each: seconds of the forward, of the
gradient by inputs and of the gradient by weights (the halves that zero-bubble schedules part). Refused: nothing of its
own.

Matrix products are priced by `compute.matmul_s`, their gradients as the transposed products. Between them stand
memory-bound ops, priced by the bytes of their fused form times what a framework moves in excess. A layer takes at
least as long as the host needs to launch its kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from autopar.cost.compute import memory_bound_s
from autopar.cost.fitted import FITTED, Fitted
from autopar.cost.hardware import Profile
from autopar.cost.op_time import COPIED_HEADS, attention_s, embedding_bytes, loss_bytes, odd_head, product_s
from autopar.cost.transformer import (
    ELEMENT_BYTES,
    Product,
    Shard,
    Transformer,
    attention_products,
    causal_flop,
    dispatch_products,
    linear_products,
)

_KERNELS = 20  # [derived] kernels of one direction of a layer: products, norms, residuals, activation, copies


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of a piece of the model for one micro-batch on one rank.

    attention_s: the part of `forward_s` that selective recompute runs again: scores, softmax and weighted sum.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    attention_s: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.forward_s + other.forward_s,
            self.input_s + other.input_s,
            self.weight_s + other.weight_s,
            self.attention_s + other.attention_s,
        )

    def __mul__(self, times: float) -> Pass:
        return Pass(self.forward_s * times, self.input_s * times, self.weight_s * times, self.attention_s * times)


def layer(model: Transformer, shard: Shard, profile: Profile, fitted: Fitted = FITTED, moe: bool = False) -> Pass:
    """Seconds of one layer. moe: its network is a mixture."""
    forward, input_, weight = products_s(linear_products(model, shard, moe), shard.dtype, profile)
    routed = products_s(dispatch_products(model, shard), shard.dtype, profile) if moe else (0.0, 0.0, 0.0)
    attention = _attention(model, shard, profile, fitted)
    moved, moved_back = pointwise_bytes(model, shard, moe)
    traffic = fitted.fused_traffic if shard.fused else fitted.eager_traffic
    launch_s = _KERNELS / 2 * profile.kernel_launch_s  # those that are not priced one by one
    forward += routed[0] + attention.forward_s + memory_bound_s(moved * traffic, profile) + launch_s
    input_ += routed[1] + routed[2] + attention.input_s + memory_bound_s(moved_back * traffic, profile) + launch_s
    host_s = _KERNELS * fitted.host_kernel_s
    return Pass(max(forward, host_s), max(input_, host_s), max(weight, host_s / 2), attention.forward_s)


def head(model: Transformer, shard: Shard, profile: Profile, fitted: Fitted = FITTED) -> Pass:
    """Seconds of the logits and their cross entropy."""
    tokens, columns = shard.tokens(model), model.vocab / shard.tp
    forward, input_, weight = products_s([(1, tokens, columns, model.hidden)], shard.dtype, profile)
    moved, moved_back = loss_bytes(tokens * columns, ELEMENT_BYTES, fitted)
    return Pass(forward + memory_bound_s(moved, profile), input_ + memory_bound_s(moved_back, profile), weight)


def embedding(model: Transformer, shard: Shard, profile: Profile) -> Pass:
    """Seconds of the lookup, and of adding gradients to rows of a cleared table."""
    moved = shard.tokens(model) * model.hidden * ELEMENT_BYTES
    table = model.embedding_parameters / shard.tp * ELEMENT_BYTES
    forward, backward = embedding_bytes(moved, table)
    return Pass(memory_bound_s(forward, profile), 0.0, memory_bound_s(backward, profile))


def products_s(products: list[Product], dtype: str, profile: Profile) -> tuple[float, float, float]:
    """Seconds of all products, of their gradients by inputs and of their gradients by weights."""
    return _products_s(tuple(products), dtype, profile) if products else (0.0, 0.0, 0.0)


@functools.lru_cache(maxsize=16384)
def _products_s(products: tuple[Product, ...], dtype: str, profile: Profile) -> tuple[float, float, float]:
    b, m, n, k = np.array(products, dtype=np.float64).T
    forward, left, right = product_s(2 * b * m * n * k, m, n, k, dtype, profile)
    return float(forward.sum()), float(left.sum()), float(right.sum())


def _attention(model: Transformer, shard: Shard, profile: Profile, fitted: Fitted) -> Pass:
    products = attention_products(model, shard)
    if shard.attention == "plain":
        slow = odd_head(model.head_size, profile, fitted)
        forward, input_, weight = products_s(products, shard.dtype, profile)
        # scale, mask and softmax in one kernel: read, write; dropout: read, write and a mask of bytes
        scores = shard.sequences * model.heads / shard.tp * model.seq * model.seq / shard.cp * fitted.score_traffic
        dropout = 5 if shard.dropout else 0
        forward = forward * slow + memory_bound_s(scores * (4 + dropout), profile)
        backward = (input_ + weight) * slow + memory_bound_s(scores * (6 + dropout), profile)
        return Pass(forward, backward, 0.0, forward)
    native = shard.attention == "native"
    forward, backward = attention_s(
        causal_flop(model, shard), model.head_size, shard.dtype, profile, fitted, native
    )  # the kernel skips the masked half
    return Pass(forward, backward, 0.0, forward)


def pointwise_bytes(model: Transformer, shard: Shard, moe: bool = False) -> tuple[float, float]:
    """Bytes that ideally fused norms, residuals, activations and copies of a layer move, forward and backward."""
    tokens, h = shard.tokens(model), model.hidden
    whole = tokens * h / (shard.tp if shard.sp else 1)  # norms and residuals: whole without sequence parallelism
    local = tokens * h / shard.tp
    inner = tokens * model.ffn / shard.tp * (model.top_k if moe else 1)
    norm, norm_back = 2 * 4, 2 * 6  # read, write; read gradient and input, write
    add, add_back = (2 * 7, 2 * 3) if shard.dropout else (2 * 6, 2 * 2)  # two reads, a write; a mask of bytes
    act, act_back = (6, 10) if model.gated else (4, 6)
    copies = COPIED_HEADS * ELEMENT_BYTES
    routed = 8 * tokens * h * model.top_k if moe else 0.0  # to experts and back
    forward = whole * (norm + add) + inner * act + local * copies + routed
    return forward, whole * (norm_back + add_back + 4) + inner * act_back + local * copies + routed
