"""Example inputs: where they come from, and the form in which export may see them.

Enters: a model and what the user passed. Leaves: `(args, kwargs)` and, for export, copies that share nothing.
Refused: a model that says nothing about its inputs (`TypeError` that tells what to pass).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

EXAMPLE_BATCH, EXAMPLE_TOKENS = 8, 32
"""Sizes of the batch made for a transformers model: small, and divisible by the usual meshes."""

EXAMPLE_PIXELS = 224
"""Height and width of images where the config leaves them open."""

_KEPT = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, complex, bytes, range, slice, np.generic)
"""Values that export does not take as arguments; they hold no tensors, so a graph may be made for them."""

_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_CLASS_LABELS = ("ForSequenceClassification", "ForImageClassification")


def example_of(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The given example, else `model.example_inputs()`, else a small batch made from a transformers model's config.

    Args:    args, kwargs: one global batch as the user would pass it to `model`; both empty means not given.
    Returns: `(args, kwargs)`.
    Raises:  TypeError: there is no example; the message says what to pass.
    """
    if args or kwargs:
        return tuple(args), dict(kwargs or {})
    maker = getattr(model, "example_inputs", None)
    if callable(maker):
        made = maker()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
            raise TypeError(f"{type(model).__name__}.example_inputs() must return (args, kwargs), not {made!r:.80}")
        return tuple(made[0]), dict(made[1])
    found = _from_config(model)
    if found is None:
        raise TypeError(
            f"{type(model).__name__} does not say what its inputs look like: pass example_args=(...) or "
            "example_kwargs={...} (one global batch), or give the model a method example_inputs() -> (args, kwargs)"
        )
    return (), found


def _from_config(model: nn.Module) -> dict[str, Any] | None:
    """Inputs of a transformers model (recognised by its attributes, so that transformers is not imported)."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or main is None:
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    name = type(model).__name__
    if main == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocab = getattr(text, "vocab_size", None)
        if vocab is None:
            return None
        longest = getattr(text, "max_position_embeddings", None) or EXAMPLE_TOKENS
        seq = min(EXAMPLE_TOKENS, longest)
        # Counting up gives every row other tokens and meets no padding token when the vocabulary is large enough.
        ids = torch.arange(1, EXAMPLE_BATCH * seq + 1, device=device).view(EXAMPLE_BATCH, seq) % vocab
        made: dict[str, Any] = {"input_ids": ids}
    elif main == "pixel_values" and isinstance(getattr(config, "num_channels", None), int):
        size = getattr(config, "image_size", None)
        size = size if isinstance(size, int) else EXAMPLE_PIXELS
        made = {"pixel_values": torch.zeros(EXAMPLE_BATCH, config.num_channels, size, size, device=device)}
    else:
        return None
    if main == "input_ids" and name.endswith(_TOKEN_LABELS):
        made["labels"] = made["input_ids"].clone()
    elif name.endswith(_CLASS_LABELS):
        made["labels"] = torch.zeros(EXAMPLE_BATCH, dtype=torch.int64, device=device)
    return made


def register_dataclasses(tree: Any) -> None:
    """Tell torch how to take apart the user's dataclasses in a tree of arguments or results, those it does not know."""
    for leaf in pytree.tree_leaves(tree):
        cls = type(leaf)
        if dataclasses.is_dataclass(cls) and not isinstance(leaf, Tensor):
            torch.export.register_dataclass(cls)
            register_dataclasses(leaf)


def separate(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Copies of the example for export: one tensor object for each place, on meta when the model is.

    Export merges two places that hold the same tensor object (ids that are also the labels) into one input. Values
    of types that it does not take stand there as None; `restored` puts them back.
    """
    on_meta = any(p.is_meta for p in model.parameters())

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None if isinstance(leaf, _KEPT) else leaf
        fresh = leaf.detach().to("meta") if on_meta and not leaf.is_meta else leaf.detach().clone()
        return fresh.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, (tuple(args), dict(kwargs)))


def restored(args: Any, kwargs: Any, example: Any) -> tuple[Any, Any]:
    """`args, kwargs` of a traced call, with the dtypes, Enums and so on that `example` has there.

    By path: export may sort keyword arguments.
    """
    odd = {
        path: leaf
        for path, leaf in zip(input_paths(example), pytree.tree_leaves(example), strict=True)
        if isinstance(leaf, _KEPT)
    }
    if not odd:
        return args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    paths = input_paths((args, kwargs))
    full = [odd.get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return pytree.tree_unflatten(full, spec)


def input_paths(tree: Any) -> list[str]:
    """`args[0]`, `kwargs['x']['table']` for each leaf of `(args, kwargs)`."""
    keyed, _ = pytree.tree_flatten_with_path(tree)
    return [("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:]) for path, _ in keyed]
