"""Checks of plain data (what JSON can hold) that name the field they refuse.

Enters: a value and the path it stands at, e.g. `params["a.weight"].layout[0][1]`.
Leaves: the value in its one stored form: tuples for lists, fresh dicts, Python numbers. Equal data compare equal.
Refused: a wrong type, a missing or unknown field, NaN and infinities, text that cannot be printed; `PlanError`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from autopar.errors import PlanError

Check = Callable[[Any, str], Any]
"""(value, path) -> the value in its stored form. Raises PlanError."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters; halves of surrogate pairs


def refuse(path: str, problem: str) -> NoReturn:
    """Raise the one-line error."""
    raise PlanError(f"{path}: {problem}" if path else problem)


def shown(value: Any) -> str:
    """A value as JSON spells it, short enough for one line."""
    try:
        found = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        found = type(value).__name__
    return found if len(found) <= 60 else found[:57] + "..."


def key_path(path: str, key: str) -> str:
    """Path of a named entry of a mapping: `params["a.weight"]`."""
    return f"{path}[{json.dumps(key, ensure_ascii=False)}]"


def text(value: Any, path: str) -> str:
    """A string without control characters."""
    if not isinstance(value, str):
        refuse(path, f"{shown(value)} is not a text")
    if _UNPRINTABLE.search(value):
        refuse(path, f"{shown(value)} holds characters that cannot be printed")
    return value


def flag(value: Any, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        refuse(path, f"{shown(value)} is neither true nor false")
    return value


def integer(least: int = 0, most: int | None = None) -> Check:
    """An integer in [least, most]; numpy's are taken, booleans are not."""
    wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"

    def check(value: Any, path: str) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            refuse(path, f"{shown(value)} is not {wanted}")
        plain = int(value)
        if plain < least or (most is not None and plain > most):
            refuse(path, f"{shown(plain)} is not {wanted}")
        return plain

    return check


def number(least: float = 0.0) -> Check:
    """A finite number of at least `least` (-inf: of any sign)."""
    wanted = "a finite number" + (f" of at least {least:g}" if least > -math.inf else "")

    def check(value: Any, path: str) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):
            refuse(path, f"{shown(value)} is not {wanted}")
        try:
            plain = int(value) if isinstance(value, Integral) else float(value)
            fits = math.isfinite(plain) and plain >= least
        except OverflowError:  # an integer beyond the range of float
            fits = False
        if not fits:
            refuse(path, f"{shown(value)} is not {wanted}")
        return plain

    return check


def figures(value: Any, path: str) -> Any:
    """Numbers of at least 0, in lists and mappings of any depth."""
    if isinstance(value, Mapping):
        return mapping(figures)(value, path)
    if isinstance(value, (list, tuple)):
        return listing(figures)(value, path)
    return number()(value, path)


def anything(value: Any, path: str) -> Any:
    """Any JSON value without NaN."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, path)
    if isinstance(value, Mapping):
        return mapping(anything)(value, path)
    if isinstance(value, (list, tuple)):
        return listing(anything)(value, path)
    return number(-math.inf)(value, path)


def one_of(names: Iterable[str]) -> Check:
    """One of these words."""
    known = tuple(names)

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in known:
            near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
            hint = f"; did you mean {json.dumps(near[0])}?" if near else f"; known are {', '.join(known)}"
            refuse(path, f"{shown(value)} is unknown{hint}")
        return value

    return check


def matching(pattern: str, what: str) -> Check:
    """A string of this form; `what` completes "... is not"."""
    compiled = re.compile(pattern)

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            refuse(path, f"{shown(value)} is not {what}")
        return value

    return check


def nullable(check: Check) -> Check:
    """None, or what `check` takes."""
    return lambda value, path: None if value is None else check(value, path)


def listing(check: Check) -> Check:
    """A list of equal entries; leaves a tuple."""

    def check_list(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            refuse(path, f"{shown(value)} is not a list")
        return tuple(check(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    return check_list


def pair(first: Check, second: Check) -> Check:
    """A list of two entries; leaves a tuple."""

    def check(value: Any, path: str) -> tuple[Any, Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            refuse(path, f"{shown(value)} is not a pair")
        return first(value[0], f"{path}[0]"), second(value[1], f"{path}[1]")

    return check


def mapping(check: Check, keys: Check = text) -> Check:
    """An object with free keys and equal values."""

    def check_mapping(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse(path, f"{shown(value)} is not an object")
        return {keys(key, f"{path} key"): check(entry, key_path(path, key)) for key, entry in value.items()}

    return check_mapping


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object with these fields and no others; leaves a dict in the order of this table."""
    fields = {**required, **(optional or {})}

    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse(path, f"{shown(value)} is not an object")
        check_names(value, required, fields, path)
        dot = f"{path}." if path else ""
        return {name: fields[name](value[name], f"{dot}{name}") for name in fields if name in value}

    return check


def check_names(value: Mapping[Any, Any], required: Iterable[str], known: Iterable[str], path: str) -> None:
    """Refuse a missing or an unknown field of an object."""
    known = list(known)
    for name in required:
        if name not in value:
            refuse(path, f'field "{name}" is missing')
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
            refuse(path, f"unknown field {shown(name)}" + (f'; did you mean "{near[0]}"?' if near else ""))


def read_json(data: str | bytes) -> Any:
    """Parse JSON; numbers that JSON does not have and repeated names are refused.

    Raises:  PlanError: it is no JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            refuse("", f"field {shown(next(n for n in names if names.count(n) > 1))} stands twice in one object")
        return found

    def constant(name: str) -> NoReturn:
        refuse("", f"{name} is not a number")

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        refuse("", f"line {error.lineno} column {error.colno} is no JSON: {error.msg}")
    except UnicodeDecodeError as error:
        refuse("", f"byte {error.start} is no text in UTF-8")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        refuse("", f"cannot be read as JSON: {error}")
