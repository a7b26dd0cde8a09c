"""Run on each of four ranks: checks of state dicts, checkpoints, clipping, modes, other sizes and split batches.

Each check is called with a scratch folder and asserts; `run_checks` collects what failed: one does not hide others.
"""

import copy
import functools
import gc
import traceback
import weakref

import pytest
import torch
from torch import nn

import autopar
from tests.end_to_end.parity import full
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

TENSOR, MIXED = {"tp": 4, "sp": False}, {"dp": 2, "tp": 2, "zero": 3}
PIPELINE, EAGER = {"pp": 2, "dp": 2, "microbatches": 2}, {"backend": "eager"}
FUSED, TIED = "hf-gpt2", "gpt-tied"


def run_checks(payload):
    """payload: {"checks": [names], "folder": path}. Returns: {name: "" or a traceback}."""
    out = {}
    for name in payload["checks"]:
        try:
            CHECKS[name](payload["folder"])
            out[name] = ""
        except BaseException:  # torch's CheckpointException is no Exception
            out[name] = traceback.format_exc()[-3000:]
    return out


def parallel(model, pin):
    """As new: each is made once for all checks and goes back to its first state, by what `round_trip` checks first."""
    m, first = _made(model, tuple(pin.items()))
    m.load_state_dict(first)
    m.zero_grad()
    return m


@functools.cache
def _made(model, pin):
    args, kwargs = inputs(model)
    m = autopar.parallelize(build(model), autopar.Mesh("2x2"), example_args=args, example_kwargs=kwargs, pin=dict(pin))
    return m, copy.deepcopy(m.state_dict())


def step(module, model, optimizer=None, seed=3, **sizes):
    """One training step; the loss."""
    args, kwargs = inputs(model, seed=seed, **sizes)
    loss = loss_of(module(*args, **kwargs))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def close(found, expected, bound=1e-9):
    torch.testing.assert_close(full(found), full(expected), rtol=bound, atol=bound)


def all_close(found, expected, bound=1e-9):
    assert list(found) == list(expected)
    for name in expected:
        close(found[name], expected[name], bound)


def round_trip(folder):
    m = parallel(FUSED, MIXED)
    before = copy.deepcopy(m.state_dict())
    expected = step(m, FUSED, adamw(m))
    assert any(not torch.equal(full(v), full(before[n])) for n, v in m.state_dict().items())
    m.load_state_dict(before)
    all_close(m.state_dict(), before, 0.0)
    close(step(m, FUSED), expected, 0.0)


def single_device_state(folder):
    """The one device's own state dict loads, whatever the layout; a wrong name and a wrong shape are refused."""
    for model, pin in ((FUSED, TENSOR), (TIED, MIXED)):
        reference = build(model)
        step(reference, model, adamw(reference))
        m = parallel(model, pin)
        m.load_state_dict(reference.state_dict())
        all_close(m.full_state_dict(), reference.state_dict(), 0.0)
        close(step(m, model), step(reference, model), 1e-6 if model == FUSED else 1e-9)
        state = reference.state_dict()
        name = next(iter(state))
        for broken in ({k: v for k, v in state.items() if k != name}, {**state, name: torch.zeros(3, 3)}):
            with pytest.raises(RuntimeError, match=name):
                m.load_state_dict(broken)


def ties(folder):
    for model, names in ((FUSED, ("transformer.wte.weight", "lm_head.weight")), (TIED, None)):
        reference = build(model)
        names = names or ("token_embedding.weight", "lm_head.weight")
        m = parallel(model, TENSOR)
        state = m.full_state_dict()
        assert list(state) == list(reference.state_dict())
        assert state[names[0]] is state[names[1]]
        assert not any(hasattr(v, "full_tensor") for v in state.values())
        held = m.state_dict(keep_vars=True)
        assert held[names[0]] is held[names[1]]
        assert len(list(m.parameters())) == len(list(reference.parameters()))
        step(m, model, adamw(m))
        state = m.full_state_dict()
        torch.testing.assert_close(state[names[0]], state[names[1]], rtol=0, atol=0)
        fresh = build(model)
        fresh.load_state_dict(state)


def checkpoint(folder):
    """Weights and moments saved under one plan and loaded under another go on like one device's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    reference = build(FUSED)
    optimizer = adamw(reference)
    for seed in (0, 1):
        step(reference, FUSED, optimizer, seed=seed)
    m = parallel(FUSED, TENSOR)
    strided = [p for p in m.parameters() if "Strided" in str(p.placements)]
    assert strided, "no fused projection lies strided: the test tests nothing"
    mine = adamw(m)
    for seed in (0, 1):
        step(m, FUSED, mine, seed=seed)
    state = dict(zip(("model", "optimizer"), get_state_dict(m, mine), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/step")
    for pin in (MIXED, {"dp": 4, "zero": 3}):
        other = parallel(FUSED, pin)
        theirs = adamw(other)
        model_state, optimizer_state = get_state_dict(other, theirs)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/step")
        set_state_dict(other, theirs, model_state_dict=model_state, optim_state_dict=optimizer_state)
        all_close(other.full_state_dict(), m.full_state_dict(), 0.0)
        expected = copy.deepcopy(reference)
        expected_optimizer = adamw(expected)
        expected_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for seed in (2, 3):
            close(step(other, FUSED, theirs, seed=seed), step(expected, FUSED, expected_optimizer, seed=seed), 1e-6)
        all_close(other.full_state_dict(), expected.state_dict(), 1e-7)


def clipping(folder):
    for pin in (TENSOR, MIXED):
        reference, m = build(TIED), parallel(TIED, pin)
        step(reference, TIED)
        step(m, TIED)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert expected > 0.1
        close(nn.utils.clip_grad_norm_(m.parameters(), 0.1), expected)
        found = dict(m.named_parameters())
        for name, p in reference.named_parameters():
            close(found[name].grad, p.grad)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 16), nn.Dropout(0.5)
        self.norm, self.outer = nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.outer(self.drop(self.norm(self.inner(x)).relu())).square().mean()


def modes(folder):
    torch.manual_seed(0)
    reference, x = Dropped().double(), torch.randn(8, 8, dtype=torch.float64)
    m = autopar.parallelize(copy.deepcopy(reference), autopar.Mesh("2x2"), example_args=(x,), pin={"dp": 4})
    trained = [m(x).item() for _ in range(2)]
    reference(x), reference(x)  # its running statistics see the same batches
    assert trained[0] != trained[1], "dropout drew the same mask twice"
    m.eval()
    reference.eval()
    assert not m.training
    close(m(x), reference(x))
    close(m(x), reference(x))
    all_close(dict(m.named_buffers()), dict(reference.named_buffers()))
    m.train()
    assert m(x).item() not in trained


def other_sizes(folder):
    """A later call may have another batch and another sequence; the plan stays."""
    for pin in (TENSOR, MIXED):
        reference, m = build(TIED), parallel(TIED, pin)
        for sizes in ({"batch": 4, "seq": 12}, {"batch": 5, "seq": 7}, {}):
            reference.zero_grad()
            m.zero_grad()
            close(step(m, TIED, **sizes), step(reference, TIED, **sizes))
            found = dict(m.named_parameters())
            for name, p in reference.named_parameters():
                close(found[name].grad, p.grad)


def split_batches(folder):
    """Each rank loads its own rows, by the sampler; together they are the global batch."""
    reference, m = build(TIED), parallel(TIED, MIXED)
    (ids, labels), _ = inputs(TIED)
    rows = torch.utils.data.TensorDataset(ids, labels)
    sampler = m.sampler(rows, shuffle=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH // 2, sampler=sampler)
    batches = list(loader)
    assert len(batches) == 1
    mine = batches[0][0]
    assert mine.shape[0] == BATCH // 2
    shares = [None] * 4
    torch.distributed.all_gather_object(shares, sorted(sampler))
    assert sorted(row for share in shares for row in share) == sorted(
        list(range(BATCH)) * 2
    )  # two tensor-parallel ranks share a part
    loss = m(*m.shard(tuple(batches[0])))
    loss.backward()
    expected = step(reference, TIED)
    close(loss, expected)
    found = dict(m.named_parameters())
    for name, p in reference.named_parameters():
        close(found[name].grad, p.grad)


def memory_of_the_single_device_model(folder):
    """What was replaced is let go: a rank holds its shards alone."""
    args, kwargs = inputs(TIED)
    for options in ({"pin": MIXED}, {"pin": PIPELINE}, {"pin": MIXED, "precision": "bf16"}, {"pin": MIXED, **EAGER}):
        model = build(TIED).float()
        before = [weakref.ref(value) for value in (*model.parameters(), *model.buffers())]
        m = autopar.parallelize(model, autopar.Mesh("2x2"), example_args=args, example_kwargs=kwargs, **options)
        step(m, TIED, adamw(m))
        assert all(reference() is not None for reference in before)
        del model
        gc.collect()
        assert sum(reference() is not None for reference in before) == 0, options


CHECKS = {
    f.__name__: f
    for f in (
        round_trip, single_device_state, ties, checkpoint, clipping, modes, other_sizes, split_batches,
        memory_of_the_single_device_model,
    )
}  # fmt: skip
