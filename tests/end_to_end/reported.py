"""Run on each rank: models of kinds that users report against other tools, each planned with dp and with tp pinned,
against the eager model."""

import torch
import torch.nn.functional as F
from torch import nn

import autopar

LETTERS, SAMPLES = 7, 4


class Spectral(nn.Module):
    """A Fourier layer that writes its modes into a complex tensor of zeros."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(4, 6, 3)) for _ in range(2))
        self.skip = nn.Conv1d(4, 6, 1)

    def forward(self, x):
        modes = torch.fft.rfft(x)
        out = torch.zeros(len(x), 6, modes.shape[-1], dtype=modes.dtype)
        out[:, :, :3] = torch.einsum("bix,iox->box", modes[:, :, :3], torch.complex(self.real, self.imaginary))
        return (torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x)).square().mean()


class Speech(nn.Module):
    """A CTC loss with unequal lengths."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, LETTERS)

    def forward(self, x, words, heard, written):
        scores = self.two(torch.relu(self.one(x))).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, words, heard, written, zero_infinity=True)


class Taught(nn.Module):
    """A teacher in inference mode, and values clamped where autograd does not see it."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x):
        with torch.inference_mode():
            wanted = self.teacher(x)
        found = self.student(x)
        with torch.no_grad():
            found.clamp_(-1, 1)
        return F.mse_loss(found, wanted.clone())


class Translator(nn.Module):
    """torch's own transformer with a causal mask, after which it looks for causality in the values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=x.dtype)
        return (self.inner(x, y, tgt_mask=mask) * y).sin().sum()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Opaque(nn.Module):
    """The batch goes through a Function without a rule before anything can be cut; a weight is a hook's result."""

    def __init__(self):
        super().__init__()
        self.fc = nn.utils.weight_norm(nn.Linear(6, 8))

    def forward(self, x):
        return self.fc(Double.apply(x)).square().mean()


class Tables(nn.Module):
    """Embeddings alone, picked and multiplied."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Embedding(20, 8), nn.Embedding(20, 8)

    def forward(self, ids, others):
        return F.logsigmoid((self.one(ids) * self.other(others)).sum(-1)).mean()


class Momentum(nn.Module):
    """forward moves a frozen encoder after the other one, and keeps a weight small."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8)
        self.key.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
            self.head.weight.mul_(0.95).clamp_(-0.2, 0.2)
            wanted = F.normalize(self.key(x.flip(0)), dim=-1)
        found = F.normalize(self.head(torch.relu(self.query(x))), dim=-1)
        return F.cross_entropy(found @ wanted.T / 0.2, torch.arange(len(x)))


class Forces(nn.Module):
    """Energies and their gradient by the positions, both learnt."""

    def __init__(self):
        super().__init__()
        self.kind, self.far, self.up, self.out = nn.Embedding(4, 6), nn.Linear(1, 6), nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, kinds, places, energies, forces):
        places = places.clone().requires_grad_()
        apart = (places[:, :, None] - places[:, None]).square().sum(-1, keepdim=True)
        h = self.kind(kinds) + (self.far(apart).tanh() * self.kind(kinds)[:, None]).sum(2)
        found = self.out(F.silu(self.up(h))).sum((1, 2))
        (slope,) = torch.autograd.grad(found.sum(), places, create_graph=True)
        return F.mse_loss(found, energies) + F.mse_loss(-slope, forces)


def _cases():
    g = torch.Generator().manual_seed(2)

    def real(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=g)

    lengths = torch.tensor([9, 8, 9, 7]), torch.tensor([3, 2, 0, 3])
    return {
        Spectral: (real(SAMPLES, 4, 8),),
        Speech: (real(SAMPLES, 9, 6), whole(1, LETTERS, SAMPLES, 3), *lengths),
        Taught: (real(SAMPLES, 6),),
        Translator: (real(SAMPLES, 5, 8), real(SAMPLES, 3, 8)),
        Opaque: (real(SAMPLES, 6),),
        Tables: (whole(0, 20, SAMPLES), whole(0, 20, SAMPLES)),
        Momentum: (real(SAMPLES, 6),),
        Forces: (whole(0, 4, SAMPLES, 3), real(SAMPLES, 3, 3), real(SAMPLES), real(SAMPLES, 3, 3)),
    }


def _built(kind):
    torch.manual_seed(1)
    return kind().double()


def errors(payload):
    """{"<model> <role>": largest relative error of loss, gradients, state}; infinite where one gradient is missing."""
    size = payload["ranks"]
    found = {}
    for kind, args in _cases().items():
        eager = _built(kind)
        expected = eager(*args)
        expected.backward()
        for role in ("dp", "tp"):
            mesh = autopar.Mesh(str(size), device="cpu")
            m = autopar.parallelize(_built(kind), mesh, example_args=args, pin={role: size}, outputs="gather")
            loss = m(*args)
            loss.backward()
            worst = abs(loss.item() - expected.item()) / max(1.0, abs(expected.item()))
            own = dict(m.named_parameters())
            floor = 1e-6 * max(float(p.grad.abs().max()) for p in eager.parameters() if p.grad is not None)
            for name, parameter in eager.named_parameters():
                worst = max(worst, _error(own[name].grad, parameter.grad, floor))
            after = m.full_state_dict()
            for name, value in eager.state_dict().items():
                worst = max(worst, _error(after[name], value, 1.0))
            found[f"{kind.__name__} {role}"] = worst if m.plan.degrees[role] == size else f"{m.plan.degrees}"
    return found


def _error(mine, whole, floor):
    """A true zero (the bias of attention's keys) has no relative error: least what the largest gradient makes small."""
    if whole is None or mine is None:
        return 0.0 if whole is mine or (whole is None and not mine.full_tensor().any()) else float("inf")
    mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
    return float((mine - whole).abs().max()) / max(float(whole.abs().max()), floor)
