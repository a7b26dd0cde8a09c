"""What cannot be captured is one line that names module, file, line and remedy."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError


class Inner(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x):
        return self.body(self.fc(x))


class Outer(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.inner = Inner(body)

    def forward(self, x):
        return self.inner(x)


def branch(x):
    return x if x.sum() > 0 else -x


def number(x):
    return x * float(x.max()) if int(x.sum()) else x


def to_numpy(x):
    return torch.from_numpy(x.numpy())


def odd_output(x):
    return object()


def wrong_shape(x):
    return x @ x


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x, lengths):
        return self.lstm(nn.utils.rnn.pack_padded_sequence(x, lengths))[1][0]


def message(model, *args, **kwargs):
    with pytest.raises(CaptureError) as error:
        capture(model, args or (torch.ones(3, 4),), kwargs)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (branch, "torch.where"),
        (number, "torch.where"),
        (to_numpy, "stay in torch"),
        (wrong_shape, "must have same reduction dim"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_line_module_and_remedy(body, said, capfd):
    text = message(Outer(body))
    line = body.__code__.co_firstlineno + 1
    assert text.startswith(f"inner (Inner, {__file__}:{line}): ")
    assert said in text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("body", "said"),
    [(odd_output, "register_dataclass")],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_errors_without_a_line(body, said):
    text = message(Outer(body))
    assert text.startswith("Outer")
    assert said in text


class InForward(nn.Module):
    """Writes the tested expression in forward, for nodes that only know forward's lines."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        if self.what == "item":
            return x * x.sum().item()
        if self.what == "shape":
            return x[x > 0]
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize(
    ("what", "line", "said"),
    [
        ("item", 2, ".item()"),
        ("shape", 4, "shape that depends on data"),
        ("cond", None, "where"),
    ],
)
def test_nodes_that_are_refused(what, line, said):
    text = message(InForward(what))
    assert said in text
    if line:
        assert f"{__file__}:{InForward.forward.__code__.co_firstlineno + line}" in text


def test_batch_norm_without_momentum_names_the_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1 = nn.BatchNorm1d(4, momentum=None)

        def forward(self, x):
            return self.bn1(x)

    text = message(Net())
    line = Net.forward.__code__.co_firstlineno + 1
    assert text.startswith(f"bn1 (BatchNorm1d, {__file__}:{line}): ")
    assert "momentum to a number" in text


def test_example_that_does_not_fit():
    assert "example_args" in message(Outer(branch), torch.ones(3, 4), 1)
    assert "example_args" in message(Outer(branch), nonsense=1)


def test_packed_sequences_are_told_apart_from_other_data_dependence():
    text = message(Packed(), torch.ones(3, 2, 4), torch.tensor([3, 2]))
    assert text.startswith("lstm (LSTM, ")
    assert f"{__file__}:{Packed.forward.__code__.co_firstlineno + 1}" in text
    assert "padded batch" in text


def test_a_scripted_module_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        inside = torch.jit.script(nn.Linear(4, 4))
    assert "scripted from" in message(Outer(inside))
