"""Run on each of two ranks: `autopar.verify` of small models; the reports as JSON data."""

import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.end_to_end.small_models import build, inputs


class Convolution(nn.Module):
    """Batch statistics in buffers, two outputs and no loss."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks differ: rank 0's weights win
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(4 * 16, 6)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)).relu())
        return {"logits": self.last(h.flatten(1)), "mean": h.mean(dim=(2, 3))}


IMAGES = torch.linspace(-1, 1, 8 * 3 * 16).sin().reshape(8, 3, 4, 4)


def verify(model, args, kwargs=None, pin=None, **options):
    report = autopar.verify(model, autopar.Mesh("2"), example_args=args, example_kwargs=kwargs, pin=pin, **options)
    return report.to_dict()


CASES = {
    "float64": lambda: verify(build("gpt"), *inputs("gpt"), pin={"tp": 2}, steps=2),
    "float32 loss": lambda: verify(build("hf-llama"), *inputs("hf-llama"), pin={"dp": 2, "zero": 3}, steps=2),
    "float32": lambda: verify(build("gpt"), *inputs("gpt"), pin={"tp": 2}, dtype="float32"),
    "bfloat16": lambda: verify(build("gpt"), *inputs("gpt"), pin={"dp": 2}, dtype="bf16"),  # key biases: true zeros
    "buffers": lambda: verify(Convolution(), (IMAGES,), pin={"dp": 2}, steps=2),
    "loss outside": lambda: verify(
        Convolution(), (IMAGES,), pin={"dp": 2}, loss=lambda out: out["logits"].logsumexp(1).mean()
    ),
    "dropout": lambda: verify(Convolution(0.5), (IMAGES,), pin={"dp": 2}, steps=2),
}


def run_cases(payload):
    return {name: case() for name, case in CASES.items()}
