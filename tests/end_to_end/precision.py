"""Run on each rank: mixed precision against FSDP2 and DistributedDataParallel under the same policy."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.end_to_end.parity import full
from tests.end_to_end.small_models import BATCH, build, inputs, loss_of

STEPS, LEARNING_RATE = 3, 1e-3
CASES = [
    ["bf16", {"dp": 2, "zero": 3}, "aot"],
    ["policy", {"dp": 2, "zero": 2}, "eager"],
    ["policy", {"dp": 2, "zero": 1}, "aot"],
    ["reduced in bf16", {"dp": 2, "zero": 0}, "aot"],
    ["output", {"tp": 2}, "eager"],
]
BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "bf16": "bf16",
    "policy": MixedPrecisionPolicy(BF16, FP32),
    "reduced in bf16": MixedPrecisionPolicy(BF16),
    "output": MixedPrecisionPolicy(BF16, FP32, output_dtype=torch.float64),
}


def run_cases(payload):
    """payload: {"cases": [[policy, pin, backend], ...]}"""
    args, kwargs = inputs("gpt")
    exact = _train(build("gpt"), 0)
    half = BATCH // 2
    part = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    peers = {"one device": build("gpt").to(BF16), "DDP": DistributedDataParallel(build("gpt").to(BF16))}
    for name in ("policy", "reduced in bf16"):
        peers[name] = fully_shard(build("gpt").float(), mp_policy=POLICIES[name])
    out = {"peers": {}, "cases": []}
    for name, peer in peers.items():
        whole = name == "one device"
        out["peers"][name] = _errors(_train(peer, STEPS, slice(None) if whole else part), exact)
    for policy, pin, backend in payload["cases"]:
        m = autopar.parallelize(
            build("gpt").float(),
            autopar.Mesh("2"),
            example_args=args,
            example_kwargs=kwargs,
            pin=pin,
            backend=backend,
            precision=POLICIES[policy],
        )
        found = _train(m, STEPS)
        out["cases"].append(
            {
                **_errors(found, exact),
                "masters": sorted({str(p.dtype) for p in m.parameters()}),
                "gradients": sorted({str(g.dtype) for g in found["grads"].values()}),
                "loss dtype": str(found["dtype"]),
                "sent": sent(m),
            }
        )
    return out


def sent(m):
    """Of the lowered graphs: the share of elements that each kind of collective sends in float32."""
    counts = {}
    for lowered in m._cache.values():
        for graphs in getattr(lowered.run, "graphs", ()):
            for part, module in (("forward", graphs.forward), ("backward", graphs.backward)):
                for node in module.graph.nodes:
                    name = str(node.target)
                    if name.startswith("_c10d_functional.") and "wait" not in name:
                        value = node.meta["val"]
                        count = counts.setdefault(f"{part} {name.split('.')[1].removesuffix('_')}", [0, 0])
                        count[0] += value.numel() * (value.dtype == FP32)
                        count[1] += value.numel()
    return {key: wide / total for key, (wide, total) in counts.items()}


def _train(m, steps, part=slice(None)):
    """The loss and gradients of a call, and the losses of some steps of AdamW. part: of the batch, on this rank."""
    optimizer = torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE)
    out = {"losses": []}
    for step in range(max(steps, 1)):
        args, kwargs = inputs("gpt", seed=step)
        loss = loss_of(m(*(x[part] for x in args), **kwargs))
        loss.backward()
        value = loss.detach().double()
        if part != slice(None):
            dist.all_reduce(value)
            value /= dist.get_world_size()
        out["losses"].append(float(value))
        if not step:
            out["dtype"] = loss.dtype
            out["grads"] = {n.removeprefix("module."): full(p.grad) for n, p in m.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return out


def _errors(found, exact):
    """Of the loss, and the largest of a gradient: over its magnitude, or the largest one's where it is truly zero."""
    largest = max(float(g.abs().max()) for g in exact["grads"].values())
    errors = []
    for name, g in exact["grads"].items():
        size = float(g.abs().max())
        error = float((found["grads"][name].double() - g).abs().max())
        errors.append(error / (size if size > 1e-6 * largest else largest))
    return {
        "loss": abs(found["losses"][0] - exact["losses"][0]) / exact["losses"][0],
        "grads": max(errors),
        "losses": found["losses"],
    }


def run_scaler(payload):
    """fp16 under GradScaler: an infinite gradient in one rank's shard alone. Returns: what happened to each step."""
    args, kwargs = inputs("gpt")
    m = autopar.parallelize(
        build("gpt").float(),
        autopar.Mesh("2"),
        example_args=args,
        example_kwargs=kwargs,
        pin={"dp": 2, "zero": 3},
        precision="fp16",
        backend="eager",
    )
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    out = []
    for spoiled in (False, True, False):
        before = copy.deepcopy([p.detach().to_local() for p in m.parameters()])
        scaler.scale(loss_of(m(*args, **kwargs))).backward()
        if spoiled and dist.get_rank() == 1:
            next(m.parameters()).grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, p.detach().to_local()) for a, p in zip(before, m.parameters(), strict=True))
        out.append([moved, scaler.get_scale()])
    return out
