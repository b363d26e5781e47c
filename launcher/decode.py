"""Typed values from JSON: dataclasses are filled by their annotations, and an error names the place.

Files of a run directory can be cut short, of another version, or planted by another user.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Any, TypeVar

from launcher.cpulist import parse_cpulist

KEY = "json_key"
"""Entry of a field's metadata: its key in JSON, if that is no name in Python, as `from`."""
T = TypeVar("T")


class DecodeError(ValueError):
    """JSON that is not what it should be: the text says where and why."""


def parse_json(text: str | bytes) -> object:
    """Read JSON of any kind; raises DecodeError, for NaN and infinite numbers too."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found: object = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(str(error)) from None
    return found


def refuse_constant(name: str) -> None:
    """Raise ValueError: RFC 8259 has no NaN and no Infinity."""
    raise ValueError(f"{name} is no number of JSON")


def decode(kind: type[T], text: str | bytes) -> T:
    """Read JSON as `convert` does; raises DecodeError."""
    return convert(kind, parse_json(text))


def convert(kind: type[T], data: object, least: float = -inf) -> T:
    """Make a value of a type from what JSON has for it; raises DecodeError.

    Types are dataclasses, `str`, `int`, `float`, `bool`, `Any`, `X | None`, `list[X]`, `tuple[X, ...]`,
    `dict[str, X]`, `Mapping[str, X]`, and `frozenset[int]`, which JSON has as a cpulist. A tuple of pairs is
    a list of lists in JSON, or an object. Keys that a dataclass does not have are ignored. No number may be
    less than `least`.
    """
    found: T = convert_value(kind, data, least, "")
    return found


def convert_value(kind: Any, data: Any, least: float, path: str) -> Any:  # noqa: ANN401 - see convert
    """Make a value; `path` is its place, for errors."""
    if isinstance(kind, UnionType):
        if data is None:
            return None
        (kind,) = (one for one in kind.__args__ if one is not NoneType)
    if kind is Any or kind is object:
        return data
    if is_dataclass(kind):
        return convert_object(kind, data, least, path)
    if arguments := getattr(kind, "__args__", ()):
        return convert_items(kind.__origin__, arguments, data, least, path)
    return convert_scalar(kind, data, least, path)


def convert_object(kind: Any, data: object, least: float, path: str) -> Any:  # noqa: ANN401 - see convert
    """Make a dataclass; a field without a default has to be there."""
    found, values = check_type(dict, data, path), {}
    for item in fields(kind):
        key = item.metadata.get(KEY, item.name)
        place = f"{path}.{key}" if path else key
        if key in found:
            values[item.name] = convert_value(item.type, found[key], least, place)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise DecodeError(f"{place} is missing")
    return kind(**values)


def convert_items(origin: Any, arguments: tuple[Any, ...], data: Any, least: float, path: str) -> Any:  # noqa: ANN401
    """Make a sequence, a mapping, or a set of CPUs."""
    if origin is frozenset:
        return convert_cpulist(check_type(str, data, path), path)
    if origin in (dict, Mapping):
        items = check_type(dict, data, path).items()
        return {key: convert_value(arguments[1], item, least, f"{path}[{key!r}]") for key, item in items}
    if origin is tuple and isinstance(data, dict):
        data = list(map(list, data.items()))
    entries = check_type(list, data, path)
    kinds = arguments if origin is tuple and arguments[-1] is not ... else (arguments[0],) * len(entries)
    if len(kinds) != len(entries):
        raise DecodeError(f"{path} has {len(entries)} entries in place of {len(kinds)}")
    pairs = enumerate(zip(kinds, entries, strict=True))
    return origin(convert_value(kind, item, least, f"{path}[{number}]") for number, (kind, item) in pairs)


def convert_cpulist(text: str, path: str) -> frozenset[int]:
    """Read a cpulist."""
    try:
        return parse_cpulist(text)
    except ValueError as error:
        raise DecodeError(f"{path} is no cpulist: {error}") from None


def convert_scalar(kind: type, data: object, least: float, path: str) -> object:
    """Check a text, a number or a truth value; whole numbers are fine for `float`."""
    if kind not in (int, float):
        return check_type(kind, data, path)
    number = data if type(data) is int else check_type(kind, data, path)
    try:
        value = kind(number)
        is_finite = isfinite(value)
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise DecodeError(f"{path} is too large")
    if value < least:
        raise DecodeError(f"{path} is {value}, less than {least:g}")
    return value


def check_type(kind: type[T], data: object, path: str) -> T:
    """Return data of a type as it is; JSON's true and false are no numbers."""
    if type(data) is not kind:
        raise DecodeError(f"{path or 'the whole'} is of type {type(data).__name__}, not {kind.__name__}")
    return data
