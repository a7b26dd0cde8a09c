"""Run on each of two ranks: mistakes of a user, one after another. Each returns what was raised, on this rank."""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn

import autopar


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


class Branch(Net):
    def forward(self, x):
        if x.sum() > 0:  # the line that the error names
            return super().forward(x)
        return x.mean()


X = torch.linspace(-1, 1, 32).reshape(8, 4)
DEVICES = autopar.Mesh("2")


def make(model=None, mesh=DEVICES, **options):
    return autopar.parallelize(model or Net(), mesh, **{"example_args": (X,), **options})


def edited(change):
    """A saved plan with one field changed by hand."""
    data = copy.deepcopy(autopar.plan(Net(), DEVICES, example_args=(X,), pin={"tp": 2}).to_dict())
    change(data)
    return data


def load(folder, change):
    path = f"{folder}/plan-{dist.get_rank()}.json"
    with open(path, "w") as file:
        json.dump(edited(change), file)
    return make(plan=path)


def first_op(data):
    return next(op for name, op in data["ops"].items() if "linear" in name)


def old_optimizer(folder):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    make(model)(X).backward()
    optimizer.step()


def other_values(folder):
    make()(X + dist.get_rank())


def other_shape_later(folder):
    m = make()
    m(X)
    m(X[: 8 - 4 * dist.get_rank()])


def other_dtype_later(folder):
    m = make()
    m(X)
    m(X.double() if dist.get_rank() else X)


def other_mode_later(folder):
    m = make()
    m(X)
    m.train(dist.get_rank() == 0)
    m(X)


def uneven_shards(folder):
    m = make(pin={"dp": 2})
    m(m.shard(X[: 4 - dist.get_rank()]))


def one_plain_one_shard(folder):
    m = make(pin={"dp": 2})
    m(X if dist.get_rank() else m.shard(X[:4]))


def broken_file(folder):
    path = f"{folder}/broken-{dist.get_rank()}.json"
    with open(path, "w") as file:
        file.write('{"version": 1, ')
    make(plan=path)


CASES = {
    "no example": lambda folder: autopar.parallelize(Net(), DEVICES),
    "no example on one rank": lambda folder: make(example_args=(X,) if dist.get_rank() else ()),
    "mesh too large": lambda folder: make(mesh=autopar.Mesh("4")),
    "mesh is no mesh": lambda folder: make(mesh={"tp": 2}),
    "data-dependent branch": lambda folder: make(Branch()),
    "degree too large": lambda folder: make(pin={"tp": 4}),
    "batch of one in two": lambda folder: make(example_args=(X[:1],), pin={"dp": 2}),
    "no such dim": lambda folder: make(pin={"up.weight": {"tp": "S(5)"}, "tp": 2}),
    "no such pin": lambda folder: make(pin={"tensor": 2}),
    "zero without data": lambda folder: make(pin={"tp": 2, "zero": 3}),
    "no such parameter": lambda folder: make(pin={"*.q_proj.weight": {"tp": "S(0)"}, "tp": 2}),
    "no such axis": lambda folder: make(pin={"up.weight": {"columns": "S(0)"}, "tp": 2}),
    "no plan file": lambda folder: make(plan=f"{folder}/none.json"),
    "broken plan file": broken_file,
    "plan: axis size": lambda folder: load(folder, lambda d: d["axes"][0].update(size=4)),
    "plan: unknown field": lambda folder: load(folder, lambda d: d.update(speed="high")),
    "plan: no such layout": lambda folder: load(
        folder, lambda d: d["params"]["up.weight"]["layout"].append(["tp", "Q"])
    ),
    "plan: no such dim": lambda folder: load(
        folder, lambda d: d["params"]["up.weight"].update(layout=[[d["axes"][0]["name"], "S(7)"]])
    ),
    "plan: no such option": lambda folder: load(folder, lambda d: first_op(d).update(strategy=["zz"])),
    "plan: parameter missing": lambda folder: load(folder, lambda d: d["params"].pop("up.weight")),
    "plan: other model": lambda folder: make(Net(16), plan=autopar.plan(Net(), DEVICES, example_args=(X,))),
    "plan: other mesh": lambda folder: make(plan=autopar.plan(Net(), autopar.Mesh("4"), example_args=(X,))),
    "other models": lambda folder: make(Net(8 + 8 * dist.get_rank())),
    "other example shapes": lambda folder: make(example_args=(X[: 8 - 4 * dist.get_rank()],)),
    "old optimizer": old_optimizer,
    "other values": other_values,
    "other shape later": other_shape_later,
    "other dtype later": other_dtype_later,
    "other mode later": other_mode_later,
    "uneven shards": uneven_shards,
    "one plain, one shard": one_plain_one_shard,
}


def run_cases(payload):
    """Returns: {case: [class, message], or None when nothing was raised}."""
    out = {}
    for name, case in CASES.items():
        try:
            case(payload["folder"])
            out[name] = None
        except Exception as error:
            out[name] = [type(error).__name__, str(error)]
        # Ranks that were not in step would not meet here with the same case.
        number = torch.tensor([len(out), -len(out)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        assert number.tolist() == [len(out), -len(out)], name
    return out
