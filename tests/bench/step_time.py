"""Seconds a step of hand-written PyTorch parallelism and of autopar on gloo ranks of this machine, interleaved.

A GPT of about 30 million parameters; every round runs both of a pair, so that what else the machine does hits both.
Each kind has rank processes of its own; those whose turn it is not wait.

usage: python tests/bench/step_time.py [--world 2] [--rounds 10] [--kinds autopar_dp,...] [--batch 8]
Prints a table of medians, spreads (10th to 90th percentile) and ratios, and one JSON line.

    ddp          DistributedDataParallel                        against autopar_dp (dp, zero 0)
    fsdp2        fully_shard of each block and the whole        against autopar_zero3 (dp, zero 3)
    dtensor_tp   parallelize_module, Megatron's split           against autopar_tp (tp)
    eager_1      the model on one device (rank 0 alone)         against aot_1 (the same through lowered graphs)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.told import Ranks, serve

WIDTH, LAYERS, HEADS, VOCAB, SEQ = 512, 8, 8, 4096, 256
PAIRS = {"autopar_dp": "ddp", "autopar_zero3": "fsdp2", "autopar_tp": "dtensor_tp", "aot_1": "eager_1"}
"""Ours -> theirs."""
PINS = {"autopar_dp": {"dp": 0, "zero": 0}, "autopar_zero3": {"dp": 0, "zero": 3}, "autopar_tp": {"tp": 0}}
"""0 stands for the number of ranks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, seq, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, -1)
        x = x + self.o(h)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def made(kind: str, world: int, rank: int, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model under this kind of parallelism, and what this rank hands to it."""
    import autopar

    generator = torch.Generator().manual_seed(7)
    whole = tuple(torch.randint(0, VOCAB, (batch, SEQ), generator=generator) for _ in range(2))
    part = tuple(x[rank * batch // world : (rank + 1) * batch // world] for x in whole)
    model = GPT()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), part
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, part
    if kind == "dtensor_tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (world,))
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        for block in model.blocks:
            parallelize_module(block, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})
        return model, whole
    if kind == "eager_1":
        return model, part
    if kind == "aot_1":
        return autopar.parallelize(model, autopar.Mesh("1", device="cpu"), example_args=part), part
    pin = {key: value or (world if key != "zero" else 0) for key, value in PINS[kind].items()}
    return autopar.parallelize(model, autopar.Mesh(str(world), device="cpu"), example_args=whole, pin=pin), whole


def stepper(kind: str, world: int, rank: int, batch: int) -> Callable[[], None]:
    model, inputs = made(kind, world, rank, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(*inputs).backward()
        if not kind.endswith("_1"):  # of one device only forward and backward are compared
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(kinds: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step; the first two of a kind are not counted."""
    sizes = ("--world", options.world, "--batch", options.batch)
    ranks = {kind: Ranks(__file__, options.world, "--kinds", kind, *sizes) for kind in kinds}
    for each in ranks.values():
        each.step(), each.step()
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, each in ranks.items():
            found[kind].append(each.step()["step"])
    for each in ranks.values():
        each.end()
    return found


def report(found: dict[str, list[float]], world: int) -> None:
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    print(f"| {world} ranks | median s | 10 % to 90 % | over the peer | rounds |\n|---|---|---|---|---|")
    for kind, times in found.items():
        tenths = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
        ratio = ""
        if PAIRS.get(kind) in found:  # of each round, since rounds share what else the machine does
            peers = found[PAIRS[kind]]
            ratio = f"{statistics.median(a / b for a, b in zip(times, peers, strict=True)):.3f}"
        print(f"| {kind} | {medians[kind]:.3f} | {tenths[0]:.3f} to {tenths[-1]:.3f} | {ratio} | {len(times)} |")
    print(json.dumps({kind: round(value, 4) for kind, value in medians.items()}))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("world", 2), ("rounds", 10), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", default=",".join(PAIRS), help="one of ours stands for its pair")
    parser.add_argument("--told", action="store_true", help="a rank of one kind, told when to step")
    options = parser.parse_args()
    if options.told:
        serve(lambda rank: stepper(options.kinds, options.world, rank, options.batch))
    else:
        kinds, known = options.kinds.split(","), [*PAIRS, *PAIRS.values()]
        if unknown := [kind for kind in kinds if kind not in known]:
            parser.error(f"--kinds {','.join(unknown)}: the kinds are {', '.join(known)}")
        ours = [kind for kind in kinds if kind in PAIRS]
        alone = [[kind] for kind in kinds if kind not in {*PAIRS, *(PAIRS[kind] for kind in ours)}]
        found: dict[str, list[float]] = {}
        for pair in [*([PAIRS[kind], kind] for kind in ours), *alone]:  # few at a time: memory is short
            found |= measure(pair, options)
        report(found, options.world)


if __name__ == "__main__":
    main()
