"""Run on two ranks: functional collectives with the kernels that keep their own work."""

import warnings

import torch
import torch.distributed as dist

from autopar.runtime import gloo

OPS = torch.ops._c10d_functional


def run_cases(payload):
    """Returns: what is to be equal, by name: (found, expected)."""
    gloo.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # users' logs are for what they did
        return _found()


def _found():
    name, rank = dist.group.WORLD.group_name, dist.get_rank()
    every = [torch.arange(6.0).reshape(2, 3) + 10 * r for r in range(2)]
    mine = every[rank]
    found = {}

    def say(what, value, expected):
        found[what] = (value.tolist(), expected.tolist())

    say("sum", OPS.wait_tensor(OPS.all_reduce(mine, "sum", name)), every[0] + every[1])
    say("the operand is kept", mine, every[rank])
    say("maximum", OPS.wait_tensor(OPS.all_reduce(mine, "max", name)), every[1])
    say("transposed", OPS.wait_tensor(OPS.all_reduce(mine.t(), "sum", name)), (every[0] + every[1]).t())
    written = mine.clone()
    OPS.wait_tensor(OPS.all_reduce_(written, "sum", name))
    say("in place", written, every[0] + every[1])
    say("gather", OPS.wait_tensor(OPS.all_gather_into_tensor(mine, 2, name)), torch.cat(every))
    say(
        "gather of columns",
        OPS.wait_tensor(OPS.all_gather_into_tensor(mine.t(), 2, name)),
        torch.cat([e.t() for e in every]),
    )
    out = torch.zeros(4, 3)
    OPS.wait_tensor(OPS.all_gather_into_tensor_out(mine, 2, name, out=out))
    say("gather into", out, torch.cat(every))
    whole = torch.arange(8.0).reshape(4, 2) * (rank + 1)
    say(
        "scatter",
        OPS.wait_tensor(OPS.reduce_scatter_tensor(whole, "sum", 2, name)),
        3 * torch.arange(8.0).reshape(4, 2)[2 * rank :][:2],
    )
    sent = torch.arange(3.0) + 10 * rank
    swapped = OPS.all_to_all_single(sent, [1, 1] if rank == 0 else [2, 2], [1, 2], name)
    say("all to all", OPS.wait_tensor(swapped), torch.tensor([0.0, 10.0] if rank == 0 else [1.0, 2.0, 11.0, 12.0]))
    say("empty", OPS.wait_tensor(OPS.all_reduce(torch.zeros(0), "sum", name)), torch.zeros(0))
    say("whole numbers", OPS.wait_tensor(OPS.all_reduce(torch.tensor([rank + 1]), "sum", name)), torch.tensor([3]))
    started = OPS.all_gather_into_tensor(mine, 2, name)
    say("waited for by a part of it", OPS.wait_tensor(started[2:]), every[1])
    many = [OPS.all_reduce(mine + i, "sum", name) for i in range(5)]
    say(
        "in another order",
        torch.stack([OPS.wait_tensor(x) for x in reversed(many)]),
        torch.stack([every[0] + every[1] + 2 * i for i in reversed(range(5))]),
    )
    say("waited for twice", OPS.wait_tensor(OPS.wait_tensor(OPS.all_reduce(mine, "sum", name))), every[0] + every[1])
    return {"equal": found, "left": len(gloo._pending)}
