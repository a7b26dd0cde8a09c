"""Recurrent layers and cells: the batch is cut; time and features are whole.

input t n f, states l n h, weights... -> t n o, l n h, (l n c)        with batch_first the input is n t f
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.rules.call import Call
from autopar.rules.rule import Dims, Rule

_BATCH = ("n",)


def layer(call: Call) -> Rule | None:
    """lstm, gru, rnn_tanh, rnn_relu on padded input; packed sequences and dropout between layers have no rule."""
    if call.target._overloadname != "input" or (call.arg("dropout") and call.arg("train")):
        return None
    sequence: Dims = (_BATCH, (), ()) if call.arg("batch_first") else ((), _BATCH, ())
    state: Dims = ((), _BATCH, ())
    names = list(call.named_inputs())
    ins = [
        sequence if name == "input" else state if name == "hx" else ((),) * len(shape)
        for name, shape in zip(names, call.in_shapes, strict=True)
    ]
    if any(len(shape) != 3 for name, shape in zip(names, call.in_shapes, strict=True) if name != "params"):
        return None
    batch = call.in_shapes[0][0 if call.arg("batch_first") else 1]
    outs = (sequence, *[state] * (len(call.out_shapes) - 1))
    return Rule(
        tuple(ins),
        outs,
        {"n": batch},
        filled=frozenset("n"),
        flop=_products(call, math.prod(call.in_shapes[0][:2])),
        saves=tuple(range(len(ins))),
        saves_output=True,
    )


def _products(call: Call, rows: int) -> float:
    """2 x every row of the input x every weight of a matrix."""
    named = zip(call.named_inputs(), call.in_shapes, strict=True)
    return 2.0 * rows * sum(math.prod(s) for name, s in named if name in ("params", "w_ih", "w_hh") and len(s) == 2)


def cell(call: Call) -> Rule | None:
    """lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell: `n f, n h, weights... -> n h`."""
    names = list(call.named_inputs())
    row: Dims = (_BATCH, ())
    ins = [
        row if name in ("input", "hx") else ((),) * len(shape)
        for name, shape in zip(names, call.in_shapes, strict=True)
    ]
    if any(len(shape) != 2 for name, shape in zip(names, call.in_shapes, strict=True) if name in ("input", "hx")):
        return None
    sizes = {"n": call.in_shapes[0][0]}
    return Rule(
        tuple(ins),
        (row,) * len(call.out_shapes),
        sizes,
        filled=frozenset("n"),
        flop=_products(call, sizes["n"]),
        saves=tuple(range(len(ins))),
    )


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys("lstm gru rnn_tanh rnn_relu".split(), layer),
    **dict.fromkeys("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split(), cell),
}
