"""The one codec of files and messages: `load(Type, json)` and `dump(value)`.

Dataclasses are filled by their annotations, and an error names the place. Files of a run directory can be cut
short, of another version, or planted by another user.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import repeat
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Any, TypeVar

from launcher.cpulist import format_cpulist, parse_cpulist

KEY = "json_key"
"""Entry of a field's metadata: its key in JSON, if that is no name in Python, as `from`."""
OBJECT = "json_object"
"""Entry of a field's metadata: a tuple of pairs that is an object in JSON."""
OPTIONAL = "json_optional"
"""Entry of a field's metadata: JSON has it if there is something in it."""
ONLY = "json_only"
"""Entry of a field's metadata: the fields of the dataclass in it that JSON has."""
T = TypeVar("T")


class DecodeError(ValueError):
    """JSON that is not what it should be: the text says where and why."""


def load(kind: type[T], text: str | bytes) -> T:
    """Read JSON as `convert` does; raises DecodeError."""
    return convert(kind, parse_json(text))


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


def salvage(kind: Any, data: object) -> Any:  # noqa: ANN401 - see convert
    """Make a value as `convert` does of JSON that may be damaged: what has another type is left out.

    That is an entry of a list, or a field, which then has its default. Raises DecodeError if nothing is left:
    a field without default is missing, or the whole is of another type.
    """
    if isinstance(kind, UnionType) and data is not None:
        (kind,) = (one for one in kind.__args__ if one is not NoneType)
    try:
        return convert(kind, data)
    except DecodeError:
        if isinstance(data, dict) and is_dataclass(kind) and isinstance(kind, type):
            values: dict[str, Any] = {}
            for item, key, is_required in _list_fields(kind):
                with suppress(KeyError, DecodeError):
                    values[item.name] = salvage(item.type, data[key])
                if is_required and item.name not in values:
                    raise
            return kind(**values)
        if isinstance(data, list) and getattr(kind, "__origin__", None) in (list, tuple):
            made = []
            for one in data:
                with suppress(DecodeError):
                    made.append(salvage(kind.__args__[0], one))
            return kind.__origin__(made)
        raise


def take_dict(found: Mapping[str, object], key: str) -> dict[str, Any]:
    """Return an object in JSON of others; empty if there is none."""
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def take_list(found: Mapping[str, object], key: str) -> list[object]:
    """Return a list in JSON of others; empty if there is none."""
    value = found.get(key)
    return value if isinstance(value, list) else []


def to_plain(value: Any) -> Any:  # noqa: ANN401 - see convert
    """Return what JSON has for a value of the types of `convert`, which reads it back."""
    if is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {}
        for item, key, _ in _list_fields(type(value)):
            found, how = getattr(value, item.name), item.metadata
            if found or not how.get(OPTIONAL):
                plain[key] = dict(found) if how.get(OBJECT) else to_plain(found)
            if found and ONLY in how:
                plain[key] = {name: plain[key][name] for name in how[ONLY]}
        return plain
    if isinstance(value, frozenset):
        return format_cpulist(value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return value


@cache
def _list_fields(kind: Any) -> tuple[tuple[Any, str, bool], ...]:  # noqa: ANN401 - see convert
    """Return a dataclass's fields, each with its key in JSON and whether that has to be there."""
    return tuple(
        (item, item.metadata.get(KEY, item.name), item.default is MISSING and item.default_factory is MISSING)
        for item in fields(kind)
    )


def _misfit(place: str, words: str) -> DecodeError:
    """Return the error for a value at a place such as `.ranks[0].env`; the words say what is wrong."""
    return DecodeError(f"{place.removeprefix('.') or 'the whole'} {words}")


def _convert(kind: Any, data: Any, least: float, place: str) -> Any:  # noqa: ANN401 - see convert
    if kind is str:
        return _check_type(kind, data, place)
    if isinstance(kind, UnionType):
        if data is None:
            return None
        (kind,) = (one for one in kind.__args__ if one is not NoneType)
    if kind is Any or kind is object:
        return data
    if kind is int or kind is float:
        return _convert_number(kind, data, least, place)
    if is_dataclass(kind):
        return _convert_object(kind, data, least, place)
    if arguments := getattr(kind, "__args__", ()):
        return _convert_items(kind.__origin__, arguments, data, least, place)
    return _check_type(kind, data, place)


def _convert_object(kind: Any, data: object, least: float, place: str) -> Any:  # noqa: ANN401
    found, values = _check_type(dict, data, place), {}
    for item, key, is_required in _list_fields(kind):
        if key in found:
            values[item.name] = _convert(item.type, found[key], least, f"{place}.{key}")
        elif is_required:
            raise _misfit(f"{place}.{key}", "is missing")
    return kind(**values)


def _convert_number(kind: Any, data: object, least: float, place: str) -> int | float:  # noqa: ANN401
    number = data if type(data) is int else _check_type(kind, data, place)
    try:
        value: int | float = kind(number)  # whole numbers are fine for `float`
        is_finite = isfinite(value)
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise _misfit(place, "is too large")
    if value < least:
        raise _misfit(place, f"is {value}, less than {least:g}")
    return value


def _convert_items(origin: Any, arguments: tuple[Any, ...], data: Any, least: float, place: str) -> Any:  # noqa: ANN401
    """Make a sequence, a mapping, or a set of CPUs."""
    if origin is frozenset:
        text = _check_type(str, data, place)
        try:
            return parse_cpulist(text)
        except ValueError as error:
            raise _misfit(place, f"is no cpulist: {error}") from None
    is_mapping = origin in (dict, Mapping)
    if origin is tuple and isinstance(data, dict):
        data = list(map(list, data.items()))
    entries: Any = _check_type(dict if is_mapping else list, data, place)
    if is_mapping and arguments[1] is Any:
        return entries
    kinds: Iterable[Any] = repeat(arguments[-1 if is_mapping else 0])
    if origin is tuple and arguments[-1] is not ...:
        kinds = arguments
        if len(arguments) != len(entries):
            raise _misfit(place, f"has {len(entries)} entries in place of {len(arguments)}")
    pairs = zip(kinds, entries.items() if is_mapping else enumerate(entries), strict=False)
    made = {key: _convert(kind, item, least, f"{place}[{key!r}]") for kind, (key, item) in pairs}
    return made if is_mapping else origin(made.values())


def _check_type(kind: type[T], data: object, place: str) -> T:
    """Return data of a type as it is; JSON's true and false are no numbers."""
    if type(data) is not kind:
        raise _misfit(place, f"is of type {type(data).__name__}, not {kind.__name__}")
    return data
