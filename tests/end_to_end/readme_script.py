"""Run by torchrun: the training script of README.md, word for word, under a plan that is given to it from outside.

usage: readme_script.py PLAN OUT     ("-" as plan: one device, with nothing parallel)
Writes into the folder OUT, a file for each rank: the last loss, the parameters, and how many of them the rank holds.
"""

import functools
import os
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def script():
    """The block of README.md that trains."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [b for b in blocks if "opt.step()" in b]
    return found


def main(plan, out):
    import autopar

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if plan == "-":
        autopar.parallelize = lambda model, *args, **options: model
    else:
        autopar.parallelize = functools.partial(autopar.parallelize, plan=plan)
    names = {"__name__": "__main__"}
    exec(compile(script(), "README.md", "exec"), names)
    m = names["m"]
    whole = m.full_state_dict() if hasattr(m, "full_state_dict") else m.state_dict()
    found = {"loss": float(names["loss"]), "parameters": whole, "held": sum(1 for _ in m.parameters())}
    torch.save(found, Path(out, os.environ.get("RANK", "one") + ".pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
