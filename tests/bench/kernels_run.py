"""Every kernel of every model and architecture that the tests know, once in Triton's interpreter and once compiled for
each GPU: the second table of `tests/bench/kernels.md`.

    python -m tests.bench.kernels_run [NAMES] --state FILE --out tests/bench/kernels.md

Each model is planned and lowered as a user's is, but not run; the kernels of both graphs, equal ones once over all
models, are compared with their ATen ops in float32, and compiled. Sizes are those of the tests (24 tokens, widths of
16 and 24), and again `ragged`, no multiples of anything, and `one row`: one token, one image. `one column` is a width
of 1. A run that was ended goes on from its `--state`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from triton.backends.compiler import GPUTarget

import autopar
from autopar.api import _plan_of, _prepare
from autopar.codegen.code import Code
from autopar.codegen.group import FusedGroup
from autopar.passes.lower import Graphs
from autopar.passes.shard import Shard
from autopar.pipeline import carry_out
from autopar.request import make_request
from autopar.traced import trace
from tests.bench import kernels
from tests.codegen.compare import check_group
from tests.codegen.lowered import gpt, llama
from tests.end_to_end import architectures

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUT = Path(__file__).with_name("kernels.md")
MARK = "# Kernels in the interpreter"
SHAPES: Mapping[str, Mapping[str, int]] = {
    "even": {},
    "ragged": {"BATCH": 3, "SEQ": 5},
    "one row": {"BATCH": 1, "SEQ": 1},
}
"""What a shape changes of `architectures`."""
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A model in one dtype, and what a call of it takes. pin: the plan, of as many ranks as it multiplies to."""

    name: str
    dtype: torch.dtype
    made: Callable[[], Made]
    pin: Mapping[str, int] = field(default_factory=dict)
    shape: str = "even"

    @property
    def key(self) -> str:
        return f"{self.name} | {str(self.dtype).removeprefix('torch.')}"


@dataclass(slots=True)
class Seen:
    """Of one kernel. share: of the allowed error. moved: bytes over the least possible. registers: the most of its
    functions, by GPU. spilled: bytes, over all of its functions and GPUs."""

    share: float
    moved: float = 0.0
    registers: dict[str, int] = field(default_factory=dict)
    spilled: int = 0


@dataclass(slots=True)
class Found:
    """Of one case. kernels: by graph. checked: by text and types. fresh: how many of them no earlier case had. wrong:
    what was not right."""

    kernels: dict[str, int] = field(default_factory=dict)
    checked: dict[str, Seen] = field(default_factory=dict)
    fresh: int = 0
    wrong: list[str] = field(default_factory=list)


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in SHAPES:
            for name in architectures.ARCHITECTURES:
                said = name if shape == "even" else f"{name}, {shape}"
                yield Case(said, dtype, partial(_architecture, name, dtype), shape=shape)
        for build in (gpt, llama):
            for said, sizes in (("odd", (2, 5, 24)), ("one row", (1, 1, 8)), ("even", (2, 16, 64))):
                yield Case(f"zoo-{build.__name__}, {said}", dtype, partial(_own, build, sizes, dtype))
            for pin in ({"tp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 0}):
                said = f"zoo-{build.__name__}, " + " ".join(f"{k}={v}" for k, v in pin.items())
                yield Case(said, dtype, partial(_own, build, (2, 8, 32), dtype), pin)
        yield Case("zoo-gpt, one column", dtype, partial(_own, gpt, (2, 5, 1), dtype, heads=1))


def _architecture(name: str, dtype: torch.dtype) -> Made:
    return architectures.build(name, dtype, True), *architectures.inputs(name, dtype)


def _own(
    build: Callable[..., Any], sizes: tuple[int, int, int], dtype: torch.dtype, **changes: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = build(*sizes, **changes)
    return model.to(dtype), inputs, {}


@contextmanager
def _sized(shape: str) -> Iterator[None]:
    """The architectures with other batches, for as long."""
    before = {key: getattr(architectures, key) for key in SHAPES[shape]}
    for key, value in SHAPES[shape].items():
        setattr(architectures, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(architectures, key, value)


def lowered(case: Case) -> Graphs:
    """Both graphs of the first rank, ops joined to kernels."""
    with _sized(case.shape):
        model, args, kwargs = case.made()
    found = architectures.ARCHITECTURES.get(case.name.partition(",")[0])
    ranks = 2 if case.pin else 1
    mesh = autopar.Mesh(str(ranks), device="cpu")
    batch_dims = found.batch_dims if found is not None else None
    request = make_request(mesh, case.pin, None, None, 0, "auto", batch_dims, "aot", False, False, None, "on")
    prepared = _prepare(model, args, kwargs, request, lambda stage: None)
    plan = _plan_of(prepared, request, None, lambda stage: None)
    chosen, decisions = carry_out(prepared, plan, request.profile, request.settings)
    at = chosen.mesh.coordinate(0)
    program = Shard(prepared.analysis, decisions, chosen.mesh, request.profile, at).run(prepared.program)
    return trace(program, chosen.mesh, at, fused=True).graphs


def check(case: Case, seen: dict[str, Seen], build: bool = False) -> Found:
    """Lower the model, and run (and `build`: compile) each kernel that was not seen before."""
    found, graphs = Found(), lowered(case)
    for which in ("forward", "backward"):
        groups = [g for g in getattr(graphs, which).modules() if isinstance(g, FusedGroup)]
        found.kernels[which] = len(groups)
        for group in groups:
            _check_once(group, seen, found, build)
    return found


def _check_once(group: FusedGroup, seen: dict[str, Seen], found: Found, build: bool) -> None:
    code = group.code
    types = [str(buffer.dtype) for buffer in code.kernel.buffers]
    text = hashlib.sha256(f"{types} {code.printed.text}".encode()).hexdigest()
    if text not in seen:
        found.fresh += 1
        try:
            seen[text] = Seen(check_group(group), kernels.byte_ratio(code))
            if build:
                _compile(code, seen[text])
        except Exception as error:
            seen[text] = Seen(float("inf"))
            found.wrong.append(f"{code.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    found.checked[text] = seen[text]


def _compile(code: Code, into: Seen) -> None:
    for launch in code.printed.launches:
        for capability in kernels.CUDA:
            made = kernels.for_cuda(code, launch, capability)
            into.registers[made.target] = max(into.registers.get(made.target, 0), made.registers or 0)
            into.spilled += made.spilled_bytes or 0
        for architecture in kernels.HIP:
            kernels.compile_function(code, launch, GPUTarget("hip", architecture, 64))


def row(case: Case, seen: dict[str, Seen]) -> str:
    try:
        found = check(case, seen, build=True)
    except Exception as error:
        return f"| {case.key} | | | | | | | | | {type(error).__name__}: {str(error).splitlines()[0]} |"
    counts = " | ".join(str(found.kernels[which]) for which in ("forward", "backward"))
    checked = list(found.checked.values())
    share, moved = (max((getattr(s, what) for s in checked), default=0.0) for what in ("share", "moved"))
    registers = [max((s.registers.get(f"sm_{c}", 0) for s in checked), default=0) for c in kernels.CUDA]
    spilled = sum(s.spilled for s in checked)
    right = "yes" if share <= 1 else "NO: " + "; ".join(found.wrong)
    built = f"{' '.join(map(str, registers))} | {spilled}"
    return f"| {case.key} | {counts} | {len(checked)} | {found.fresh} | {share:.2f} | {moved:.3f} | {built} | {right} |"


def run(names: list[str], dtypes: list[str], state: Path | None) -> tuple[dict[str, str], dict[str, Seen]]:
    """Rows by case, and all kernels that were run."""
    held = json.loads(state.read_text()) if state is not None and state.exists() else {"seen": {}, "rows": {}}
    seen, rows = {key: Seen(**told) for key, told in held["seen"].items()}, held["rows"]
    for case in cases():
        wanted = not names or case.name in names or case.name.partition(",")[0] in names
        if case.key in rows or not wanted or str(case.dtype).removeprefix("torch.") not in dtypes:
            continue
        began = time.perf_counter()
        rows[case.key] = row(case, seen)
        print(f"{time.perf_counter() - began:5.1f} s {rows[case.key]}", flush=True)
        if state is not None:
            state.write_text(json.dumps({"seen": {key: asdict(one) for key, one in seen.items()}, "rows": rows}))
    return rows, seen


def table(rows: Mapping[str, str], seen: Mapping[str, Seen]) -> Iterator[str]:
    yield f"{MARK}\n"
    yield f"Made by `python -m tests.bench.kernels_run`, {time.strftime('%Y-%m-%d')}: torch {torch.__version__}. Each"
    yield "kernel of the forward and the backward graph of a rank, against its ATen ops in float32. `different`: texts;"
    yield "`new`: of them, those that no row above has, and that were run for this row. `largest`: the largest error of"
    yield "a result over what is allowed: 1e-5 of the largest value in float32, on top of that one unit in the last"
    yield "place in half precision. `bytes`: of the kernel that moves most over the least possible. Compiled for sm_80,"
    yield "sm_90, sm_100 and gfx942: the most registers of a thread on the first three, bytes spilled by all of them.\n"
    spilled = [one.spilled for one in seen.values() if one.spilled]
    yield f"{len(seen)} different kernels of {len(rows)} of {sum(1 for _ in cases())} cases;"
    yield f"{len(spilled)} of them spill, {sum(spilled)} bytes in all.\n"
    yield "| model | dtype | forward | backward | different | new | largest | bytes | registers | spilled | right |"
    yield "|---" * 11 + "|"
    yield from (rows[case.key] for case in cases() if case.key in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all when none is given")
    parser.add_argument("--out", type=Path, help=f"a file whose part from `{MARK}` on is replaced")
    parser.add_argument("--state", type=Path, help="a file that holds what an earlier run found, and what this finds")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    given = parser.parse_args()
    rows, seen = run(given.names, given.dtypes.split(","), given.state)
    if given.out:
        before = given.out.read_text().partition(MARK)[0] if given.out.exists() else ""
        given.out.write_text(before + "\n".join(table(rows, seen)) + "\n")


if __name__ == "__main__":
    main()
