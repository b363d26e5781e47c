"""Fields of settings: what each takes, and what is said of another value."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, get_args, get_origin

from launcher.errors import UsageError

LARGEST_NUMBER = 10**9
"""Of numbers whose field has no maximum; timers take no more than some 10**10 seconds."""
LONGEST_SHOWN = 60
"""Characters of a refused value."""


def setting(default: Any = MISSING, **takes: object) -> Any:  # noqa: ANN401 - stands for a field of any type
    """Return a field with what it takes; all else is refused, and a null that is not the default.

    `choices` are all the words there are. Numbers have a `minimum`, a `maximum`, are `above` one, or are
    `whole` in a field of any type; `words` may stand in their place. A text matches a `pattern`, and `give`
    says what that is. For a list, it is what may be in it.
    """
    if isinstance(default, list):
        return field(default_factory=lambda: [*default], metadata=takes)
    return field(default=default, metadata=takes)


def one_of(default: str, *others: str) -> Any:  # noqa: ANN401 - stands for a field
    """Return a field that takes one of these words, and no other."""
    return setting(default, choices=(default, *others))


def list_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, "Field[Any]"]]:  # noqa: ANN401
    """Give each setting of a section, and the sections in it with theirs: its key, value and field."""
    for each in fields(section):
        value, key = getattr(section, each.name), f"{prefix}{each.name}"
        yield key, value, each
        if is_dataclass(value):
            yield from list_settings(value, f"{key}.")


def check_values(section: Any, prefix: str = "") -> None:  # noqa: ANN401 - see above
    """Refuse the first value that its field does not take; raises UsageError with what it takes."""
    for key, value, each in list_settings(section, prefix):
        kind: Any = get_origin(each.type) or each.type
        shape = describe_shape(key, each.type)
        if shape and not isinstance(value, kind):
            raise UsageError(f"{key}={show_value(value)}: give {shape}")
        for entry in value if kind is list else [value]:
            if kind is list and not isinstance(entry, get_args(each.type)[0]):
                raise UsageError(
                    f"{key}={show_value(value)}: {show_value(entry)} cannot be in it, give {shape}"
                )
            is_null = entry is None and each.default in (None, MISSING)
            if not is_null and (fault := find_fault(entry, each.metadata) if each.metadata else ""):
                raise UsageError(f"{key}={show_value(entry)}: {fault}")


def describe_shape(key: str, kind: Any) -> str:  # noqa: ANN401 - an annotation
    """Say how a section, a mapping or a list is given; empty for a plain value."""
    if is_dataclass(kind):
        return f"its keys, as in {key}.{fields(kind)[0].name}=…"
    return {dict: f"a mapping, as in {key}.NAME=…", list: f"a list, as in {key}=[…]"}.get(
        get_origin(kind), ""
    )


def find_fault(value: Any, takes: Mapping[str, Any]) -> str:  # noqa: ANN401 - of any type
    """Say what to give in place of a value; empty if it is one of those that a field takes."""
    if choices := takes.get("choices"):
        return "" if show_value(value) in choices else f"choose from {', '.join(choices)}"
    if pattern := takes.get("pattern"):
        return "" if re.fullmatch(pattern, str(value), re.DOTALL) else f"give {takes['give']}"
    words, above = takes.get("words", ()), takes.get("above")
    low, high = takes.get("minimum", -math.inf), takes.get("maximum", LARGEST_NUMBER)
    if value in words:
        return ""
    is_number = isinstance(value, int if takes.get("whole") else int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and (above is None or value > above):
        return ""
    least = f"of at least {low:g}" if above is None else f"above {above:g}"
    most = f" and at most {high:.15g}" if "maximum" in takes or (is_number and value > high) else ""
    return f"give {takes.get('give', 'a number')} {least}{most}{''.join(f', or {word}' for word in words)}"


def show_value(value: object) -> str:
    """Write a value as the command line has it, cut off if it is long."""
    if isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."
