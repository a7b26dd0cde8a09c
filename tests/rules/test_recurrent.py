"""Recurrent layers and cells on shards of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.rules.analyse import analyse
from tests.rules.cases import Case, case, prove_op, real
from tests.rules.prove import program_of

aten = torch.ops.aten
BATCH, FEATURES, HIDDEN = 5, 2, 3
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def weights(gates: int, inputs: int, biases: bool, seed: int) -> list[Tensor]:
    both = [real(gates * HIDDEN, inputs, seed=seed), real(gates * HIDDEN, HIDDEN, seed=seed + 1)]
    return both + [real(gates * HIDDEN, seed=seed + 2), real(gates * HIDDEN, seed=seed + 3)] * biases


def layer(
    name: str, *, layers: int = 1, both_ways: bool = False, batch_first: bool = False, biases: bool = True
) -> tuple[Case, ...]:
    op, ways, states = getattr(aten, name).input, 2 if both_ways else 1, 2 if name == "lstm" else 1
    every: list[Tensor] = []
    for k in range(layers * ways):
        every += weights(GATES[name], FEATURES if k < ways else HIDDEN * ways, biases, 10 * k)
    x = real(BATCH, 3, FEATURES) if batch_first else real(3, BATCH, FEATURES)
    state = [real(layers * ways, BATCH, HIDDEN, seed=5 + k) for k in range(states)]

    def run(x: Tensor, *rest: Tensor) -> object:
        hx = list(rest[:states]) if states > 1 else rest[0]
        return op(x, hx, list(rest[states:]), biases, layers, 0.0, True, both_ways, batch_first)

    return case(run, x, *state, *every)


def cell(name: str, gates: int, states: int = 1) -> tuple[Case, ...]:
    op = getattr(aten, name).default
    state = [real(BATCH, HIDDEN, seed=k) for k in range(states)]
    return case(
        lambda x, *t: op(x, list(t[:states]) if states > 1 else t[0], *t[states:]),
        *(real(BATCH, FEATURES), *state, *weights(gates, FEATURES, True, 7)),
    )


CASES: dict[str, tuple[Case, ...]] = {
    "lstm": (*layer("lstm", both_ways=True), *layer("lstm", batch_first=True, biases=False)),
    "gru": layer("gru", layers=2),
    "rnn_tanh": layer("rnn_tanh", batch_first=True),
    "rnn_relu": layer("rnn_relu"),
    "lstm_cell": cell("lstm_cell", 4, states=2),
    "gru_cell": cell("gru_cell", 3),
    "rnn_tanh_cell": cell("rnn_tanh_cell", 1),
    "rnn_relu_cell": cell("rnn_relu_cell", 1),
}


@pytest.mark.parametrize("op", CASES)
def test_every_op_runs_on_shards_as_on_the_whole(op: str) -> None:
    for each in CASES[op]:
        for mesh in ("2",) if len(each.tensors) > 8 else ("2", "3"):
            assert {name.partition(":")[2] for name in prove_op(op, each, mesh).factors} == {"n"}


def test_dropout_between_layers_has_no_rule() -> None:
    args = (real(3, BATCH, FEATURES), real(1, BATCH, HIDDEN), *weights(3, FEATURES, True, 0))

    def run(dropout: float) -> bool:
        fn = lambda x, h, *w: aten.gru.input(x, h, list(w), True, 1, dropout, True, False, False)  # noqa: E731 - traced, not called
        return next(iter(analyse(program_of(fn, args)).ops.values())).has_rule

    assert run(0.0)
    assert not run(0.5)
