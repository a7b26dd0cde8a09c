"""What kind of tensor each output of the parallel module is: decided once, from the captured program.

"auto": a model that returns a loss (a field named `loss`, else its only differentiable scalar) gives its scalars as
plain
tensors and leaves its other tensors where they lie, as DTensors; a model without a loss gives plain global tensors.
"gather": all plain and global. "shard": all DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.program import OutputRef, Program

KINDS = ("auto", "gather", "shard")


def output_kinds(program: Program, grads: Mapping[str, bool], outputs: str) -> dict[int, str]:
    """For each sink "plain" (global, the same on every rank) or "shard" (a DTensor, left where it lies).

    Args:    grads: which values take a gradient, by name. outputs: "auto", "gather" or "shard".
    Raises:  PlanError: another word.
    """
    if outputs not in KINDS:
        raise PlanError(f"outputs={outputs!r}: must be one of {', '.join(KINDS)}")
    results = pytree.tree_leaves(program.output.args[0])
    user = [i for i, sink in enumerate(program.sinks) if sink.kind == "user"]
    plain = dict.fromkeys(range(len(program.sinks)), "plain")
    if outputs == "gather":
        return plain
    scalars = [i for i in user if isinstance(results[i], Node) and not results[i].meta["val"].shape]
    if outputs == "shard":
        return plain | dict.fromkeys(user, "shard")
    if loss_of(program, grads) is None:
        return plain
    return plain | {i: "shard" for i in user if i not in scalars}


def loss_of(program: Program, grads: Mapping[str, bool]) -> int | None:
    """The sink that is the model's loss: a differentiable scalar in a field named `loss`, else the only one."""
    from autopar.rules.analyse import value_of

    results = pytree.tree_leaves(program.output.args[0])
    differentiable = [
        i
        for i, sink in enumerate(program.sinks)
        if sink.kind == "user"
        and isinstance(results[i], Node)
        and not results[i].meta["val"].shape
        and grads.get(value_of(results[i]), False)
    ]
    named = [i for i in differentiable if i in _loss_fields(program)]
    return named[0] if named else differentiable[0] if len(differentiable) == 1 else None


def _loss_fields(program: Program) -> set[int]:
    """Sinks that stand in a field named `loss`."""
    tree = pytree.tree_unflatten(list(program.out_values), program.out_spec)
    found = set()
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = getattr(path[-1], "key", getattr(path[-1], "name", None)) if path else None
        if name == "loss" and isinstance(leaf, OutputRef):
            found.add(leaf.index)
    return found
