"""Every kernel of every model and architecture that the tests know, once in Triton's interpreter: the second table of
`tests/bench/kernels.md`.

    python -m tests.bench.kernels_run [NAMES]

Each model is planned on one device and lowered as a user's is; the kernels of both graphs, equal ones once, are
compared with their ATen ops in float32. Sizes are those of the tests: 24 tokens, widths of 16 and 24; `one row` is one
token of one sequence, `one column` a width of 1.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.codegen.group import FusedGroup
from tests.codegen.compare import check_group
from tests.codegen.lowered import gpt, llama
from tests.end_to_end import architectures

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUT = Path(__file__).with_name("kernels.md")
MARK = "# Kernels in the interpreter"


@dataclass(frozen=True, slots=True)
class Case:
    """A model in one dtype, and what a call of it takes."""

    name: str
    dtype: torch.dtype
    made: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


@dataclass(slots=True)
class Found:
    """Of one case. kernels: by graph. checked: by text, the share of the allowed error. wrong: what was not right."""

    kernels: dict[str, int] = field(default_factory=dict)
    checked: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for name in architectures.ARCHITECTURES:
            yield Case(name, dtype, partial(_architecture, name, dtype))
        for build in (gpt, llama):
            for said, sizes in (("odd", (2, 5, 24)), ("one row", (1, 1, 8)), ("even", (2, 16, 64))):
                yield Case(f"{build.__name__}, {said}", dtype, partial(_own, build, sizes, dtype))
        yield Case("gpt, one column", dtype, partial(_own, gpt, (2, 5, 1), dtype, heads=1))


def _architecture(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return architectures.build(name, dtype, True), *architectures.inputs(name, dtype)


def _own(
    build: Callable[..., Any], sizes: tuple[int, int, int], dtype: torch.dtype, **changes: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = build(*sizes, **changes)
    return model.to(dtype), inputs, {}


def check(case: Case, seen: dict[str, float]) -> Found:
    """Lower the model, and run each kernel that was not seen before."""
    model, args, kwargs = case.made()
    batch_dims = getattr(architectures.ARCHITECTURES.get(case.name), "batch_dims", None)
    options: dict[str, Any] = {"batch_dims": batch_dims} if batch_dims else {}
    found = Found()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        m = autopar.parallelize(
            model, autopar.Mesh("1"), example_args=args, example_kwargs=kwargs, kernels="on", **options
        )
        out = m(*args, **kwargs)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        for lowered in m._cache.values():
            for graphs in lowered.run.graphs:
                for which in ("forward", "backward"):
                    groups = [g for g in getattr(graphs, which).modules() if isinstance(g, FusedGroup)]
                    found.kernels[which] = found.kernels.get(which, 0) + len(groups)
                    for group in groups:
                        _check_once(group, seen, found)
    found.wrong += [str(w.message) for w in warned if "kernel" in str(w.message) or "AOT" in str(w.message)]
    return found


def _check_once(group: FusedGroup, seen: dict[str, float], found: Found) -> None:
    text = group.code.printed.text
    if text not in seen:
        try:
            seen[text] = check_group(group)
        except AssertionError as error:
            seen[text] = float("inf")
            found.wrong.append(f"{group.code.name}: {error}")
    found.checked[text] = seen[text]


def table(names: list[str], dtypes: list[str]) -> Iterator[str]:
    yield f"{MARK}\n"
    yield f"Made by `python -m tests.bench.kernels_run`, {time.strftime('%Y-%m-%d')}: torch {torch.__version__}. Each"
    yield "kernel of the forward and the backward graph on one device, against its ATen ops in float32. `different`:"
    yield "texts. `largest`: the largest error of a result over what is allowed: 1e-5 of the largest value in float32,"
    yield "on top of that 2 units in the last place in half precision.\n"
    yield "| model | dtype | groups, forward | backward | different | largest | right |"
    yield "|---|---|---|---|---|---|---|"
    seen: dict[str, float] = {}
    for case in cases():
        dtype = str(case.dtype).removeprefix("torch.")
        if (names and case.name not in names) or dtype not in dtypes:
            continue
        try:
            found = check(case, seen)
        except Exception as error:
            yield f"| {case.name} | {dtype} | | | | | {type(error).__name__}: {str(error).splitlines()[0]} |"
            continue
        counts = [str(found.kernels.get(which, 0)) for which in ("forward", "backward")]
        largest = max(found.checked.values(), default=0.0)
        right = "yes" if not found.wrong else "NO: " + "; ".join(found.wrong)
        yield f"| {case.name} | {dtype} | {' | '.join(counts)} | {len(found.checked)} | {largest:.2f} | {right} |"
    yield f"\n{len(seen)} different kernels."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all when none is given")
    parser.add_argument("--out", type=Path, help=f"a file whose part from `{MARK}` on is replaced")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    given = parser.parse_args()
    lines = []
    for line in table(given.names, given.dtypes.split(",")):
        print(line, flush=True)
        lines.append(line)
    if given.out:
        before = given.out.read_text().partition(MARK)[0] if given.out.exists() else ""
        given.out.write_text(before + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
