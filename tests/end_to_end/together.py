"""Run on each rank: several files' cases, one file after another."""

import importlib
import time
import traceback


def run(payload):
    """payload: {"parts": {name: ["module:function", payload]}}. Returns: by name what it gives, or its error, and its
    processor time.
    """
    out = {}
    for name, (path, given) in payload["parts"].items():
        module, _, function = path.partition(":")
        started, told = time.process_time(), {}
        try:
            told["found"] = getattr(importlib.import_module(module), function)(given)
        except Exception:
            told["error"] = traceback.format_exc()
        out[name] = {**told, "processor_s": time.process_time() - started}
    return out
