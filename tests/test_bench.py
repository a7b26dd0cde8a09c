"""The benchmarks, run by hand and some only where there is a GPU: each can be loaded, and says what it does."""

import importlib
from pathlib import Path

import pytest

HELPERS = {"kept", "long_rows", "told"}
"""Of others, not run by themselves."""
SCRIPTS = sorted(p.stem for p in (Path(__file__).parent / "bench").glob("*.py"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, in its Inductor
@pytest.mark.parametrize("name", SCRIPTS)
def test_loads(name):
    module = importlib.import_module(f"tests.bench.{name}")
    assert module.__doc__, "says nothing"
    assert callable(getattr(module, "main", None)) == (name not in HELPERS)
