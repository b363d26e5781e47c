"""What a run directory has after each kind of end: names, modes, JSON keys; the documentation says so."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.runs.jobs import run_local
from tests.runs.recordings import DATA, REPOSITORY
from tests.runs.shapes import FILE, find_keys, name_files, read_files

SHAPES = json.loads(FILE.read_text())
KEYS = {
    file: {key: set(types.split("|")) for key, types in keys.items()} for file, keys in SHAPES["keys"].items()
}
LIVE = ("ok", "failed", "hang", "restarted", "stopped", "elastic", "refused")
AGAIN = "if this is meant: python -m tests.golden runs, and read the diff of tests/data/run_directories.json"
DOCS = (REPOSITORY / "docs/run-directory.md").read_text()
OTHERS = {
    "job.json": "of submitted jobs",
    "logs/N/end-N": "a link",
    "objective.txt": "the program's own",
    "rank-N.memory.json": "of programs that load torch",
    "report.html": "by `launch report`",
    "submission.sh": "of submitted jobs",
    "checkpoints/": "the program's own",
}
"""Documented names that the recorded runs do not have."""


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    before = os.umask(0)  # nothing is open to others for all that
    try:
        return run_local(LIVE, folder)
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", LIVE)
def test_what_a_run_leaves(kind: str, run_dirs: dict[str, Path]) -> None:
    files = read_files(run_dirs[kind])
    assert set(name_files(files)) == set(SHAPES["names"][kind]), AGAIN
    for path in (run_dirs[kind], *run_dirs[kind].rglob("*")):
        if "checkpoints" not in path.parts:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    recorded = find_keys(json.loads((DATA / f"{kind}.json").read_text())["files"])
    for file, keys in find_keys(files).items():
        for key, types in keys.items():
            known = KEYS[file].get(key, set())
            if not any(_is_unknown(part, KEYS[file]) for part in _list_parents(key)):
                assert known and (types <= known | {"null"} or known == {"null"}), (file, key, types, AGAIN)
        if not file.endswith(".jsonl"):  # metrics have what is known
            missing = [key for key in recorded.get(file, {}) if key not in keys and not _is_empty(key, keys)]
            assert not missing, (file, missing, AGAIN)


def _is_unknown(key: str, known: dict[str, set[str]]) -> bool:
    """Tell whether no recording says what an object or array has."""
    return known.get(key) == {"null"} or (known.get(key) == {"array"} and f"{key}[]" not in known)


def _list_parents(key: str) -> list[str]:
    """Return `a`, `a.b` and `a.b[]` for `a.b[].c`."""
    return [key[: found.start()] for found in re.finditer(r"\.|\[\]", key)]


def _is_empty(key: str, found: dict[str, set[str]]) -> bool:
    """Tell whether a key is missing since an object or list above it is null or has nothing."""
    return any(
        "null" in found[part] or found[part] == {"array"} for part in _list_parents(key) if part in found
    )


def _read_table(heading: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page: the names in the first column, with those in the second."""
    lines = DOCS.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    return {
        name: re.findall("`([^`]*)`", words)
        for first, words in rows
        for name in re.findall("`([^`]*)`", first)
    }


def test_every_name_stands_in_the_documentation() -> None:
    rows = _read_table("What is in it")
    documented = set()
    for name, parts in rows.items():
        within = [f"{name}{part}" for part in parts if name.endswith("/") and re.search(r"\.\w+$", part)]
        documented |= set(within or [name])
    documented = {re.sub(r"ATTEMPT|JOB|\d+", "N", name) for name in documented}
    written = {name for names in SHAPES["names"].values() for name in names}
    assert documented - OTHERS.keys() == written


def test_every_key_stands_in_the_documentation() -> None:
    documented = {re.sub(r"ATTEMPT|\d+", "N", file): set(keys) for file, keys in _read_table("Keys").items()}
    written = {file: {key for key in keys if not re.search(r"[.\[]", key)} for file, keys in KEYS.items()}
    assert documented == written
