"""Compare a text with a file under tests/golden; `--update-golden` rewrites the file instead."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def check_golden(request: pytest.FixtureRequest, name: str, text: str) -> None:
    """Fails when `text` is not what tests/golden/<name>.txt holds."""
    file = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.rstrip("\n") + "\n")
    assert file.exists(), f"no golden file {file}; make it with --update-golden and read it"
    assert text.rstrip("\n") + "\n" == file.read_text(), f"{name} differs; if that is right, run with --update-golden"
