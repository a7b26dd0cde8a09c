"""A small, complete plan as JSON data, for the tests that read, print and damage plans."""

from typing import Any


def plan_data() -> dict[str, Any]:
    """A fresh copy each time: tests change it."""
    op = {
        "strategy": ["o", "b"],
        "inputs": [["R", "S(0)"], ["S(0)", "R"]],
        "outputs": [["S(2)", "S(0)"]],
        "class": "linear",
        "flop": 2.0e9,
        "bytes": 4096.0,
        "time_s": 0.0015,
        "communication_s": 0.00025,
    }
    whole = op | {"strategy": ["I", "R"], "inputs": [["I", "R"]], "outputs": [["I", "R"]], "class": "arange"}
    ops = {f"layers.{i}.mlp.up_proj/linear/1": dict(op) for i in range(4)}
    ops["layers.3.mlp.up_proj/linear/1"]["read"] = {"x": ["R", "S(0)"]}
    params = {f"layers.{i}.mlp.up_proj.weight": {"layout": [["tp", "S(0)"]], "zero": 0} for i in range(4)}
    return {
        "version": 1,
        "model": {
            "name": "toy",
            "parameters": 8_030_000_000,
            "digest": "ab12",
            "batch": 16,
            "seq": 128,
            "training": True,
        },
        "mesh": {"shape": [2, 4], "device": "h100-sxm"},
        "degrees": {"pp": 1, "dp": 2, "tp": 4, "cp": 1, "ep": 1},
        "axes": [
            {"name": "tp", "size": 4, "link": "nvlink", "role": "tp"},
            {"name": "x0", "size": 2, "link": "infiniband", "role": None},
        ],
        "zero": 1,
        "offload": "none",
        "recompute": {"Layer": "selective"},
        "microbatches": 8,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "loss_chunks": 1,
        "stages": [{"blocks": ["before:layers.0", "layers.0", "layers.1"], "devices": list(range(8))}],
        "params": params | {"norm.weight": {"layout": [], "zero": 1}},
        "ops": ops | {"/arange/1": whole},
        "predicted": {
            "step_time_s": 0.25,
            "tokens_per_s": 8192.0,
            "tflops_per_device": 312.5,
            "mfu": 0.31,
            "peak_memory_bytes": [2**36],
            "memory": {"parameters": 2**34, "activations": [2**35]},
            "breakdown_s": {"compute": 0.2, "exposed_communication": 0.05, "bubble": 0.0},
        },
        "solver": {
            "name": "highs",
            "objective": 0.25,
            "bound": 0.2499,
            "gap": 0.0004,
            "capture_s": 1.5,
            "price_s": 0.5,
            "solve_s": 0.75,
            "total_s": 2.75,
        },
        "notes": ["one op has no rule: [bold]custom[/bold]"],
        "pins": {"tp": 4, "sp": True, "*.up_proj.weight": {"tp": "S(0)"}},
    }
