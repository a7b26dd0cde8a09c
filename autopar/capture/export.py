"""Capture: a module and example inputs become a `Program`.

Enters: an `nn.Module` (parameters may be on meta) and one global batch. Leaves: a `Program` in export's pre-dispatch
ATen ops, without in-place writes, regions and noise; every node has its record. The module is as it was.
Refused, as `CaptureError` with the user's line: what `torch.export` refuses, values that depend on data, control flow
operators.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from autopar.capture.batched import vmap_unrolled
from autopar.capture.blocks import find_blocks
from autopar.capture.explain import explain, module_of, quiet, refuse, where_of
from autopar.capture.functional import functionalise
from autopar.capture.functions import keep_functions
from autopar.capture.gradients import gradients_kept, write_out
from autopar.capture.graph import Copier, drop_noise, drop_unused, regions_flat, stop_gradients
from autopar.capture.inputs import register_dataclasses, restored, separate
from autopar.capture.lines import user_lines
from autopar.capture.refused import calls_refused, refuse_hooks
from autopar.capture.rewritten import values_unread
from autopar.capture.sources import make_sources
from autopar.errors import CaptureError
from autopar.program import OutputRef, Program, Record, Sink, Source, set_record
from autopar.user_function import function_class


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str = "model") -> Program:
    """Capture `model(*args, **kwargs)` in its present mode (train or eval) as a `Program`.

    Args:    args, kwargs: one global batch; export looks at shapes and dtypes only. name: of the program.
    Raises:  CaptureError: one line with module, file and line, reason and remedy.
    """
    refuse_hooks(model)
    register_dataclasses((args, kwargs))
    inputs = tuple(args), dict(kwargs)
    copied_args, copied_kwargs = separate(model, *inputs)
    try:
        with (
            unchanged(model), caches_off(model, kwargs), quiet(), keep_functions(), values_unchecked(), data_detached(),
            calls_refused(), gradients_kept(), regions_flat(), vmap_unrolled(), values_unread(), user_lines(),
            torch.enable_grad(),
        ):  # fmt: skip
            model.register_forward_pre_hook(lambda module, a, k: restored(a, k, inputs), with_kwargs=True, prepend=True)
            model.register_forward_hook(lambda module, given, result: register_dataclasses(result))
            exported = torch.export.export(model, copied_args, copied_kwargs, strict=False)
    except Exception as error:
        raise explain(error, model) from error
    graph = Graph()
    sources = make_sources(graph, model, exported, inputs)
    kinds = {node: source.kind for node, source in sources.by_node.items()}

    copier = Copier(graph, sources.mapping)
    graph.output(copier.run(exported.graph_module))
    drop_unused(graph)
    _refuse_data_dependence(graph)
    written = functionalise(graph, kinds, copier.no_grad)
    write_out(graph, copier.no_grad)
    sinks, out_values = _sinks(graph, exported, {sources.by_node[n].path: new for n, new in written.items()})
    carries = stop_gradients(graph, copier.no_grad, kinds)
    _detach_state(graph, sinks, carries)
    drop_noise(graph, carries)
    drop_unused(graph)

    origins = {n: f"{s.kind} {s.trainable}" for n, s in sources.by_node.items() if s.kind != "input"}
    blocks, classes, block_of = find_blocks(graph, origins, name)
    _set_records(graph, sources.by_node, block_of)
    leaves, in_spec = pytree.tree_flatten(inputs)
    return Program(
        graph=graph,
        sources=tuple(sources.by_node.values()),
        sinks=sinks,
        state=sources.state,
        ties=sources.ties,
        in_spec=in_spec,
        in_values=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        in_tensors=tuple(isinstance(leaf, Tensor) for leaf in leaves),
        out_spec=exported.call_spec.out_spec,
        out_values=out_values,
        classes=classes,
        blocks=blocks,
        training=model.training,
        name=name,
    )


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back whatever a traced forward assigns on the model or adds to its tables, and torch's random state.

    Tables are parameters, buffers and modules, hooks (transformers adds some in a first call), and the user's own.
    """
    saved = [(m, dict(m.__dict__), [(t, copy.copy(t)) for t in _tables(m)]) for m in model.modules()]
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        for module, attributes, tables in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, content in tables:
                table.clear()
                if isinstance(table, list):
                    table.extend(content)
                else:
                    table.update(content)


def _tables(module: nn.Module) -> list[Any]:
    """The containers that the module holds by itself."""
    return [value for value in vars(module).values() if type(value) in (dict, OrderedDict, set, list)]


@contextlib.contextmanager
def caches_off(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Set `use_cache` off in a transformers model's configs: cache objects cannot leave a captured graph."""
    configs: dict[int, Any] = {}
    if "use_cache" not in kwargs:
        for module in model.modules():
            config = getattr(module, "config", None)
            nested = list(vars(config).values()) if hasattr(config, "__dict__") else []
            configs |= {id(c): c for c in (config, *nested) if getattr(c, "use_cache", None)}
    before = [(config, config.use_cache) for config in configs.values()]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


@contextlib.contextmanager
def values_unchecked() -> Iterator[None]:
    """Turn off the argument checks of torch's distributions: they read values, which a traced tensor does not have."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def data_detached() -> Iterator[None]:
    """`tensor.data`, which export cannot follow, is `tensor.detach()`; assigning it stays as it is."""
    inherited = torch._C.TensorBase.data

    def read(tensor: Tensor) -> Tensor:
        return tensor.detach()

    torch.Tensor.data = property(read, inherited.__set__)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.data


def _refuse_data_dependence(graph: Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (tuple, list)) else (value,):
            symbolic = isinstance(part, Tensor) and not all(isinstance(size, int) for size in part.shape)
            if symbolic or isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                what = (
                    "a shape that depends on data" if symbolic else "a tensor's value becomes a Python number (.item())"
                )
                raise refuse(node, what, "keep shapes fixed: use a mask or torch.where, and stay in tensors")


def _sinks(
    graph: Graph, exported: ExportedProgram, written: dict[str, Node]
) -> tuple[tuple[Sink, ...], tuple[Any, ...]]:
    """Make the output node a tuple: each tensor the user gets once, then new values of buffers and parameters."""
    output = next(iter(reversed(graph.nodes)))
    user: dict[Node, int] = {}
    values: list[Any] = []
    for result, spec in zip(output.args[0], exported.graph_signature.output_specs, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            written.setdefault(spec.target, result)
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"{spec.target or spec.arg}: forward has an effect of kind {spec.kind.name}; return the value"
            )
        elif isinstance(result, Node):
            values.append(OutputRef(user.setdefault(result, len(user))))
        else:
            values.append(result)
    output.args = ((*user, *written.values()),)
    return (*(Sink("user") for _ in user), *(Sink("state", path) for path in written)), tuple(values)


def _detach_state(graph: Graph, sinks: tuple[Sink, ...], carries: set[Node]) -> None:
    """What is kept for the next step carries no gradient into it."""
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    for i, (sink, node) in enumerate(zip(sinks, results, strict=True)):
        if sink.kind == "state" and node in carries:
            with graph.inserting_before(output):
                results[i] = graph.call_function(torch.ops.aten.detach.default, (node,))
            results[i].meta = {k: v for k, v in node.meta.items() if k != "custom"}
    output.args = (tuple(results),)


def _set_records(graph: Graph, sources: dict[Node, Source], block_of: dict[Node, str]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.op == "placeholder":
            # State stands with its first reader; an input belongs to no block.
            reader = next(iter(node.users), None) if sources[node].kind != "input" else None
            set_record(node, Record(op=sources[node].path, block=block_of.get(reader, "") if reader else ""))
        elif node.op == "call_function":
            key = (module_of(node), op_name(node))
            counts[key] += 1
            name = f"{key[0]}/{key[1]}/{counts[key]}"
            set_record(node, Record(op=name, block=block_of[node], where=where_of(node.meta.get("stack_trace"))))


def op_name(node: Node) -> str:
    """`linear`, `getitem`; ops outside aten keep their namespace: `mylib::rotate`; a Function has its class's name."""
    target, cls = node.target, function_class(node)
    if cls is not None:
        return cls.__name__
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else target.__name__
