"""The one codec of files and messages: `load(Type, json)` and `dump(value)`.

Dataclasses are filled by their annotations, and an error names the place. Files of a run directory can be cut
short, of another version, or planted by another user.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar

from launcher.cpulist import format_cpulist, parse_cpulist

KEY = "json_key"
"""Entry of a field's metadata: its key in JSON, if that is no name in Python, as `from`."""
OBJECT = "json_object"
"""Entry of a field's metadata: a tuple of pairs that is an object in JSON."""
OPTIONAL = "json_optional"
"""Entry of a field's metadata: JSON has it if there is something in it."""
ONLY = "json_only"
"""Entry of a field's metadata: the fields of the dataclass in it that JSON has."""
LARGE = 1e300
"""Numbers from here on are looked at more closely: they may be infinite, or no `float`."""
T = TypeVar("T")


class DecodeError(ValueError):
    """JSON that is not what it should be: the text says where and why."""


def load(kind: type[T], text: str | bytes, least: float = -inf) -> T:
    """Read JSON as `convert` does; raises DecodeError."""
    return convert(kind, parse_json(text), least)


def dump(value: Any, indent: int | None = None) -> str:  # noqa: ANN401 - see convert
    """Write a value of the types of `convert` as JSON, which `load` reads back; with `indent` for people.

    Raises ValueError for a number that JSON does not have.
    """
    if indent is None:
        return json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False)
    return json.dumps(to_plain(value), indent=indent, allow_nan=False) + "\n"


def parse_json(text: str | bytes) -> object:
    """Read JSON of any kind; raises DecodeError, for NaN and infinite numbers too."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")  # RFC 8259

    try:
        text = text.decode() if isinstance(text, bytes) else text
        found: object = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(str(error)) from None
    return found


def convert(kind: type[T], data: object, least: float = -inf) -> T:
    """Make a value of a type from what JSON has for it; raises DecodeError.

    Types are dataclasses, `str`, `int`, `float`, `bool`, `Any`, `X | None`, `list[X]`, `tuple[X, ...]`,
    `dict[str, X]`, `Mapping[str, X]`, and `frozenset[int]`, which JSON has as a cpulist. A tuple of pairs is
    a list of lists in JSON, or an object. Keys that a dataclass does not have are ignored. No number may be
    less than `least`.
    """
    found: T = _convert(kind, data, least, "")
    return found


def to_plain(value: Any) -> Any:  # noqa: ANN401 - see convert
    """Return what JSON has for a value of the types of `convert`, which reads it back."""
    if is_dataclass(value) and not isinstance(value, type):
        values = [(item, getattr(value, item.name)) for item in _list_fields(type(value))]
        return {item.key: item.write(found) for item, found in values if found or not item.is_optional}
    if isinstance(value, frozenset):
        return format_cpulist(value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return value


class _Field(NamedTuple):
    """A dataclass's field."""

    name: str
    key: str
    """In JSON."""
    kind: Any
    plain: type | None
    """If it is one of text and numbers, or None beside it: that type."""
    is_nullable: bool
    is_required: bool
    is_object: bool
    is_optional: bool
    only: tuple[str, ...]

    def write(self, value: Any) -> Any:  # noqa: ANN401 - see convert
        """Return what JSON has for the field's value."""
        plain = dict(value) if self.is_object else to_plain(value)
        return {key: plain[key] for key in self.only} if self.only and plain else plain


@cache
def _list_fields(kind: Any) -> tuple[_Field, ...]:  # noqa: ANN401 - see convert
    found = []
    for item in fields(kind):
        kinds = item.type.__args__ if isinstance(item.type, UnionType) else (item.type,)
        named = [one for one in kinds if one is not NoneType]
        found.append(
            _Field(
                name=item.name,
                key=item.metadata.get(KEY, item.name),
                kind=item.type,
                plain=named[0] if named[0] in (str, int, float) else None,
                is_nullable=NoneType in kinds,
                is_required=item.default is MISSING and item.default_factory is MISSING,
                is_object=item.metadata.get(OBJECT, False),
                is_optional=item.metadata.get(OPTIONAL, False),
                only=item.metadata.get(ONLY, ()),
            )
        )
    return tuple(found)


def _convert(kind: Any, data: Any, least: float, path: str) -> Any:  # noqa: ANN401 - see convert
    """Make a value; `path` is its place, for errors."""
    if isinstance(kind, UnionType):
        if data is None:
            return None
        (kind,) = (one for one in kind.__args__ if one is not NoneType)
    if kind is Any or kind is object:
        return data
    if is_dataclass(kind):
        return _convert_object(kind, data, least, path)
    if arguments := getattr(kind, "__args__", ()):
        return _convert_items(kind.__origin__, arguments, data, least, path)
    if kind not in (int, float):
        return _check_type(kind, data, path)
    number = data if type(data) is int else _check_type(kind, data, path)
    try:
        value = kind(number)  # whole numbers are fine for `float`
        is_finite = isfinite(value)
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise DecodeError(f"{path} is too large")
    if value < least:
        raise DecodeError(f"{path} is {value}, less than {least:g}")
    return value


def _convert_object(kind: Any, data: object, least: float, path: str) -> Any:  # noqa: ANN401 - see convert
    """Make a dataclass; a field without a default has to be there."""
    found, values = _check_type(dict, data, path), {}
    for item in _list_fields(kind):
        if item.key in found:
            inner: Any = found[item.key]
            # Most values are as they should be: they need no place, which only an error shows.
            found_kind = type(inner)
            if found_kind is item.plain and (found_kind is str or (least <= inner and abs(inner) < LARGE)):
                values[item.name] = inner
            elif inner is None and item.is_nullable:
                values[item.name] = None
            else:
                place = f"{path}.{item.key}" if path else item.key
                values[item.name] = _convert(item.kind, inner, least, place)
        elif item.is_required:
            raise DecodeError(f"{path}.{item.key} is missing" if path else f"{item.key} is missing")
    return kind(**values)


def _convert_items(origin: Any, arguments: tuple[Any, ...], data: Any, least: float, path: str) -> Any:  # noqa: ANN401
    """Make a sequence, a mapping, or a set of CPUs."""
    if origin is frozenset:
        try:
            return parse_cpulist(_check_type(str, data, path))
        except DecodeError:
            raise
        except ValueError as error:
            raise DecodeError(f"{path} is no cpulist: {error}") from None
    if origin in (dict, Mapping):
        items = _check_type(dict, data, path).items()
        return {key: _convert(arguments[1], item, least, f"{path}[{key!r}]") for key, item in items}
    if origin is tuple and isinstance(data, dict):
        data = list(map(list, data.items()))
    entries = _check_type(list, data, path)
    kinds = arguments if origin is tuple and arguments[-1] is not ... else (arguments[0],) * len(entries)
    if len(kinds) != len(entries):
        raise DecodeError(f"{path} has {len(entries)} entries in place of {len(kinds)}")
    pairs = enumerate(zip(kinds, entries, strict=True))
    return origin(_convert(kind, item, least, f"{path}[{number}]") for number, (kind, item) in pairs)


def _check_type(kind: type[T], data: object, path: str) -> T:
    """Return data of a type as it is; JSON's true and false are no numbers."""
    if type(data) is not kind:
        raise DecodeError(f"{path or 'the whole'} is of type {type(data).__name__}, not {kind.__name__}")
    return data
