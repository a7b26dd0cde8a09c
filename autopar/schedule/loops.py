"""Schedules whose stages lie in a loop over the ranks: stage s on rank s % ranks.

Enters: a rank, ranks p, stages a rank v, micro-batches m. Leaves: that rank's row as an array.

A row is told by three numbers: in which order forwards and backwards come, how many forwards come before the first
backward (`warmup`), and, where the weight gradient is split off, after how many more backwards it follows (`delay`).
Step i of a rank runs forward i, backward i - warmup and weight gradient i - warmup - delay, as far as they exist.

    schedule           order of the forwards              warmup                      delay
    gpipe              micro-batch                        all                         -
    1f1b               micro-batch                        p - 1 - rank                -
    looped-bfs         stage, then micro-batch            all                         -
    interleaved-1f1b   round, stage, micro-batch          (v - 1) n + 2 (p - 1 - rank)  -       n: micro-batches a round
    interleaved-zb     round, stage, micro-batch          (v - 1) n + p - 1 - rank    rank
    zb-h1              micro-batch                        p - 1 - rank                rank
    zb-2p              micro-batch                        2 (p - 1 - rank)            2 rank

zb-h1 holds p micro-batches on each rank, as the first rank of 1F1B does; zb-2p holds 2 p - 1 and has no bubble when
the three works take equally long.
Source: Huang et al. 2019 (gpipe), Narayanan et al. 2021 section 2.2 (1f1b, interleaved), Lamy-Poirier 2023
(looped-bfs; backward from the last micro-batch), Qi et al. 2023 section 2 (zb-h1; its H2 is our zb-2p).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.schedule.table import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Ints

RowMaker = Callable[[int, int, int, int], Ints]
"""(rank, ranks, virtual_stages, microbatches) -> codes of the row."""


def gpipe(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """All forwards, then all backwards."""
    each = np.arange(microbatches)
    stages = np.full(microbatches, rank)
    return _merge((stages, each), (stages, each), microbatches)


def one_forward_one_backward(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """As few micro-batches in flight as keep every rank busy: p - rank."""
    return _single(rank, ranks, microbatches, 1, split=False)


def zb_h1(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """1F1B with weight gradients put off until the rank would wait."""
    return _single(rank, ranks, microbatches, 1, split=True)


def zb_2p(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """Twice the micro-batches of zb-h1 in flight, and no bubble for equal works."""
    return _single(rank, ranks, microbatches, 2, split=True)


def looped_bfs(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """All micro-batches of a stage before the next stage; backwards in the mirrored order."""
    stages = np.repeat(np.arange(virtual) * ranks + rank, microbatches)
    each = np.tile(np.arange(microbatches), virtual)
    return _merge((stages, each), (stages[::-1], each[::-1]), virtual * microbatches)


def interleaved(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """1F1B over several stages a rank."""
    return _rounds(rank, ranks, virtual, microbatches, factor=2, split=False)


def interleaved_zb(rank: int, ranks: int, virtual: int, microbatches: int) -> Ints:
    """zb-h1 over several stages a rank."""
    return _rounds(rank, ranks, virtual, microbatches, factor=1, split=True)


def first(codes: Ints, microbatches: int) -> Ints:
    """The row without the micro-batches from the given one on.

    What is left depends on nothing that is gone, so it is as free of deadlock as the whole.
    """
    return codes[codes[:, 2] < microbatches]


def _single(rank: int, ranks: int, microbatches: int, factor: int, split: bool) -> Ints:
    each = np.arange(microbatches)
    order = (np.full(microbatches, rank), each)
    return _merge(order, order, factor * (ranks - 1 - rank), factor * rank if split else None)


def _rounds(rank: int, ranks: int, virtual: int, microbatches: int, factor: int, split: bool) -> Ints:
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds == 0:
        size, padded = microbatches // rounds, microbatches
    else:  # rounds of p: the last is filled up, and what it was filled with taken out again
        size, padded = ranks, -(-microbatches // ranks) * ranks
    step = np.arange(virtual * padded)
    local, each = step // size % virtual, step // (size * virtual) * size + step % size
    warmup = (virtual - 1) * size + factor * (ranks - 1 - rank)
    forwards, backwards = local * ranks + rank, (virtual - 1 - local) * ranks + rank
    return first(_merge((forwards, each), (backwards, each), warmup, rank if split else None), microbatches)


def _merge(forwards: tuple[Ints, Ints], backwards: tuple[Ints, Ints], warmup: int, delay: int | None = None) -> Ints:
    """Put forwards and backwards (stages, micro-batches) into one row; delay None: backwards are whole."""
    n = len(forwards[0])
    warmup, step = min(warmup, n), np.arange(n)
    parts = [(FORWARD, forwards, step), (BACKWARD if delay is None else INPUT_GRAD, backwards, step + warmup)]
    if delay is not None:
        parts.append((WEIGHT_GRAD, backwards, step + warmup + delay))
    codes = [np.stack([stages, np.full(n, work), each], axis=1) for work, (stages, each), _ in parts]
    # Within a step: forward, backward, weight gradient. `parts` has that order, and the sort is stable.
    order = np.argsort(np.concatenate([when for _, _, when in parts]), kind="stable")
    return np.concatenate(codes)[order].astype(np.int32)
