"""The generator: its numbers depend on seed, stream, salt and global index alone, and look random in every way tried.

Keys are fixed, so the statistical tests always see the same numbers; bounds are about five standard deviations.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from autopar.runtime import random
from autopar.runtime.random import Box, Draw, Draws, current_key, drawing, key_of

N = 1 << 19
KEY = key_of(Draw(1234, 0), 7, 0)


def uniform(
    n: int = N, *, seed: int = 1234, stream: int = 0, salt: int = 7, dtype: torch.dtype = torch.float64
) -> Tensor:
    return random.uniform(key_of(Draw(seed, stream), salt, 0), Box.of(0, (), (), n), torch.empty(n, dtype=dtype))


def normal(n: int = N, dtype: torch.dtype = torch.float64) -> Tensor:
    return random.normal(KEY, Box.of(0, (), (), n), torch.empty(n, dtype=dtype))


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent uniform numbers give."""
    return float(((a - 0.5) * (b - 0.5)).mean() * 12 * math.sqrt(len(a)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_uniform_mean_variance_and_range(dtype: torch.dtype) -> None:
    drawn = uniform(dtype=dtype)
    u = drawn.double()
    step = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2.0**-24
    assert 0 <= u.min() < 1e-2
    assert 1 - max(1e-4, step) <= u.max() < 1
    assert abs(u.mean() + step / 2 - 0.5) * math.sqrt(12 * N) < 5
    assert abs(u.var() * 12 - 1) * math.sqrt(N / 0.8) < 5
    assert torch.equal(u, (u / step).round() * step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_normal_moments_and_tails(dtype: torch.dtype) -> None:
    z = normal(dtype=dtype).double()
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**power).mean() - moment) * math.sqrt(N / variance) < 5 + (dtype == torch.bfloat16) * 2
    for bound, share in ((1.0, 0.317311), (2.0, 0.045500), (3.0, 0.0026998), (4.0, 6.334e-5)):
        if dtype != torch.bfloat16:  # its steps are too coarse to count what lies beyond a bound
            expected = share * N
            assert abs((z.abs() > bound).sum() - expected) < 5 * math.sqrt(expected)


def test_dtypes_differ_by_rounding_only() -> None:
    assert (uniform() - uniform(dtype=torch.float32)).abs().max() <= 2.0**-24
    assert (uniform() - uniform(dtype=torch.bfloat16)).abs().max() <= 2.0**-8
    torch.testing.assert_close(normal(), normal(dtype=torch.float32).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 63, 64, 256, 768, 1024, 4096, 1 << 16])
def test_no_correlation_along_a_tensor(lag: int) -> None:
    u = uniform()
    assert abs(correlation(u[lag:], u[:-lag])) < 5


@pytest.mark.parametrize(
    "other", [{"stream": 1}, {"stream": 2}, {"seed": 1235}, {"seed": 0}, {"salt": 8}, {"stream": 1, "salt": 6}]
)
def test_no_correlation_between_calls_seeds_and_ops(other: dict[str, int]) -> None:
    u, v = uniform(), uniform(**other)
    assert abs(correlation(u, v)) < 5
    assert abs(correlation(u[1:], v[:-1])) < 5


@pytest.mark.parametrize("upper", [False, True])
def test_keys_that_share_one_word_are_not_alike(upper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of keys in 200 as good as shares the first for 2^24 elements: their indices meet at some lag."""
    first, second, *others = (word for key in range(4) for word in random._words(key, 0))
    drawn = []
    for words in ((first, second), *((first, other) for other in others), *((other, second) for other in others)):
        monkeypatch.setattr(random, "_words", lambda key, high, words=words: words)
        bits = [b.clone() for _, _, b in random._bits(KEY, Box.of(0, (), (), N), torch.device("cpu"), upper=upper)]
        drawn.append(torch.cat(bits).double() / 2**32 + 0.5)
    assert max(abs(correlation(drawn[0], other)) for other in drawn[1:]) < 5


def test_seed_and_stream_are_no_sum() -> None:
    assert not torch.equal(uniform(64, seed=3, stream=4), uniform(64, seed=4, stream=3))
    assert not torch.equal(uniform(64, seed=0, stream=1, salt=0), uniform(64, seed=0, stream=0, salt=1))


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_equally_frequent(shift: int) -> None:
    bits = torch.cat([b.clone() for _, _, b in random._bits(KEY, Box.of(0, (), (), N), torch.device("cpu"))])
    counts = torch.bincount((bits >> shift) & 0xFF, minlength=256).double()
    assert abs(((counts - N / 256) ** 2 / (N / 256)).sum() - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("block", [16, 64, 1024])
def test_drops_in_blocks_are_binomial(p: float, block: int) -> None:
    kept = random.keep(KEY, Box.of(0, (), (), N), p, torch.empty(N, dtype=torch.bool))
    dropped = (~kept).view(-1, block).sum(1).double()
    blocks, variance = N // block, block * p * (1 - p)
    chi = ((dropped - block * p) ** 2 / variance).sum() - blocks
    excess = (1 - 6 * p * (1 - p)) / variance  # of a binomial's kurtosis
    assert abs(chi) < 5 * math.sqrt(blocks * (2 + excess))
    assert abs((~kept).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / N)


BOXES = [
    ((3, 5, 7), (0, 0, 0), (3, 5, 7)),
    ((3, 5, 7), (1, 0, 0), (2, 5, 7)),
    ((3, 5, 7), (0, 2, 0), (3, 2, 7)),
    ((3, 5, 7), (2, 1, 3), (1, 3, 4)),
    ((3, 5, 7), (0, 0, 6), (3, 5, 1)),
    ((3, 5, 7), (3, 0, 0), (0, 5, 7)),
    ((4, 600, 1000), (1, 300, 0), (2, 300, 1000)),
    ((2, 3, 300_000), (0, 1, 7), (2, 2, 290_000)),
    ((1000, 1000), (0, 500), (1000, 500)),
]


@pytest.mark.parametrize(("shape", "at", "sizes"), BOXES)
def test_a_box_draws_its_part_of_the_whole(shape: tuple[int, ...], at: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    whole = uniform(math.prod(shape), dtype=torch.float32).view(shape)
    first = sum(a * s for a, s in zip(at, strides, strict=True))
    out = torch.empty(sizes)
    drawn = random.uniform(KEY, Box.of(first, sizes, strides, out.numel()), out)
    assert torch.equal(drawn, whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))])


@pytest.mark.parametrize("first", [2**32 - 50, 2**32 - 300_001, 5 * 2**32 - 7, 7 * 2**40 + 3])
def test_indices_beyond_32_bits(first: int) -> None:
    whole = random.uniform(KEY, Box.of(first, (), (), N), torch.empty(N))
    for start, stop in ((0, 100), (40, 60), (299_000, 303_000), (N - 9, N)):
        part = random.uniform(KEY, Box.of(first + start, (), (), stop - start), torch.empty(stop - start))
        assert torch.equal(part, whole[start:stop])
    columns = random.uniform(KEY, Box.of(first + 3, (512, 500), (1024, 1), 256_000), torch.empty(512, 500))
    assert torch.equal(columns, whole.view(512, 1024)[:, 3:503])


def test_numbers_do_not_repeat_beyond_32_bits() -> None:
    near = uniform(4096)
    for first in (2**32, 2**33, 3 * 2**32):
        far = random.uniform(KEY, Box.of(first, (), (), 4096), torch.empty(4096, dtype=torch.float64))
        assert len(torch.unique(torch.cat([near, far]))) == 8192
        assert abs(correlation(near, far)) < 5


def test_a_row_may_be_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = uniform(30_000, dtype=torch.float32).view(3, 10_000)
    monkeypatch.setattr(random, "CHUNK", 1000)
    out = torch.empty(3, 2500)
    assert torch.equal(random.uniform(KEY, Box.of(99, (3, 2500), (10_000, 1), 7500), out), whole[:, 99:2599])


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.arange(1.0, 4097.0, dtype=torch.float64).view(64, 64)
    kept = random.keep(KEY, Box.of(0, (), (), 4096), 0.3, torch.empty(64, 64, dtype=torch.bool))
    torch.testing.assert_close(random.dropout(KEY, Box.of(0, (), (), 4096), 0.3, x), x * kept / 0.7)
    turned = random.dropout(KEY, Box.of(0, (), (), 4096), 0.3, x.t())
    torch.testing.assert_close(turned, x.t() * kept / 0.7)


@pytest.mark.parametrize("p", [0.0, 1.0, 1 - 1e-12, 1e-12])
def test_dropout_of_nothing_and_of_all(p: float) -> None:
    x = torch.ones(1000)
    out = random.dropout(KEY, Box.of(0, (), (), 1000), p, x)
    assert torch.equal(out, x if p < 0.5 else torch.zeros(1000))


def test_a_key_is_of_the_running_call() -> None:
    with pytest.raises(RuntimeError, match="outside"):
        current_key(1)
    with drawing(Draw(5, 6)):
        first = current_key(1)
        with drawing(Draw(5, 7)):
            assert not torch.equal(first, current_key(1))
        assert torch.equal(first, current_key(1))


def test_micro_batches_draw_what_the_whole_batch_draws() -> None:
    rows, width = 8, 6
    whole = uniform(rows * width, dtype=torch.float32).view(rows, width)
    for number in range(4):
        key = key_of(Draw(1234, 0), 7, first=2 * width * number)
        part = random.uniform(key, Box.of(0, (), (), 2 * width), torch.empty(2, width))
        assert torch.equal(part, whole[2 * number : 2 * number + 2])


def test_calls_are_counted_by_mode_and_kept_in_a_tensor() -> None:
    draws = Draws(2**64 - 3)
    streams = [draws.next(training).stream for training in (True, True, False, True, False)]
    assert len(set(streams)) == 5
    other = Draws(0)
    other.load(draws.to_tensor())
    assert other.next(True) == draws.next(True)
    without_evaluation = Draws(2**64 - 3)
    assert [without_evaluation.next(True).stream for _ in range(3)] == [streams[i] for i in (0, 1, 3)]


@pytest.mark.parametrize("upper", [False, True])
def test_numpy_and_torch_hash_alike(upper: bool) -> None:
    """Both are the formula in plain integers; the one runs on CPUs, the other elsewhere."""
    x = torch.tensor([0, 1, 2**31 - 1, -(2**31), -1, 123456789], dtype=torch.int32)
    for k1, by in itertools.product((0, -5, 2**31 - 1), (random._hash_by_numpy, random._hash_by_torch)):
        found = by(x.clone(), torch.empty_like(x), k1, upper).tolist()
        for value, bits in zip(x.tolist(), found, strict=True):
            y = value & 0xFFFFFFFF
            y ^= y >> 16
            y = (y * 0x7FEB352D + k1) & 0xFFFFFFFF
            y ^= y >> 15
            y = y * 0x846CA68B & 0xFFFFFFFF
            assert bits & 0xFFFFFFFF == (y if upper else y ^ y >> 16)
