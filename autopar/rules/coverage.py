"""Which of torch's operators have a rule, by family, and why the others stay whole: `python -m autopar.rules [--json]`.

Enters: torch's own list of aten operators and the rule table. Leaves: a `Coverage`, printed as a table or as JSON.
Counted are operators (all overloads together) that a captured graph can hold: functional, from tensors to tensors.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from rich.console import Group, RenderableType
from rich.table import Table

import autopar.rules
from autopar.console import stdout_console
from autopar.rules.pointwise import EXTRA, NOT_POINTWISE

aten = torch.ops.aten

NOT_CAPTURED: dict[str, str] = {
    "gradients and forward derivatives": "*_backward *_backward_* *_jvp *_grad *_fw_primal *_make_dual _unpack_dual",
    "lists of optimizer states": "_foreach_* _fused_*",
    "copies that torch's own functionalisation makes": "*_copy slice_inverse",
    "sparse, nested and quantised tensors": "*sparse* *nested* *quant* *jagged* *_csr* *_coo* q_* int_repr"
    " coalesce _coalesce* *_indices"
    " indices values _values to_dense to_mkldnn to_padded_tensor _cslt* fbgemm* sspaddmm hspmm smm _spsolve fake_*"
    " choose_qparams*",
    "kernels of one library or device": "cudnn* _cudnn* miopen* mkldnn* _mkldnn* *_mps* _thnn* thnn* *_nnpack*"
    " _weight_int* _convert_weight*"
    " _triton* *_cpu_fallback *_for_cpu _wrapped* conv_depthwise* slow_* *_overrideable",
    "parts of other operators, never called by a model": "_* *_forward *_forward_only native_*norm batch_norm_*"
    " rrelu_with_noise* geqrf"
    " linalg__powsum flatten_dense_tensors unflatten_dense_tensors",
    "writes that become other operators": "resize* set zero lift data embedding_renorm",
}
"""Why an operator cannot stand in a captured graph -> patterns of names. An operator with a rule is always counted."""

WHOLE: dict[str, str] = {
    "draws random numbers: shards would draw others than the whole": "bernoulli multinomial normal* rand* poisson"
    " binomial rrelu"
    " *dropout exponential uniform geometric cauchy log_normal",
    "the shape of its result depends on data": "nonzero* argwhere masked_select unique* bincount hist*"
    " combinations segment_reduce",
    "reads memory by strides, not by dims": "as_strided*",
    "counts all elements through, across dims": "take put masked_scatter trace diag diagflat *vander block_diag"
    " cartesian_prod kron",
    "compares or mixes all elements": "dist cov corrcoef pdist renorm nuclear_norm norm_except_dim hash_tensor"
    " pinverse gradient",
    "a recurrence or alignment along a dim": "ctc_loss cumulative_trapezoid trapezoid trapz",
    "signals whose windows overlap": "istft stft",
    "rows chosen by bags of ids": "embedding_bag",
    "a factory, which reads a tensor only for its type": "new_* linspace logspace",
}
"""Why an operator stays whole -> patterns of names."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Operators by what is known of them; names sorted."""

    families: dict[str, tuple[str, ...]]
    """Family -> operators with a rule."""
    whole: dict[str, tuple[str, ...]]
    """Reason -> operators kept whole for it."""
    unruled: tuple[str, ...]
    """Operators kept whole only because nobody has written their rule."""
    left_out: dict[str, int]
    """Why not counted -> how many."""

    @property
    def ruled(self) -> int:
        return sum(map(len, self.families.values()))

    @property
    def total(self) -> int:
        return self.ruled + sum(map(len, self.whole.values())) + len(self.unruled)


def operators() -> Iterator[tuple[str, frozenset[torch.Tag]]]:
    """(name, tags) of torch's functional aten operators from tensors to tensors, one for all overloads, by name."""
    names = {
        full.removeprefix("aten::").partition(".")[0]
        for full in torch._C._dispatch_get_all_op_names()
        if full.startswith("aten::")
    }
    for name in sorted(names):
        packet = getattr(aten, name, None)
        overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
        fitting = [o for o in overloads if _functional(o)]
        if fitting:
            yield name, frozenset(tag for o in fitting for tag in o.tags)


def _functional(overload: torch._ops.OpOverload) -> bool:
    schema = overload._schema
    return (
        not schema.is_mutable
        and any("Tensor" in str(a.type) for a in schema.arguments)
        and any("Tensor" in str(r.type) for r in schema.returns)
    )


def families() -> dict[str, frozenset[str]]:
    """Family (a module of autopar.rules with RULES) -> names in its table; without those of our own ops."""
    modules = [
        importlib.import_module(f"autopar.rules.{m.name}")
        for m in pkgutil.iter_modules(autopar.rules.__path__)
        if m.name != "__main__"
    ]
    tables = {m.__name__.rpartition(".")[2]: m.RULES for m in modules if hasattr(m, "RULES")}
    torchs = {family: frozenset(n for n in names if "::" not in n) for family, names in tables.items()}
    return {family: names for family, names in torchs.items() if names}


def cover() -> Coverage:
    """Sort torch's operators by what the rules say of them."""
    found: dict[str, list[str]] = {}
    whole: dict[str, list[str]] = {}
    left_out: dict[str, int] = {}
    unruled: list[str] = []
    tables = families()
    for name, tags in operators():
        family = next((f for f, names in tables.items() if name in names), None)
        pointwise = (
            torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and name not in NOT_POINTWISE
        )
        reason, why_not = _match(name, WHOLE), _match(name, NOT_CAPTURED)
        if family is not None:
            found.setdefault(family, []).append(name)
        elif name in EXTRA or (pointwise and not why_not):
            found.setdefault("pointwise", []).append(name)
        elif why_not:
            left_out[why_not] = left_out.get(why_not, 0) + 1
        elif reason:
            whole.setdefault(reason, []).append(name)
        else:
            unruled.append(name)
    return Coverage(
        {f: tuple(names) for f, names in sorted(found.items())},
        {r: tuple(names) for r, names in whole.items()},
        tuple(unruled),
        left_out,
    )


def _match(name: str, table: dict[str, str]) -> str | None:
    return next(
        (reason for reason, patterns in table.items() if any(fnmatchcase(name, p) for p in patterns.split())), None
    )


def to_dict(coverage: Coverage) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "ruled": coverage.ruled,
        "total": coverage.total,
        "families": {f: list(names) for f, names in coverage.families.items()},
        "whole": {r: list(names) for r, names in coverage.whole.items()},
        "unruled": list(coverage.unruled),
        "left_out": coverage.left_out,
    }


def show(coverage: Coverage) -> RenderableType:
    """Two tables: what can be cut, by family; what stays whole, by reason."""
    cut = Table(
        title=f"{coverage.ruled} of {coverage.total} operators of torch {torch.__version__} have a rule",
        title_justify="left",
    )
    cut.add_column("family")
    cut.add_column("ops", justify="right")
    cut.add_column("operators")
    for family, names in coverage.families.items():
        cut.add_row(family, str(len(names)), " ".join(names))
    rest = Table(
        title=f"{coverage.total - coverage.ruled} are kept whole: correct, but every rank computes all of it",
        title_justify="left",
    )
    rest.add_column("reason")
    rest.add_column("ops", justify="right")
    rest.add_column("operators")
    for reason, names in [*coverage.whole.items(), ("no rule yet", coverage.unruled)]:
        rest.add_row(reason, str(len(names)), " ".join(names))
    left = ", ".join(f"{n} {reason}" for reason, n in coverage.left_out.items())
    return Group(cut, "", rest, "", f"Not counted, since no captured graph holds them: {left}.")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.rules", description="Which of torch's operators can be split, and why the others can't."
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args(arguments)
    coverage = cover()
    if options.json:
        print(json.dumps(to_dict(coverage), indent=1))
    else:
        stdout_console().print(show(coverage))
    return 0
