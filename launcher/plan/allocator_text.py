"""The notation of PYTORCH_CUDA_ALLOC_CONF: `expandable_segments:True,backend:native`, lists in brackets."""

from collections.abc import Mapping

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that hold settings; torch hears the first that is set, and no other.

Tried with 2.13. Up to 2.9, CUDA builds do not know the last (github.com/pytorch/pytorch/issues/183387).
"""


def parse_settings(text: str) -> dict[str, str] | None:
    """Read settings by name, the last of a name counting; None where the notation is broken.

    Blanks mean nothing anywhere, and a comma at the end is fine, as torch has it.
    """
    settings: dict[str, str] = {}
    items = split_items("".join(text.split()))
    if items and not items[-1]:
        items.pop()
    for item in items:
        name, _, value = item.partition(":")
        listed = value.startswith("[") and value.endswith("]") and value.count("[") == value.count("]") == 1
        if not name or not value or set(name) & set("[]") or (not listed and set(value) & set("[]:")):
            return None
        settings[name] = value
    return settings


def split_items(text: str) -> list[str]:
    """Split at the commas that are not within brackets."""
    items, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items


def format_settings(settings: Mapping[str, str]) -> str:
    """Write settings; `parse_settings` reads them back."""
    return ",".join(f"{name}:{value}" for name, value in settings.items())


def find_variable(environ: Mapping[str, str]) -> str:
    """Name of the variable that torch hears; empty where none is set. An empty value is as good as none."""
    return next((name for name in NAMES if environ.get(name, "").strip()), "")
