"""Configuration files, read with limits: nobody waits for a pipe, or for aliases that multiply."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from launcher.errors import UsageError
from launcher.files import read_file

MOST_BYTES = 1 << 19
"""Of a file: PyYAML and OmegaConf take some seconds for as much."""
MOST_NODES = 20_000
"""Keys and values of a file that has aliases, with what these stand for: two or three seconds."""

SEXAGESIMAL = re.compile(
    r"""^\s*["']?(?P<key>[\w-]+)["']?\s*:\s+(?P<text>[0-9][0-9_]*(?::[0-5]?[0-9])+)\s*(?:\#.*)?$""",
    re.MULTILINE,
)
"""A line whose value YAML 1.1 reads as a number to base 60 (yaml.org/type/int.html)."""


def read_yaml(path: Path) -> object:
    """Return what a file holds; raises UsageError for what is too large, else YAMLError or RecursionError."""
    return yaml.safe_load(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of a configuration file; raises UsageError for one that Hydra is not to read."""
    try:
        text = read_file(path, MOST_BYTES, follow=True).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): correct it, or move it away") from None
    check_aliases(path, text)
    return text


def check_aliases(path: Path, text: str) -> None:
    """Raise UsageError if aliases make a file far larger, as in a `billion laughs`.

    Other errors in the file are left to its reader.
    """
    if "*" not in text or "&" not in text:
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = count_nodes(root, {}) if root else 0
    except (yaml.YAMLError, RecursionError, ValueError):
        return
    if count > MOST_NODES:
        many = "endlessly many" if count == math.inf else f"{count:.0f}"
        raise UsageError(
            f"{path} has {many} entries with what its aliases (*name) stand for, and the most is"
            f" {MOST_NODES}: leave aliases out"
        )


def count_nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """Count a node and all below it, aliases as what they stand for; infinite for one that holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        below = [each for child in children for each in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(count_nodes(each, known) for each in below)
    return known[id(node)]


def find_unquoted(paths: Iterable[Path], numbers: Mapping[str, str]) -> Iterator[str]:
    """Tell of each file with a key whose value, such as `10:00`, is one of these numbers to YAML.

    `numbers` are decimal texts by the last part of the key.
    """
    for path in paths:
        for match in SEXAGESIMAL.finditer(read_text(path)):
            key, text = match["key"], match["text"]
            if numbers.get(key) == str(parse_sexagesimal(text)):
                yield (
                    f"{path} has {key}: {text} without quotes, which YAML reads as the number"
                    f' {numbers[key]}: write {key}: "{text}"'
                )


def parse_sexagesimal(text: str) -> int:
    """Return the number that YAML 1.1 makes of `1:30:00`."""
    total = 0
    for piece in text.replace("_", "").split(":"):
        total = total * 60 + int(piece)
    return total
