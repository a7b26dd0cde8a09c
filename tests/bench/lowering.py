"""Seconds to plan and lower a Llama of a billion parameters, from the model on meta to both graphs of a rank.

usage: python tests/bench/lowering.py [--layers 16] [--mesh 2x4] [--pin dp=4,tp=2,zero=3] [--profile]

Nothing is computed and no weight is made: parameters are fake tensors of the shards' sizes, the process group is
torch's fake one. Prints the seconds of each stage, with `--profile` the functions that took most. The bar: 30 s in all
for the 16 layers on two cores.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
BEGUN = time.perf_counter()


def model_of(layers: int):
    """Llama 3.2's sizes (1B with 16 layers, head tied to the embedding), on meta."""
    from autopar.models import Llama, LlamaConfig

    config = LlamaConfig(128256, 2048, layers, 32, 8, 2048, 8192, rotary_base=500000.0, tied=True)
    return Llama(config, batch=8, device="meta")


def stages(layers: int, shape: str, pin: dict[str, int]) -> tuple[dict[str, tuple[float, float]], int]:
    """Seconds by stage, of the clock and of the processor; nodes of both graphs."""
    import torch
    import torch.distributed as dist
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from autopar import Mesh
    from autopar.layout import local_parts
    from autopar.pipeline import carry_out, choose, lower, prepare
    from autopar.request import make_request
    from autopar.runtime.moves import use_groups
    from autopar.runtime.process_mesh import connect
    from autopar.runtime.random import Draws, drawing

    seconds: dict[str, tuple[float, float]] = {}

    def lap(name: str) -> None:
        now = time.perf_counter() - BEGUN, time.process_time()
        seconds[name] = tuple(n - sum(s[i] for s in seconds.values()) for i, n in enumerate(now))

    lap("imports")

    mesh = Mesh(shape, device="h100-sxm")
    request = make_request(mesh, pin or None, None, None, "adamw", "auto", None, "aot", False, False, None, "off")
    dist.init_process_group("fake", rank=0, world_size=request.topology.size, store=FakeStore())
    model = model_of(layers)
    args, kwargs = model.example_inputs()
    lap("model")
    prepared = prepare(model, args, kwargs, name="Llama", outputs=request.outputs)
    lap("capture")
    chosen = choose(prepared, request.topology, request.profile, request.settings, recompute=request.recompute)
    lap("plan")
    found, decisions = carry_out(prepared, chosen, request.profile, request.settings)
    lap("carry out")
    at = found.mesh.coordinate(0)
    lowered = lower(
        prepared, decisions, found.mesh, request.profile, at, torch.device("cpu"), backend="aot", kernels="off",
        recompute={b: chosen.recompute.get(c.name, "none") for c in prepared.program.classes for b in c.blocks},
    )  # fmt: skip
    lap("shard")
    groups = connect(found.mesh).groups
    with FakeTensorMode(allow_non_fake_inputs=True), use_groups(groups), drawing(Draws(0).next(True)):
        values = []
        for source in lowered.program.sources:
            parts, layout = prepared.analysis.parts[source.node], decisions.sources.get(source.node)
            if source.kind == "parameter":
                parts = local_parts(parts, layout, found.mesh.sizes, at)
            made = torch.empty(parts.shape, dtype=prepared.analysis.dtypes[source.node], device="cpu")
            values.append(made.requires_grad_(source.trainable))
        lowered.run(*values)
    lap("lower")
    return seconds, sum(len(g.graph.nodes) for g in (lowered.run.graphs[0].forward, lowered.run.graphs[0].backward))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--pin", default="")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    pin = {k: int(v) for k, v in (item.split("=") for item in options.pin.split(",") if item)}
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    seconds, nodes = stages(options.layers, options.mesh, pin)
    profile.disable()
    seconds["all"] = tuple(sum(s[i] for s in seconds.values()) for i in (0, 1))
    print(f"{options.layers} layers on {options.mesh} {options.pin}: {nodes} nodes; seconds (of the processor)")
    print(", ".join(f"{name} {wall:.1f} ({processor:.1f})" for name, (wall, processor) in seconds.items()))
    print(json.dumps({name: [round(x, 2) for x in pair] for name, pair in seconds.items()}))
    if options.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(60)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
