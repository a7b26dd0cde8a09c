"""The house rules that a reader relies on: imports go one way, every pass is documented and tested, names are
documented.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import autopar
import autopar.passes

ROOT = Path(autopar.__file__).parent.parent

TIERS = (
    {
        "errors",
        "layout",
        "mesh",
        "program",
        "plan",
        "precision",
        "schema",
        "plan_table",
        "console",
        "pins",
        "user_function",
        "schedule",
    },
    {"capture", "rules", "runtime", "dump", "outputs"},
    {"cost"},
    {"passes", "codegen", "compiled", "dump_lowered", "lifetime", "repeated"},
    {"solver"},
    {"pipeline", "request", "staged"},
    {"assemble"},
    {"api"},
    {"verify", "compare", "trial"},
)
"""What a tier may import: itself and the tiers before it. Modules in no tier (cli, demo, ...) are the top and may
import all.
"""


def modules() -> list[tuple[str, Path]]:
    """(name below autopar, file) of every module; the linked folders by their own name."""
    files = [*(ROOT / "autopar").glob("*.py")]
    for folder in ("capture", "rules", "runtime", "schedule", "solver"):
        files += (ROOT / "autopar" / folder).glob("*.py")
    for folder in ("passes", "cost", "codegen", "models"):
        files += (ROOT / folder).glob("*.py")
    return [(f.relative_to(ROOT).with_suffix("").as_posix().removeprefix("autopar/").split("/")[0], f) for f in files]


def imported(file: Path) -> set[str]:
    """Names of the autopar modules that a file imports anywhere, lazily too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "autopar" else [node.module]
        found |= {n.split(".")[1] for n in names if n.startswith("autopar.")}
    return found


def test_imports_go_one_way() -> None:
    tier = {name: i for i, names in enumerate(TIERS) for name in names}
    wrong = [
        f"{file.relative_to(ROOT)} imports autopar.{other}"
        for name, file in modules()
        for other in imported(file)
        if name in tier and tier.get(other, len(TIERS) if other != "models" else 0) > tier[name]
    ]
    assert wrong == []


def test_tiers_name_modules_that_exist() -> None:
    assert {n for names in TIERS for n in names} <= {name for name, _ in modules()}


def test_linked_folders_are_imported_through_autopar() -> None:
    pattern = re.compile(r"^\s*(import|from) (passes|cost|codegen|models)\b", re.MULTILINE)
    assert [str(f) for f in ROOT.rglob("*.py") if ".venv" not in f.parts and pattern.search(f.read_text())] == []


def test_models_import_only_torch() -> None:
    for _, file in modules():
        if file.parent.name == "models":
            assert imported(file) <= {"models"}, file


PASS_FILES = sorted(m.name for m in pkgutil.iter_modules(autopar.passes.__path__))


@pytest.mark.parametrize("name", PASS_FILES)
def test_every_pass_is_documented_and_tested(name: str) -> None:
    module = __import__(f"autopar.passes.{name}", fromlist=["_"])
    classes = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if c.__module__ == module.__name__ and hasattr(c, "run")
    ]
    for cls in classes:
        for word in ("Input:", "Output:", "Refuses:"):
            assert word in (cls.__doc__ or ""), f"{cls.__name__} does not say its {word}"
    assert (ROOT / "tests" / "passes" / f"test_{name}.py").exists(), f"no test file for passes/{name}.py"


def test_all_names_exist_and_are_documented() -> None:
    for name in autopar.__all__:
        thing = getattr(autopar, name)
        assert inspect.getdoc(thing), f"autopar.{name} has no docstring"
