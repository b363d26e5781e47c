"""Machines whose files are partial, stale or odd, and what the probe makes of them: data/odd_machines.json.

A case has a `base` ("small": the small machine; "two nodes"; "nothing") and the `files` that differ from it:
a text, null for what is not there, or what `put` takes; `cpu{0-3}` stands for several. Of the result it has
the `changes` from the base's machine (for "nothing" from that of "two nodes"), the values in the `warnings`,
or those in the `error`.
`python -m tests.golden machines` writes the results again.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.codec import to_plain
from launcher.errors import LaunchError
from launcher.plan.model import Machine
from launcher.probe.machine import probe

from .machine_trees import put, short_lived, spoilt, write_small

PATH = Path(__file__).parents[1] / "data" / "odd_machines.json"
SEVERAL = re.compile(r"\{(\d+)-(\d+)\}")
VALUES = re.compile(r"(?<!\w)'(?:[^'\\]|\\.)*'(?!\w)|[\w/,:.-]*[0-9/_][\w/,:.-]*|\bmissing\b|\bempty\b")
Case = dict[str, Any]


def read_cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def write_bases(folder: Path, bases: Mapping[str, Mapping[str, str]]) -> None:
    """Write the trees that cases begin with, by their names."""
    write_small(folder / "small")
    for name, files in bases.items():
        (folder / name).mkdir()
        for path, text in files.items():
            put(folder / name, path, text)


def expand(files: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each of `cpu{0-3}/…`."""
    for path, content in files.items():
        found = SEVERAL.search(path)
        for number in range(int(found[1]), int(found[2]) + 1) if found else ("",):
            yield SEVERAL.sub(str(number), path), content


def list_values(text: str) -> str:
    """What of a message a person could look up: numbers, paths, names and contents."""
    return " ".join(VALUES.findall(text))


def flatten(value: Any, place: str = "") -> dict[str, Any]:
    """Each value in a machine by its place: `gpus.0.node`."""
    if not isinstance(value, dict | list):
        return {place: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {place: len(value)} if isinstance(value, list) else {}
    for key, item in items:
        found |= flatten(item, f"{place}.{key}".lstrip("."))
    return found


def read_machine(root: Path) -> dict[str, Any]:
    """The values of the machine below a root, its warnings as what is in them; or what an error has."""
    try:
        machine: Machine = probe(root)
    except LaunchError as error:
        return {"error": list_values(str(error).replace(str(root), "ROOT"))}
    plain = to_plain(machine)
    warnings = [list_values(text) for text in plain.pop("warnings")]
    return {**flatten(plain), "warnings": warnings}


def judge(folder: Path, case: Case) -> dict[str, Any]:
    """What differs in a case from its base."""
    base = folder / case["base"]
    sound = read_machine(base if case["base"] != "nothing" else folder / "two nodes")
    with spoilt(base, dict(expand(case["files"]))):
        odd = read_machine(base)
    if "error" in odd:
        return odd
    changes = {key: value for key, value in odd.items() if sound.get(key) != value and key != "warnings"}
    result = {"changes": changes} if changes else {}
    return result | ({"warnings": odd["warnings"]} if odd["warnings"] else {})


def write() -> None:
    """Write the results again, a line for each part of a case."""
    data = read_cases()
    with short_lived() as folder:
        write_bases(folder, data["bases"])
        cases = {
            name: {**{key: case[key] for key in ("base", "files")}, **judge(folder, case)}
            for name, case in data["cases"].items()
        }
    lines = []
    for name, case in cases.items():
        parts = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in case.items()]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n  }")
    bases = json.dumps(data["bases"], indent=1).replace("\n", "\n ")
    PATH.write_text(f'{{\n "bases": {bases},\n "cases": {{\n' + ",\n".join(lines) + "\n }\n}\n")
