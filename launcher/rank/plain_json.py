"""JSON by the interpreter's own C scanner: the `json` package spends 8 ms of every rank's start on `re`."""

from _json import encode_basestring_ascii as quote
from _json import make_scanner


class Decoder:
    """The settings that `json.JSONDecoder` gives its scanner."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def parse_json(text: str) -> object:
    """Read one JSON value; raises ValueError."""
    text = text.strip()
    try:
        # The stub asks for a scanner where the scanner asks for a decoder's settings.
        value, end = make_scanner(Decoder)(text, 0)  # type: ignore[arg-type]
    except (StopIteration, SystemError):  # without the package, the scanner cannot say what is wrong
        import json

        return json.loads(text)
    if end != len(text):
        raise ValueError(f"not JSON after character {end}")
    return value


def format_json(value: object) -> str:
    """Write objects, lists, strings, numbers, true, false and null as JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote(str(key))}: {format_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(format_json, value)) + "]"
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
