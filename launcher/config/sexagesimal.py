"""Times, and `nodes`, without quotes in configuration files.

YAML 1.1 reads `10:00:00` as the number 36000, and `2:4` as 124: to base 60.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from launcher.config.yaml_files import read_text
from launcher.errors import UsageError
from launcher.launch.job import Draft

LINE = re.compile(
    r"""^\s*["']?(?P<key>[\w-]+)["']?\s*:\s+(?P<text>[0-9][0-9_]*(?::[0-5]?[0-9])+)\s*(?:\#.*)?$""",
    re.MULTILINE,
)


def check_files(draft: Draft) -> None:
    """Raise UsageError for a time of `cluster`, or for `nodes`, that a file has without quotes.

    SLURM would take a time for minutes.
    """
    cluster = draft.config.cluster
    values = {"nodes": draft.config.nodes, "time": cluster.time, **cluster.additional}
    suspects = {key: str(value) for key, value in values.items() if str(value).isdecimal()}
    for path in list_files(draft) if suspects else ():
        for match in LINE.finditer(read_text(path)):
            key, text = match["key"], match["text"]
            if suspects.get(key) == str(read_sexagesimal(text)):
                raise UsageError(
                    f"{path} has {key}: {text} without quotes, which YAML reads as the number"
                    f' {suspects[key]}: write {key}: "{text}"'
                )


def list_files(draft: Draft) -> Iterator[Path]:
    """Give the files that can hold `cluster`: those of its group, and the primary one."""
    sources = draft.composed.sources
    for folder in sources.everywhere:
        yield from sorted((folder / "cluster").glob("*.yaml"))
    primary = sources.find_file(sources.primary)
    if primary:
        yield primary


def read_sexagesimal(text: str) -> int:
    """Return what YAML 1.1 makes of `1:30:00` (yaml.org/type/int.html)."""
    total = 0
    for piece in text.replace("_", "").split(":"):
        total = total * 60 + int(piece)
    return total
