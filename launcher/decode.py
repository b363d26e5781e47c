"""Typed values from JSON and back: dataclasses are filled by their annotations, and an error names the place.

Files of a run directory can be cut short, of another version, or planted by another user.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar

from launcher.cpulist import format_cpulist, parse_cpulist

KEY = "json_key"
"""Entry of a field's metadata: its key in JSON, if that is no name in Python, as `from`."""
OBJECT = "json_object"
"""Entry of a field's metadata: a tuple of pairs that is an object in JSON."""
LARGE = 1e300
"""Numbers from here on are looked at more closely: they may be infinite, or no `float`."""
T = TypeVar("T")


class DecodeError(ValueError):
    """JSON that is not what it should be: the text says where and why."""


class FieldKind(NamedTuple):
    """A dataclass's field as `convert_object` looks at it."""

    name: str
    key: str
    """In JSON."""
    kind: Any
    plain: type | None
    """If it is one of text and numbers, or None beside it: that type."""
    is_optional: bool
    is_required: bool


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
    for item in list_fields(kind):
        if item.key in found:
            inner: Any = found[item.key]
            # Most values are as they should be: they need no place, which only an error shows.
            found_kind = type(inner)
            if found_kind is item.plain and (found_kind is str or (least <= inner and abs(inner) < LARGE)):
                values[item.name] = inner
            elif inner is None and item.is_optional:
                values[item.name] = None
            else:
                values[item.name] = convert_value(item.kind, inner, least, join_place(path, item.key))
        elif item.is_required:
            raise DecodeError(f"{join_place(path, item.key)} is missing")
    return kind(**values)


def join_place(path: str, key: str) -> str:
    """Return the place of a field."""
    return f"{path}.{key}" if path else key


@cache
def list_fields(kind: Any) -> tuple[FieldKind, ...]:  # noqa: ANN401 - see convert
    """Return what there is to know of a dataclass's fields."""
    return tuple(describe_field(item) for item in fields(kind))


def describe_field(item: Field[Any]) -> FieldKind:
    """Return what there is to know of one field."""
    is_required = item.default is MISSING and item.default_factory is MISSING
    kinds = item.type.__args__ if isinstance(item.type, UnionType) else (item.type,)
    named = [one for one in kinds if one is not NoneType]
    plain = named[0] if named[0] in (str, int, float) else None
    key = item.metadata.get(KEY, item.name)
    return FieldKind(item.name, key, item.type, plain, NoneType in kinds, is_required)


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


def dump(value: Any) -> Any:  # noqa: ANN401 - see convert
    """Return what JSON has for a value of the types of `convert`, which reads it back."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            item.metadata.get(KEY, item.name): (
                dict(getattr(value, item.name))
                if item.metadata.get(OBJECT)
                else dump(getattr(value, item.name))
            )
            for item in fields(value)
        }
    if isinstance(value, frozenset):
        return format_cpulist(value)
    if isinstance(value, tuple | list):
        return [dump(item) for item in value]
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    return value
