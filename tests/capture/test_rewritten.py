"""Functions of torch that read values are captured without: the same values and gradients as eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.reference import run_program

X = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
CLASSES = torch.tensor([0, 5, 9, 2])
MASK = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True), 1)
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [4, 7], div_value=2.0)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@torch.inference_mode()
def teacher(net: Net, x: Tensor) -> Tensor:
    return net.fc(x)


def inference(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        seen = net.fc(x)
    with torch.inference_mode(mode=False):
        kept = net.fc(x)
    return kept * seen.clone() + teacher(net, x).clone()


def sound(net: Net, x: Tensor, **options: object) -> Tensor:
    """Frames of a signal, changed, and the signal that they make."""
    wave = torch.stft(net.fc(x).flatten().repeat(2, 2), 8, return_complex=True, **options)  # type: ignore[arg-type]
    return torch.istft(wave * (1 + 0.1j), 8, **options)  # type: ignore[arg-type]


WINDOW = torch.hann_window(6, dtype=torch.float64)
BODIES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "encoder with a mask": lambda net, x: net.encoder(net.fc(x)[None], mask=MASK),
    "decoder with a mask": lambda net, x: net.decoder(net.fc(x)[None], x[None], tgt_mask=MASK),
    "gaussian": lambda net, x: F.gaussian_nll_loss(net.fc(x), x, net.fc(x).abs()),
    "gaussian, a clamped variance a row": lambda net, x: F.gaussian_nll_loss(
        net.fc(x), x, net.fc(x)[:, 0].square(), full=True, eps=0.3, reduction="sum"
    ),
    "gaussian, a number": lambda net, x: F.gaussian_nll_loss(net.fc(x), x, 0.5, reduction="none"),
    "covariance": lambda net, x: torch.cov(net.fc(x).t()) + net.fc(x)[0].cov(correction=0),
    "correlation": lambda net, x: torch.corrcoef(net.fc(x)),
    "combinations": lambda net, x: torch.combinations(net.fc(x)[0], 3),
    "counts": lambda net, x: net.fc(x) * torch.bincount(CLASSES // 4, minlength=6),
    "weighted counts": lambda net, x: net.fc(x) * (CLASSES // 4).bincount(x[:, 0], minlength=6),
    "adaptive loss": lambda net, x: net.adaptive(net.fc(x), CLASSES).loss,
    "adaptive rows": lambda net, x: net.adaptive(net.fc(x), CLASSES).output,
    "adaptive choice": lambda net, x: net.fc(x) * net.adaptive.predict(x)[:, None],
    "alignments": lambda net, x: F.ctc_loss(
        net.fc(x).view(4, 3, 2).log_softmax(-1), torch.ones(3, 2, dtype=torch.long), (4, 3, 4), (2, 1, 0)
    ),
    "an alignment alone": lambda net, x: nn.CTCLoss(blank=1, reduction="none")(
        net.fc(x).log_softmax(-1), torch.tensor([0, 2]), torch.tensor(4), torch.tensor(2)
    ),
    "alignments of targets in a row": lambda net, x: nn.CTCLoss(reduction="sum", zero_infinity=True)(
        net.fc(x).view(4, 3, 2).log_softmax(-1), torch.ones(9, dtype=torch.long), (4, 3, 4), (2, 1, 6)
    ),
    "sound": lambda net, x: sound(net, x, window=torch.ones(8, dtype=torch.float64)),
    "sound in a window": lambda net, x: sound(net, x, hop_length=3, win_length=6, window=WINDOW, normalized=True),
    "sound of a length": lambda net, x: torch.stft(
        net.fc(x)[0].repeat(6), 8, window=torch.ones(8).double(), return_complex=True
    ).istft(8, window=torch.ones(8).double(), length=33),
    "inference": inference,
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_as_eager(name: str) -> None:
    torch.manual_seed(0)
    net = Net(BODIES[name]).double()
    program = capture(net, (X,), {})
    found = run_program(program, program.state, [X])[0][0]
    expected = net(X)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weights).sum().backward()
    mine = {n: t for n, t in program.state.items() if isinstance(t, nn.Parameter)}
    eager = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()
    state = {n: t.detach().clone().requires_grad_() if n in mine else t for n, t in program.state.items()}
    (run_program(program, state, [X])[0][0] * weights).sum().backward()
    for path, grad in eager.items():
        if grad is None:
            assert state[path].grad is None, path
        else:
            torch.testing.assert_close(state[path].grad, grad, rtol=1e-10, atol=1e-12)


def test_torch_is_as_it_was() -> None:
    before = [F.gaussian_nll_loss, torch.cov, torch.bincount, torch.inference_mode.__enter__]
    capture(Net(BODIES["covariance"]).double(), (X,), {})
    assert before == [F.gaussian_nll_loss, torch.cov, torch.bincount, torch.inference_mode.__enter__]
    assert "cov" not in vars(Tensor)
