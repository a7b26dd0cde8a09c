"""The user's tree of modules, without what they compute: names, modes and plain attributes.

Loops look for modules (`m.backbone.eval()`, `isinstance(module, nn.BatchNorm2d)`, `drop.p = 0.2`); what they change is
part of the key under which a program is looked up, so the model is captured again, changed alike.

Enters: the model. Leaves: a `Part` for each of its modules, and what was changed on them. Refused: calling a part,
hooks on one, and other attributes than numbers, words and truth values: the captured program would not know of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError

Changes = tuple[tuple[str, bool, tuple[tuple[str, Any], ...]], ...]
"""(path, mode, attributes) of the modules whose mode is not the root's, or that have new attributes."""

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Part(nn.Module):
    """Stands for one module; `isinstance` takes it for one of the user's class, but none of that class's code runs."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        own = {k: v for k, v in vars(of).items() if not k.startswith("_") and k != "training"}
        plain = {k: v for k, v in own.items() if isinstance(v, _PLAIN)}
        self.__dict__.update(plain, _of=type(of), _first=plain, _own=frozenset(own), _changed={}, training=of.training)
        if type(of).get_extra_state is not nn.Module.get_extra_state:
            self._extra = of.get_extra_state()

    @property
    def __class__(self) -> Any:
        return self.__dict__.get("_of", Part)  # absent while it is copied

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{self._get_name()} has no {name!r} in a parallel module, which keeps names, modes, tensors and plain "
                "attributes of the model's modules"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__.get("_own", ()):
            return super().__setattr__(name, value)
        if name not in self._first or not isinstance(value, _PLAIN):
            raise PlanError(f"{self._get_name()}.{name}: {_CAPTURED}")
        self.__dict__[name] = value
        self._changed.pop(name, None)
        if value != self._first[name]:
            self._changed[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"{self._get_name()} is a part of a parallel module and cannot be called alone; call the whole")

    def get_extra_state(self) -> Any:
        return self._extra

    def set_extra_state(self, state: Any) -> None:
        """Kept for the next state dict; the captured program does not know of it."""
        self._extra = state

    def _apply(self, fn: Any, recurse: bool = True) -> Part:
        refuse_conversion(self, fn)
        return self

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"{self._get_name()}: a hook on it would not run; {_CAPTURED}")

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook


_CAPTURED = "the model was captured by autopar.parallelize; change it before"


def plant(root: nn.Module, model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Put the model's tree under `root`, a shared module once; the names of parameters and buffers stand in the model's
    order and hold nothing yet. Returns: (path, part), the root's first.
    """
    parts: dict[int, tuple[str, nn.Module]] = {}

    def grow(path: str, module: nn.Module, part: nn.Module) -> nn.Module:
        parts[id(module)] = (path, part)
        part.training = module.training
        part._parameters.update(dict.fromkeys(module._parameters))
        part._buffers.update(dict.fromkeys(module._buffers))
        for name, child in module._modules.items():
            if child is None or id(child) in parts:
                part._modules[name] = parts[id(child)][1] if child is not None else None
            else:
                of = next((kind for kind in _CONTAINERS if isinstance(child, kind)), None)
                part._modules[name] = grow(f"{path}{name}.", child, Part(child) if of is None else of())
        return part

    grow("", model, root)
    return tuple((path.removesuffix("."), part) for path, part in parts.values())


def names_of(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Of its parameters and buffers, aliases too, in the order of a state dict."""
    for name in (*model._parameters, *model._buffers):
        yield prefix + name
    for name, child in model._modules.items():
        if child is not None:
            yield from names_of(child, f"{prefix}{name}.")


def prune(parts: Sequence[tuple[str, nn.Module]]) -> None:
    """Forget the names that still hold nothing: of other stages, or None in the model."""
    for _, part in parts:
        for names in (part._parameters, part._buffers):
            for name in [name for name, value in names.items() if value is None]:
                del names[name]


def changes(parts: Sequence[tuple[str, nn.Module]]) -> Changes:
    """What differs from a model whose modules are all in the root's mode."""
    mode = parts[0][1].training if parts else True
    found = []
    for path, part in parts:
        changed = part.__dict__.get("_changed")
        if changed or part.training != mode:
            found.append((path, part.training, tuple(sorted((changed or {}).items()))))
    return tuple(found)


@contextlib.contextmanager
def changed(model: nn.Module, training: bool, what: Changes, unfrozen: Sequence[str] = ()) -> Iterator[None]:
    """The model in this mode, with these changes and these parameters trainable; attributes and parameters are put
    back afterwards."""
    before: list[tuple[Any, str, Any]] = []

    def put(at: Any, name: str, value: Any) -> None:
        before.append((at, name, getattr(at, name)))
        setattr(at, name, value)

    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for module in modules.values():
        module.training = training
    try:
        for path, mode, attributes in what:
            modules[path].training = mode
            for name, value in attributes:
                put(modules[path], name, value)
        for path in unfrozen:
            put(parameters[path], "requires_grad", True)
        yield
    finally:
        for at, name, value in reversed(before):
            setattr(at, name, value)


def modes_after(model: nn.Module, training: bool) -> Mapping[str, bool] | None:
    """By path, what the model's own `train` makes of a mode; None where no class has one of its own."""
    if all(type(module).train is nn.Module.train for module in model.modules()):
        return None
    model.train(training)
    return {path: module.training for path, module in model.named_modules()}


def refuse_conversion(module: nn.Module, fn: Any) -> None:
    """What `to`, `cpu`, `double` and the like call: parameters stay what and where the plan says."""
    for name, held in (*module.named_parameters(), *module.named_buffers()):
        value = fn(held.detach())
        if (value.dtype, value.device.type) != (held.dtype, held.device.type):
            raise PlanError(
                f"{name}: {held.dtype} on {held.device.type} cannot become {value.dtype} on {value.device.type} in "
                "a parallel module: convert the model before autopar.parallelize, or pass precision="
            )


def drops(model: nn.Module) -> bool:
    """Has it modules that draw random numbers in training only?"""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())


def as_normal(values: Any) -> Any:
    """A nest without inference tensors, which nothing can be captured from."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_inference() else t, values)
