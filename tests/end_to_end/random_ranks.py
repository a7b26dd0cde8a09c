"""Run on each rank: train a model that draws random numbers on the mesh and on one device of autopar's own."""

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import autopar

WIDTH, HEADS, KV_HEADS, BATCH, SEQ = 16, 4, 2, 4, 6


class Noisy(nn.Module):
    """Attention with dropout of its weights, dropout of channels and of the result, and noise."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * size)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, seq, KV_HEADS, -1).transpose(1, 2).chunk(2, -1)
        p = 0.3 if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.out(h.transpose(1, 2).reshape(batch, seq, WIDTH)))
        x = x + self.drop(self.down(self.drop(F.gelu(self.up(x)))))
        if self.training:
            x = x + 0.1 * torch.randn_like(x) * F.dropout1d(torch.ones_like(x), 0.5)
        return x.square().mean()


def batch(step):
    return torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def build():
    torch.manual_seed(0)
    return Noisy().double().train()


def parallel(mesh, seed, **options):
    model = build()
    torch.manual_seed(seed)
    return autopar.parallelize(model, autopar.Mesh(mesh), example_args=(batch(0),), **options)


def train(m, steps):
    """[(loss, gradients)] of some calls; torch's own generator is disturbed before each."""
    out = []
    for step in steps:
        torch.manual_seed(77 + step)
        m.zero_grad()
        loss = m(batch(step))
        loss.backward()
        grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in m.named_parameters()}
        out.append((loss.item(), {n: g.clone() for n, g in grads.items()}))
    return out


def difference(found, expected):
    """Largest relative error of losses and gradients."""
    worst = 0.0
    for (loss, grads), (loss0, grads0) in zip(found, expected, strict=True):
        worst = max(worst, abs(loss - loss0) / abs(loss0))
        scale = max(g.abs().max() for g in grads0.values())
        errors = [(grads[n] - g).abs().max() / max(g.abs().max(), 1e-6 * scale) for n, g in grads0.items()]
        worst = max(worst, float(max(errors)))
    return worst


def compare(payload):
    """payload: {"cases": [options of parallelize, ...]}. Returns: a dict of errors for each case."""
    expected = train(one := parallel("1", 5), (0, 1, 1, 2))
    one.manual_seed(9)
    seeded = train(one, (0,))
    plain = build().eval()(batch(0)).item()
    results = []
    for options in payload["cases"]:
        m = parallel(str(dist.get_world_size()), 5 + dist.get_rank(), **options)  # rank 0's seed wins
        again = parallel(str(dist.get_world_size()), 50, **options)
        first = train(m, (0, 1))
        saved = {n: v.clone() for n, v in m.state_dict().items()}
        evaluated = m.eval()(batch(0)).item()
        rest = train(m.train(), (1, 2))
        again.load_state_dict(saved)
        resumed = train(again, (1, 2))
        again.load_state_dict(build().state_dict())  # one device's: strict, and without our counters
        m.manual_seed(9)
        results.append(
            {
                "train": difference(first + rest, expected),
                "resumed": difference(resumed, expected[2:]),
                "eval": abs(evaluated - plain) / plain,
                "seeded": difference(train(m, (0,)), seeded),
                "same batch, other mask": abs(first[1][0] - rest[0][0]) / first[1][0],
                "full": sorted(m.full_state_dict()) == sorted(build().state_dict()),
            }
        )
    return results
