"""Random numbers that know their place: an element draws the same number on every mesh, and again in the backward.

What enters: a key (two int64: 64 key bits and the index of the first element) and where the elements lie in the whole
value. What leaves: uniform or normal numbers, or the mask of a dropout. No state is kept: a number is a function of
(seed, stream, salt, global element index) alone, so a shard draws its part of the whole value's numbers and a
recomputation draws the same again.

    key  = splitmix64 chained over seed, stream, salt        (Python integers; the stream is the number of the call)
    bits = hash32(low 32 bits of the index; two words of key mixed with the high bits)

    x = golden index + k0 ; x ^= x >>> 16 ; x = c1 x + k1 ; x ^= x >>> 15 ; x = c2 x ; x ^= x >>> 16

with Knuth's golden ratio and the constants of C. Wellons' `lowbias32` ("Prospecting for Hash Functions", 2018). The
second word of key comes in the middle: added any later, keys that share the first give correlated numbers. Quality is
tested, not proved; nothing here is fit for cryptography. A mask needs the upper bits only and skips the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements hashed at a time on a CPU: the scratch memory stays in its cache."""
_CHUNK_ELSEWHERE = 1 << 26
_MASK64 = (1 << 64) - 1
_GOLDEN, _C1, _C2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
_SECOND = 0x94D049BB133111EB
"""Turns a key into that of the second word of an element."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What all random ops of one call of the program share."""

    seed: int
    stream: int
    """Tells the calls apart."""


class Draws:
    """The seed, and how many calls there were in train and in eval mode.

    Each mode has its own sequence, so that an evaluation between two training steps changes no mask.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.train_calls, self.eval_calls = seed & _MASK64, 0, 0

    def next(self, training: bool) -> Draw:
        """The draw of the call that begins; counts it."""
        stream = 2 * self.train_calls if training else 2 * self.eval_calls + 1
        self.train_calls, self.eval_calls = self.train_calls + training, self.eval_calls + (not training)
        return Draw(self.seed, stream)

    def to_tensor(self) -> Tensor:
        """int64 (seed, train calls, eval calls): what a checkpoint holds."""
        return torch.tensor([_signed(self.seed, 64), self.train_calls, self.eval_calls], dtype=torch.int64)

    def load(self, saved: Tensor) -> None:
        seed, self.train_calls, self.eval_calls = (int(v) for v in saved.tolist())
        self.seed = seed & _MASK64


_DRAW: ContextVar[Draw] = ContextVar("autopar_draw")


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Inside, programs draw with this seed and stream."""
    token = _DRAW.set(draw)
    try:
        yield
    finally:
        _DRAW.reset(token)


@dataclass(frozen=True, slots=True)
class Box:
    """Where local elements lie in the whole value: a box of it, in row-major order.

    Local element (i0, i1, ...) of a box of `sizes` is global element first + i0 strides[0] + i1 strides[1] + ...
    """

    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(first: int, sizes: Sequence[int], strides: Sequence[int], count: int) -> Box:
        """A box of `count` elements with dims that adjoin joined; without sizes the elements adjoin one another."""
        if not sizes:
            return Box(first, (count,), (1,))
        joined: list[tuple[int, int]] = []
        for size, stride in zip(sizes, strides, strict=True):
            if joined and joined[-1][1] == size * stride:
                joined[-1] = (joined[-1][0] * size, stride)
            elif size != 1:
                joined.append((size, stride))
        return Box(first, tuple(s for s, _ in joined) or (1,), tuple(s for _, s in joined) or (1,))


def key_of(draw: Draw, salt: int, first: int = 0) -> Tensor:
    """The key of one random op in one call: int64 (key bits, index of the first element); it stays on the CPU.

    salt: which op of the program. first: elements of the whole value before the first one of this micro-batch.
    """
    bits = 0
    for word in (draw.seed, draw.stream, salt):
        bits = _splitmix64(bits ^ (word & _MASK64))
    return torch.tensor([_signed(bits, 64), first], dtype=torch.int64)


def current_key(salt: int, first: int = 0) -> Tensor:
    """`key_of` the call that runs.

    Raises:  RuntimeError: outside `drawing`; a default would repeat its numbers in every call.
    """
    draw = _DRAW.get(None)
    if draw is None:
        raise RuntimeError("a program drew random numbers outside `autopar.runtime.random.drawing`")
    return key_of(draw, salt, first)


def uniform(key: Tensor, box: Box, out: Tensor) -> Tensor:
    """Fill the contiguous `out` with multiples of 2^-b in [0, 1), b the bits of its significand (53, or at most 24)."""
    flat = out.view(-1)
    if out.dtype == torch.float64:
        for start, stop, high, low in _pairs(key, box, out.device):
            wide = high.to(torch.float64).add_(2.0**31).mul_(2.0**21)
            flat[start:stop] = wide.add_(low.bitwise_right_shift_(11)).add_(2.0**20).mul_(2.0**-53)
        return out
    b = min(24, 1 - round(math.log2(torch.finfo(out.dtype).eps)))
    for start, stop, bits in _bits(key, box, out.device):
        flat[start:stop] = bits.bitwise_right_shift_(32 - b).to(torch.float32).add_(2.0 ** (b - 1)).mul_(2.0**-b)
    return out


def normal(key: Tensor, box: Box, out: Tensor) -> Tensor:
    """Fill the contiguous `out` with standard normal numbers.

    The first bit is the sign, the others are a uniform u in (0, 1/2) at which the distribution is inverted: up to 6.3
    standard deviations (8.3 in float64), and evenly fine in both tails.
    """
    flat = out.view(-1)
    if out.dtype == torch.float64:
        for start, stop, high, low in _pairs(key, box, out.device):
            negative = high < 0
            flip = high.bitwise_right_shift(31).bitwise_not_()
            wide = high.bitwise_xor_(flip).bitwise_and_(0x7FFFFFFF).to(torch.float64).mul_(2.0**21)
            wide.add_(low.bitwise_xor_(flip).bitwise_right_shift_(11).bitwise_and_(0x1FFFFF)).add_(0.5)
            flat[start:stop] = _signed_quantile(wide.mul_(2.0**-53), negative)
        return out
    for start, stop, bits in _bits(key, box, out.device):
        negative = bits < 0
        flip = bits.bitwise_right_shift(31).bitwise_not_()
        tail = bits.bitwise_xor_(flip).bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5)
        flat[start:stop] = _signed_quantile(tail.mul_(2.0**-32), negative)
    return out


def _signed_quantile(tail: Tensor, negative: Tensor) -> Tensor:
    depth = torch.special.ndtri(tail)
    return torch.where(negative, depth, -depth)


def keep(key: Tensor, box: Box, p: float, out: Tensor) -> Tensor:
    """Fill the contiguous bool `out`: False with probability p, to 2^-32."""
    flat, threshold = out.view(-1), _threshold(p)
    if threshold is None:
        return out.fill_(False)
    for start, stop, bits in _bits(key, box, out.device, upper=True):
        if out.device.type == "cpu":
            np.greater_equal(bits.numpy(), threshold, out=flat[start:stop].numpy())
        else:
            torch.ge(bits, threshold, out=flat[start:stop])
    return out


def dropout(key: Tensor, box: Box, p: float, x: Tensor) -> Tensor:
    """x / (1 - p) where `keep`, else 0; contiguous. A linear map of x, so its backward is itself."""
    out, threshold = torch.empty(x.shape, dtype=x.dtype, device=x.device), _threshold(p)
    if threshold is None:
        return out.zero_()
    source, flat, scale = x.detach().contiguous().view(-1), out.view(-1), 1.0 / (1.0 - p)
    by_numpy = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    for start, stop, bits in _bits(key, box, x.device, upper=True):
        here, there = source[start:stop], flat[start:stop]
        if by_numpy:
            np.multiply(here.numpy(), np.greater_equal(bits.numpy(), threshold), out=there.numpy())
            np.multiply(there.numpy(), scale, out=there.numpy())
        else:
            torch.mul(here, torch.ge(bits, threshold, out=torch.empty_like(here)).mul_(scale), out=there)
    return out


def _threshold(p: float) -> int | None:
    """Bits below it are dropped; None where none are kept."""
    found = round(p * 2.0**32)
    return found - 2**31 if found < 2**32 else None


def _pairs(key: Tensor, box: Box, device: torch.device) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """As `_bits`, with two words for each element."""
    second = torch.stack([key[0] ^ _signed(_SECOND, 64), key[1]])
    for (start, stop, high), (_, _, low) in zip(_bits(key, box, device), _bits(second, box, device), strict=True):
        yield start, stop, high, low


def _bits(key: Tensor, box: Box, device: torch.device, *, upper: bool = False) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, int32 of 32 random bits) for runs of local elements; the next run overwrites the tensor.

    upper: only the upper half of the bits is good.
    """
    word, at = (int(v) for v in key.tolist())
    scratch = torch.empty((2, 0), dtype=torch.int32, device=device)
    for start, rows, columns, scaled, first, last in _runs(box, at + box.first, device):
        stop = start + len(rows) * len(columns)
        if scratch.shape[1] < stop - start:
            scratch = torch.empty((2, stop - start), dtype=torch.int32, device=device)
        bits, spare = scratch[0, : stop - start], scratch[1, : stop - start]

        def hashed(
            out: Tensor, high: int, rows: Tensor = rows, scaled: Tensor = scaled, spare: Tensor = spare
        ) -> Tensor:
            k0, k1 = _words(word, high)
            sums = out.view(len(rows), len(scaled))
            if out.device.type == "cpu":
                np.add(_low(rows).add_(k0).numpy()[:, None], scaled.numpy(), out=sums.numpy())
            else:
                torch.add(_low(rows).add_(k0)[:, None], scaled, out=sums)
            return _hash(out, spare, k1, upper)

        found = hashed(bits, first >> 32)
        for high in range((first >> 32) + 1, (last >> 32) + 1):
            other = hashed(torch.empty_like(bits), high)
            found = torch.where((rows[:, None] + columns).view(-1) >= high << 32, other, found)
        yield start, stop, found


def _low(index: Tensor) -> Tensor:
    """The golden ratio times the low 32 bits; the cast and all sums and products wrap around."""
    return index.to(torch.int32).mul_(_signed(_GOLDEN, 32))


def _runs(box: Box, first: int, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor, Tensor, int, int]]:
    """Runs of a chunk: (local start, index of each row, offset of each column, `_low` of it, first and last index)."""
    size = CHUNK if device.type == "cpu" else _CHUNK_ELSEWHERE
    width, stride = box.sizes[-1], box.strides[-1]
    if 0 in box.sizes:
        return
    starts = torch.full((), first, dtype=torch.int64, device=device)
    for outer, step in zip(box.sizes[:-1], box.strides[:-1], strict=True):
        starts = starts[..., None] + torch.arange(outer, device=device) * step
    starts = starts.reshape(-1)
    columns = torch.arange(min(width, size), device=device) * stride
    scaled, at_once = _low(columns), max(1, size // width)
    lowest = starts[::at_once].tolist()
    highest = [*starts[at_once - 1 :: at_once].tolist(), int(starts[-1])]
    for number, row in enumerate(range(0, len(starts), at_once)):
        for column in range(0, width, size):
            length, moved = min(size, width - column), column * stride
            rows = starts[row : row + at_once] + moved
            last = highest[number] + moved + (length - 1) * stride
            yield row * width + column, rows, columns[:length], scaled[:length], lowest[number] + moved, last


def _hash(x: Tensor, spare: Tensor, k1: int, upper: bool) -> Tensor:
    """Mix int32 in place. `spare`: scratch of the same size. Shifts are logical: torch's arithmetic ones get masked."""
    return (_hash_by_numpy if x.device.type == "cpu" else _hash_by_torch)(x, spare, k1, upper)


def _hash_by_torch(x: Tensor, spare: Tensor, k1: int, upper: bool) -> Tensor:
    torch.bitwise_right_shift(x, 16, out=spare)
    x.bitwise_xor_(spare.bitwise_and_(0xFFFF))
    torch.add(torch.tensor(k1, dtype=torch.int32), x, alpha=_C1, out=x)
    torch.bitwise_right_shift(x, 15, out=spare)
    x.bitwise_xor_(spare.bitwise_and_(0x1FFFF)).mul_(_signed(_C2, 32))
    if upper:
        return x
    torch.bitwise_right_shift(x, 16, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_(0xFFFF))


def _hash_by_numpy(x: Tensor, spare: Tensor, k1: int, upper: bool) -> Tensor:
    """numpy starts no threads, which would meet at a barrier after each step."""
    a, b = x.numpy().view(np.uint32), spare.numpy().view(np.uint32)
    a ^= np.right_shift(a, 16, out=b)
    a *= np.uint32(_C1)
    a += np.uint32(k1 & 0xFFFFFFFF)
    a ^= np.right_shift(a, 15, out=b)
    a *= np.uint32(_C2)
    if not upper:
        a ^= np.right_shift(a, 16, out=b)
    return x


def _words(key: int, high: int) -> tuple[int, int]:
    """Two signed 32-bit words of a key for the elements whose index has these high bits."""
    mixed = _splitmix64((key ^ high * 0xBF58476D1CE4E5B9) & _MASK64)
    return _signed(mixed & 0xFFFFFFFF, 32), _signed(mixed >> 32, 32)


def _splitmix64(x: int) -> int:
    """A bijection of 64-bit integers (Steele, Lea, Flood 2014, figure 15)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK64
    return x ^ x >> 31


def _signed(x: int, bits: int) -> int:
    """The two's complement reading of an unsigned integer."""
    return x - (1 << bits) if x >> (bits - 1) else x
