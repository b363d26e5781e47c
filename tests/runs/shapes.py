"""What a run directory has: the names of its files, and the keys of its JSON with their types.

In names and keys, N stands for a number and HOST for a host.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.runs.recordings import DATA

FILE = DATA.parent / "run_directories.json"
FREE = ("choices", "env", "packages", "machine", "values")
"""Objects whose keys are data, or which are described elsewhere."""


def name_files(files: Mapping[str, Any]) -> list[str]:
    hosts = _find_hosts(files)
    return sorted({_generalise(file, hosts) for file in files if not file.startswith("checkpoints/")})


def find_keys(files: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
    """Return, for each kind of JSON file, its keys (`a.b[].c`) and their types."""
    hosts = _find_hosts(files)
    found: dict[str, dict[str, set[str]]] = {}
    for file, value in files.items():
        if file.endswith((".json", ".jsonl")):
            keys = found.setdefault(_generalise(file, hosts), {})
            for entry in value if file.endswith(".jsonl") else [value]:
                for key, kind in _walk(entry):
                    keys.setdefault(key, set()).add(kind)
    return found


def read_files(run_dir: Path) -> dict[str, Any]:
    """Return the files of a run directory by path, JSON as values."""
    return {
        str(path.relative_to(run_dir)): _read(path) for path in sorted(run_dir.rglob("*")) if path.is_file()
    }


def _find_hosts(files: Mapping[str, Any]) -> list[str]:
    """Return the hosts that have left a plan: spare nodes too."""
    plans = [re.fullmatch(r"plan-(.*)\.json", file) for file in files]
    return [found[1] for found in plans if found]


def _generalise(file: str, hosts: Sequence[str]) -> str:
    for host in sorted(hosts, key=len, reverse=True):
        file = re.sub(rf"(?<=-){re.escape(host)}(?=[-.])", "HOST", file)
    return re.sub(r"\d+", "N", file)


def _walk(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        if path:
            yield path, "object"
        if path.rpartition(".")[2] not in FREE:
            for key, item in value.items():
                yield from _walk(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        yield path, "array"
        for item in value:
            yield from _walk(item, f"{path}[]")
    else:
        number = {int: "number", float: "number", str: "string", bool: "bool"}
        yield path, number.get(type(value), "null")


def _read(path: Path) -> Any:
    text = path.read_text(errors="replace")
    if path.suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else text
