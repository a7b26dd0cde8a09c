"""MODEL of the command line: from a name to a module and one example batch.

Enters: a name of the zoo, `package.module:factory` or `hf:PATH`; a global batch and a sequence length.
Leaves: a module and the inputs it takes. Refused, as `ModelNameError`: a name that leads to no model, sizes the model
has no room for. What the user's own factory raises is left as it is.

`hf:` reads a `config.json` and nothing else: no weights, no network, no code from the folder.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

MAX_SEQ = {"meta": 2048, "cpu": 64}
"""Tokens a sequence when none are asked for: of a plan, and of a run on this machine's processors."""


class ModelNameError(ValueError):
    """MODEL, or a size given with it, is no good; the message says what would be."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A module and one global batch for it."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_model(name: str, *, batch: int | None, seq: int | None, device: str = "meta") -> LoadedModel:
    """Find or build a model.

    Args:    batch, seq: sequences and tokens of the example; None leaves them to the model (the zoo: 8, and at most
             `MAX_SEQ` tokens). device: where parameters of the zoo and of `hf:` are made; on meta they cost nothing.
    Raises:  ModelNameError.
    """
    if name.startswith("hf:"):
        return _from_config(name.removeprefix("hf:"), batch, seq, device)
    if ":" in name:
        return _from_factory(name, batch, seq)
    return _from_zoo(name, batch, seq, device)


def _from_zoo(name: str, batch: int | None, seq: int | None, device: str) -> LoadedModel:
    from autopar import models
    from autopar.capture import example_of

    try:
        if seq is None and name in models.SIZES:
            seq = min(getattr(models.SIZES[name].config, "context", 1), MAX_SEQ[device])
        module = models.build(name, batch=8 if batch is None else batch, seq=1 if seq is None else seq, device=device)
    except ValueError as error:
        raise ModelNameError(str(error)) from None
    args, kwargs = example_of(module)
    return LoadedModel(name, module, args, kwargs)


def _from_factory(name: str, batch: int | None, seq: int | None) -> LoadedModel:
    from autopar.capture import example_of

    path, _, attribute = name.partition(":")
    # As `python -m` does; an installed command has its own folder there instead.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(path)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise ModelNameError(f"model {name!r}: there is no module {error.name!r}") from None
    except (AttributeError, ValueError, TypeError):
        raise ModelNameError(f"model {name!r}: module {path!r} has no {attribute!r}") from None
    if not callable(found):
        raise ModelNameError(
            f"model {name!r}: {attribute} is {type(found).__name__}, not a function that makes a model"
        )
    made = found(**_sizes(found, name, batch=batch, seq=seq))
    if isinstance(made, nn.Module):
        args, kwargs = example_of(made)
        return LoadedModel(name, made, args, kwargs)
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise ModelNameError(
            f"model {name!r}: {attribute}() returned {type(made).__name__}, neither a module with example_inputs() "
            "nor (module, args, kwargs)"
        )
    return LoadedModel(name, made[0], tuple(made[1]), dict(made[2]))


def _sizes(factory: Callable[..., Any], name: str, **sizes: int | None) -> dict[str, int]:
    """The sizes that were asked for, when the factory takes them."""
    asked = {key: value for key, value in sizes.items() if value is not None}
    taken = inspect.signature(factory).parameters
    for key in asked:
        if key not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            raise ModelNameError(f"model {name!r}: the factory takes no {key!r}, so --{key} cannot be kept")
    return asked


def _from_config(path: str, batch: int | None, seq: int | None, device: str) -> LoadedModel:
    from autopar.capture import example_of

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ModelNameError(f"model 'hf:{path}': there is no file {os.fspath(file)!r}")
    try:
        import transformers
    except ImportError:
        raise ModelNameError(f"model 'hf:{path}' needs transformers: pip install 'autopar[hf]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ModelNameError(f"model 'hf:{path}': {file} is no config transformers can read: {reason:.200}") from None
    with torch.device(device):
        module = _config_class(transformers, config)(config)
    args, kwargs = example_of(module)
    sized = {key: _resized(value, batch, seq) for key, value in kwargs.items()}
    return LoadedModel(config.model_type, module, args, sized)


def _config_class(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """The class the config was saved from, else the one for next-token prediction, else the bare model."""
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, architecture, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return cast(Callable[[Any], nn.Module], found)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return cast(Callable[[Any], nn.Module], auto.from_config)
    raise ModelNameError(f"transformers has no model for {type(config).__name__}")


def _resized(value: Any, batch: int | None, seq: int | None) -> Any:
    """An example tensor with `batch` rows and, where it holds tokens, `seq` of them; values are repeated."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    for dim, size in enumerate((batch, seq if value.ndim == 2 and not value.is_floating_point() else None)):
        if size is not None:
            value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
    return value
