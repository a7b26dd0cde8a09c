"""autopar/adamw.py: the steps of torch's AdamW, by one kernel that reads and writes each number once."""

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.adamw import AdamW, _kernel
from tests.bench.kernels import byte_ratio, for_cuda
from tests.end_to_end.small_models import build, inputs


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "kernels"))


def model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 1, bias=False)).to(dtype)


def train(found, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 7, generator=generator).to(next(found.parameters()).dtype)
        found(x).square().sum().backward()
        optimizer.step()


OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_steps_as_torch_does(dtype, bound):
    one, two = model(dtype), model(dtype)
    ours, theirs = AdamW(one.parameters(), kernels="on", **OPTIONS), torch.optim.AdamW(two.parameters(), **OPTIONS)
    for change in (1.0, 0.3):  # of the learning rate: the kernel stays
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.01 * change
        train(one, ours, 2)
        train(two, theirs, 2)
    before = _kernel.cache_info().misses
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[a][key], theirs.state[b][key], rtol=bound, atol=bound)
        assert a.grad is not None
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(one, ours, 1)
    train(two, theirs, 1)
    assert _kernel.cache_info().misses == before
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * bound, atol=10 * bound)


def test_the_rest_is_torchs():
    """Half precision, amsgrad, and a CPU without the interpreter: the same numbers, no kernel."""
    before = _kernel.cache_info().currsize
    for dtype, options in (
        (torch.bfloat16, {"kernels": "on"}),
        (torch.float32, {"kernels": "on", "amsgrad": True}),
        (torch.float32, {}),
    ):
        one, two = model(dtype), model(dtype)
        ours = AdamW(one.parameters(), **options)
        theirs = torch.optim.AdamW(two.parameters(), amsgrad="amsgrad" in options)
        train(one, ours, 2)
        train(two, theirs, 2)
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.equal(a, b)
    assert _kernel.cache_info().currsize == before


def test_some_by_kernel_and_some_by_torch():
    half, whole = nn.Parameter(torch.ones(5, dtype=torch.bfloat16)), nn.Parameter(torch.ones(5))
    pairs = [(half, whole), (half.detach().clone().requires_grad_(), whole.detach().clone().requires_grad_())]
    for (a, b), optimizer in zip(pairs, (AdamW(pairs[0], kernels="on"), torch.optim.AdamW(pairs[1])), strict=True):
        a.grad, b.grad = torch.full_like(a, 0.5), torch.full_like(b, 0.5)
        assert optimizer.step(lambda: 3) == 3
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


def test_one_kernel_without_extra_traffic():
    code, _ = _kernel(4_194_304, torch.float32, torch.bfloat16, "kernel")
    (launch,) = code.printed.launches
    made = for_cuda(code, launch, 90)
    assert (made.spilled_bytes, made.widest_load_bytes, byte_ratio(code)) == (0, 16, 1.0)
    moved = sum(b.size_bytes for b in code.kernel.buffers)
    assert moved == 4_194_304 * (4 + 2 + 4 + 4 + 12) + 7 * 4


def test_steps_a_parallel_module():
    args, _ = inputs("gpt", batch=2, seq=5)
    one, two = build("gpt"), build("gpt")
    m = autopar.parallelize(one, autopar.Mesh("1"), example_args=args)
    ours, theirs = AdamW(m.parameters(), kernels="on", lr=0.01), torch.optim.AdamW(two.parameters(), lr=0.01)
    losses = []
    for found, optimizer in ((m, ours), (two, theirs)):
        for _ in range(2):
            optimizer.zero_grad()
            loss = found(*args)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-9)
    for name, value in two.state_dict().items():
        torch.testing.assert_close(m.full_state_dict()[name], value, rtol=1e-8, atol=1e-10)
