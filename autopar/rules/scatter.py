"""Writes by index: scatter, index_add, index_put and relatives. Where writes add up, cutting the list of writes
leaves a partial result and the tensor written to is an addend; where they overwrite, the list is whole."""

from __future__ import annotations

from collections.abc import Callable

from autopar.rules.call import Call
from autopar.rules.dims import letters, wrap
from autopar.rules.indexing import along, indexed
from autopar.rules.rule import Dim, Dims, Rule


def scatter(call: Call) -> Rule | None:
    """scatter, scatter_add, scatter_reduce: `dim` is whole in the tensor; the other dims pass where all sizes agree."""
    shape, where = call.in_shapes[0], call.in_shapes[1]
    if len(shape) != len(where) or call.shape("value") is not None:
        return None
    source = call.shape("src")
    at = wrap(call.arg("dim"), len(shape))
    if source is not None and len(source) != len(shape):
        return None
    dims, writes, sizes = along(shape, where, at)
    if source is not None:  # a source may be larger than the index, which then means its first elements
        larger = {d for d, n in enumerate(source) if n != where[d]}
        dims = tuple(() if d in larger else dim for d, dim in enumerate(dims))
        writes = tuple(() if d in larger else dim for d, dim in enumerate(writes))
        sizes = {k: n for k, n in sizes.items() if any((k,) == dim for dim in (*dims, *writes))}
    adds = _adds(call)
    tensors = (dims, writes, *([writes] if source is not None else []))
    return Rule(
        tensors,
        (dims,),
        sizes,
        whole=frozenset() if adds else frozenset("i"),
        addends=frozenset({0}),
        linear=(frozenset({0, 2}),) if adds and source is not None else (),
        saves=(1,) if adds or "reduce" not in call.target._schema.name else tuple(range(len(tensors))),
    )


def _adds(call: Call) -> bool:
    name = call.target._schema.name.split("::")[-1]
    return name == "scatter_add" or (
        name == "scatter_reduce" and call.arg("reduce") == "sum" and bool(call.arg("include_self", True))
    )


def index_add(call: Call) -> Rule | None:
    """`dim` is whole in the tensor; the added rows may be cut."""
    return _rows(call, adds=True)


def index_copy(call: Call) -> Rule | None:
    """`dim` and the copied rows are whole."""
    return _rows(call, adds=False)


def _rows(call: Call, *, adds: bool) -> Rule | None:
    shape, where = call.in_shapes[0], call.in_shapes[1]
    if not shape or len(where) != 1 or len(call.in_shapes[2]) != len(shape):
        return None
    at = wrap(call.arg("dim"), len(shape))
    dims, sizes = letters(shape, {at})
    rows: Dims = tuple(("i",) if d == at else dim for d, dim in enumerate(dims))
    sizes["i"] = where[0]
    return Rule(
        (tuple(dims), (("i",),), rows),
        (tuple(dims),),
        sizes,
        whole=frozenset() if adds else frozenset("i"),
        addends=frozenset({0}),
        linear=(frozenset({0, 2}),) if adds else (),
        saves=(1,),
    )


def index_fill(call: Call) -> Rule:
    """`dim` and the index are whole; so is a value that is a scalar tensor."""
    dims, sizes = letters(call.in_shapes[0], {wrap(call.arg("dim"), len(call.in_shapes[0]))})
    rest: list[Dims] = [((),) * len(s) for s in call.in_shapes[1:]]
    return Rule((tuple(dims), *rest), (tuple(dims),), sizes, saves=(1,))


def index_put(call: Call) -> Rule | None:
    """`x[i, j] = v`: dims of x that are not indexed pass; when values accumulate the written places may be cut."""
    found = indexed(call)
    if found is None:
        return None
    dims, each, result, sizes = found
    adds = bool(call.arg("accumulate", False))
    shape = call.in_shapes[-1]
    lead = len(result) - len(shape)
    if lead < 0:
        return None
    values: list[Dim] = []
    for dim, n in zip(result[lead:], shape, strict=True):
        values.append(dim if dim and n == sizes[dim[0]] and n != 1 else ())
    return Rule(
        (dims, *each, tuple(values)),
        (dims,),
        sizes,
        whole=frozenset() if adds else frozenset(k for k in sizes if k.startswith("i")),
        addends=frozenset({0}),
        linear=(frozenset({0, len(each) + 1}),) if adds else (),
        saves=tuple(range(1, 1 + len(each))),
    )


RULES: dict[str, Callable[[Call], Rule | None]] = {
    **dict.fromkeys("scatter scatter_add scatter_reduce".split(), scatter),
    "index_add": index_add,
    "index_copy": index_copy,
    "index_fill": index_fill,
    **dict.fromkeys("index_put _unsafe_index_put".split(), index_put),
}
