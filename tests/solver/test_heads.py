"""Losses in chunks: which are known before there is a graph to cut, and when the planner takes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.models import GPT, GPTConfig
from autopar.passes.normalize import Normalize
from autopar.rules.analyse import analyse
from autopar.solver.heads import LOSS_CHUNKS, heads_of

TOKENS, WIDTH, VOCAB = 512, 16, 8192
ONE = autopar.Mesh("1", device="h100-sxm")


class Head(nn.Module):
    """A product and its loss; what else reads the logits is given."""

    def __init__(self, also=None):
        super().__init__()
        self.head, self.also = nn.Linear(WIDTH, VOCAB), also

    def forward(self, x, target):
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, VOCAB).float(), target)
        return loss if self.also is None else self.also(logits, loss)


INPUTS = (torch.empty(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.int64))


@pytest.mark.parametrize(
    ("also", "known"),
    [
        pytest.param(None, True, id="loss alone"),
        pytest.param(lambda logits, loss: (loss, logits), False, id="logits are handed out"),
        pytest.param(lambda logits, loss: loss + logits.square().mean(), False, id="two readers"),
    ],
)
def test_heads(also, known):
    program = Normalize().run(capture(Head(also), INPUTS, {}, name="head"))
    heads = heads_of(analyse(program))
    assert {h.loss.partition("_")[0] for h in heads.values()} == ({"cross"} if known else set())


def test_chunks_where_nothing_else_fits():
    free = autopar.plan(Head(), ONE, example_args=INPUTS)
    assert free.loss_chunks == 1
    (peak,) = free.predicted["peak_memory_bytes"]
    tight = autopar.plan(Head(), ONE, example_args=INPUTS, memory=int(0.5 * peak))
    assert tight.loss_chunks == LOSS_CHUNKS
    assert tight.predicted["peak_memory_bytes"][0] <= 0.5 * peak
    assert tight.predicted["step_time_s"] > free.predicted["step_time_s"]  # the product is made again


def test_a_backend_that_makes_logits_whole_is_not_promised_chunks():
    (peak,) = autopar.plan(Head(), ONE, example_args=INPUTS).predicted["peak_memory_bytes"]
    limit = {"example_args": INPUTS, "memory": int(0.5 * peak), "backend": "inductor"}
    with pytest.raises(autopar.InfeasibleError):
        autopar.plan(Head(), ONE, **limit, pin={"microbatches": 1})
    divided = autopar.plan(Head(), ONE, **limit)  # what any backend can do: fewer rows at once
    assert divided.loss_chunks == 1
    assert divided.microbatches > 1
    assert divided.predicted["peak_memory_bytes"][0] <= 0.5 * peak


def test_pinned():
    whole, chunked = (autopar.plan(Head(), ONE, example_args=INPUTS, pin={"loss_chunks": n}) for n in (1, 4))
    assert (whole.loss_chunks, chunked.loss_chunks) == (1, 4)
    saved = [p.predicted["peak_memory_bytes"][0] for p in (whole, chunked)]
    # the logits as they are kept and as the loss reads them, but for a part
    assert saved[0] - saved[1] == pytest.approx(TOKENS * VOCAB * 8 * 3 / 4, rel=0.3)
    assert "loss in 4 chunks" in str(chunked)


def test_refused():
    inputs = (INPUTS[0], INPUTS[1])
    with pytest.raises(autopar.PlanError, match="loss_chunks=4: no cross entropy"):
        autopar.plan(Head(lambda logits, loss: (loss, logits)), ONE, example_args=inputs, pin={"loss_chunks": 4})
    with pytest.raises(autopar.PlanError, match="loss_chunks=4: backend 'eager' makes logits whole"):
        autopar.plan(Head(), ONE, example_args=inputs, pin={"loss_chunks": 4}, backend="eager")
    with pytest.raises(autopar.PlanError, match="loss_chunks=2: schedule zb-h1"):
        autopar.plan(
            GPT(GPTConfig(vocab=32, context=8, layers=2, heads=2, width=8, ff_width=8), batch=4, seq=8),
            autopar.Mesh("2", device="h100-sxm"),
            pin={"pp": 2, "schedule": "zb-h1", "loss_chunks": 2, "microbatches": 4},
        )
