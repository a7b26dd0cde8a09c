"""One frame for each op is what torch's whole trace would have said."""

import torch
from torch import nn

from autopar.capture import capture
from autopar.capture import export as capturing
from autopar.program import record
from tests.end_to_end.small_models import build, inputs


class NoForward(nn.Sequential):
    """All frames are torch's own."""


def lines(model, args):
    return [record(node).where for node in capture(model, args, {}).graph.nodes]


def test_lines_are_those_of_the_whole_trace(monkeypatch):
    gpt, args = build("gpt"), inputs("gpt")[0]
    plain = NoForward(nn.Linear(4, 4), nn.LayerNorm(4)), (torch.ones(2, 4),)
    quick = lines(gpt, args), lines(*plain)
    assert any("gpt.py:" in line for line in quick[0])
    monkeypatch.setattr(capturing, "user_lines", capturing.contextlib.nullcontext)
    assert (lines(gpt, args), lines(*plain)) == quick
