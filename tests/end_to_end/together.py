"""Several files' cases on one set of ranks: to start them, and to import torch, takes longer than most cases."""

import importlib
import time


def run(payload):
    """payload: {"parts": [["module:function", payload], ...]}. Returns: what each gives, and its seconds."""
    out = []
    for name, given in payload["parts"]:
        module, _, function = name.partition(":")
        started = time.perf_counter()
        found = getattr(importlib.import_module(module), function)(given)
        out.append({"found": found, "seconds": time.perf_counter() - started})
    return out
