"""JSON by the interpreter's own C scanner: the `json` package spends 8 ms of every rank's start on `re`."""

from _json import encode_basestring_ascii as quote
from _json import make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ScannerSettings:
    """The attributes of `json.JSONDecoder` that the scanner reads."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def load_json(text: str) -> object:
    """Read one JSON value; raises ValueError."""
    text = text.strip()
    settings: Any = ScannerSettings  # the stub of `make_scanner` asks for a scanner here
    try:
        value, end = make_scanner(settings)(text, 0)
    except (StopIteration, SystemError):  # without the package, the scanner cannot say what is wrong
        import json

        return json.loads(text)
    if end != len(text):
        raise ValueError(f"not JSON after character {end}")
    return value


def dump_json(value: object) -> str:
    """Write objects, lists, strings, numbers, true, false and null as JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote(str(key))}: {dump_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(dump_json, value)) + "]"
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
