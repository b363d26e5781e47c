"""What the commands make of recorded runs, whole and damaged: `tests/data/runs/expected.toml` has the values.

An entry is a recording, or one (`of`) with `edits`: a file is cut to a number of characters, removed,
replaced by a text or by a link to a file outside, or has a part of its text replaced.
"""

import json
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.runs.recordings import (
    DATA,
    KINDS,
    REPOSITORY,
    find_keys,
    list_recordings,
    name_files,
    read_files,
    read_recorded,
    restore,
    run_local,
)
from tests.seam import Launch, Result

EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((DATA / "expected.toml").read_text())
WORDS = ("code", "says", "has", "counts")
SECRET = "words of somebody else's file"


@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_commands_say(name: str, here: Path, launch: Launch) -> None:
    expected = _complete(EXPECTED[name])
    path = restore(expected.get("of", name), here / "runs")
    outside = here / "outside"
    outside.write_text(f"{SECRET}\n")
    for edit in expected.get("edits", ()):
        _edit(path, edit, outside)
    (here / "train.py").write_text("")
    calls: dict[str, Callable[[], Result]] = {
        "status": lambda: launch("status", str(path), "format=json"),
        "watch": lambda: launch("watch", str(path), "format=json"),
        "logs": lambda: launch("logs", str(path)),
        "nodes": lambda: launch("nodes", "format=json"),
        "doctor": lambda: launch("doctor", f"run_dir={path}", "format=json"),
        "report": lambda: launch("report", str(path)),
        "resume": lambda: launch(f"run_dir={path}", "nproc_per_node=2", "dry_run=true", "train.py"),
    }
    for command, call in calls.items():
        if command not in (EXPECTED[name] if command == "report" else expected):  # it takes time
            continue
        result, wanted = call(), expected[command]
        assert "Traceback" not in result.err and SECRET not in result.out + result.err, result
        if command == "doctor" and "last_run" in wanted:  # its exit code is about this machine too
            found = json.loads(result.out)["findings"]
            assert [one["level"] for one in found if one["subject"] == "last run"] == wanted["last_run"], (
                found
            )
            continue
        assert result.code == wanted.get("code", 0), (command, result)
        for words in wanted.get("says", ()):
            assert words in result.err, (command, result)
        text = result.out
        if command == "report" and not result.code:
            text = Path(text.strip()).read_text()
            assert SECRET not in text
        for words in wanted.get("has", ()):
            assert words in text, (command, words, text)
        for words, count in wanted.get("counts", {}).items():
            assert text.count(words) == count, (command, words, text)
        values = {key: value for key, value in wanted.items() if key not in WORDS}
        if values:
            data = json.loads(text)
            data = data["runs"][0] if command == "status" else data
            assert {key: look_up(data, key) for key in values} == values, (command, data)


def _complete(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what is expected, with what the recording has that the entry is made of."""
    whole = dict(EXPECTED[entry["of"]]) if "of" in entry else {}
    for command, wanted in entry.items():
        if isinstance(wanted, dict):
            known = {} if wanted.get("only") else whole.get(command, {})
            nulls = {key for key, value in wanted.items() if value == "null"}
            kept = {key: value for key, value in known.items() if key.partition(".")[0] not in nulls}
            whole[command] = {key: value for key, value in (kept | wanted).items() if key != "only"}
    return {**entry, **whole}


def _edit(path: Path, edit: Mapping[str, Any], outside: Path) -> None:
    file = path / edit["file"]
    if "cut" in edit:
        file.write_text(file.read_text()[: edit["cut"]])
    elif "write" in edit:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(edit["write"].encode("latin-1"))
    elif "replace" in edit:
        old, new = edit["replace"]
        assert old in file.read_text(), edit
        file.write_text(file.read_text().replace(old, new.replace("HOSTNAME", socket.gethostname())))
    else:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        if edit.get("link"):
            file.symlink_to(outside)


def look_up(data: Any, key: str) -> Any:
    """Return a value by its place: `a.b`, or `a[].b` for one of each element; "null" for null."""
    name, _, rest = key.partition(".")
    value = data[name.removesuffix("[]")]
    if name.endswith("[]"):
        return [look_up(one, rest) if rest else one for one in value]
    if rest and value is not None:
        return look_up(value, rest)
    return "null" if value is None else value


def test_every_kind_is_recorded() -> None:
    assert set(list_recordings()) == {*KINDS, "full"}
    assert set(KINDS) <= set(EXPECTED)
    for name in list_recordings():  # nothing of the machine on which they were made
        text = (DATA / f"{name}.json").read_text()
        folders = set(re.findall(r"(?<![\w./*}>)-])/(\w[\w.-]*)/", text))
        assert folders <= {"home", "opt", "usr", "tmp", "no"} and "/root/" not in text, (name, folders)
        assert not re.search(r"/tmp/(?!launch-caches)", text), name


RECORDED = {kind: read_recorded(kind) for kind in KINDS}
KEYS: dict[str, dict[str, set[str]]] = {}
for files in RECORDED.values():
    for file, keys in find_keys(files).items():
        for key, types in keys.items():
            KEYS.setdefault(file, {}).setdefault(key, set()).update(types)
LIVE = ("ok", "failed", "hang", "restarted", "stopped", "elastic", "refused")
AGAIN = "if this is meant: python -m tests.golden runs, and read the diff of tests/data/runs"
DOCS = (REPOSITORY / "docs/run-directory.md").read_text()
OTHERS = {
    "job.json": "of submitted jobs",
    "logs/N/ended-by-N": "a link",
    "logs/N/rank-N.error.json": "of programs that have it written",
    "manifest-N.json": "of nodes that are started by hand",
    "tuning.json": "by `launch tune`",
    "watch/stack-HOST.json": "by `launch watch`",
    "watch/stack-request.json": "by `launch watch`",
    "objective.txt": "the program's own",
    "rank-N.memory.json": "of programs that load torch",
    "report.html": "by `launch report`",
    "submission.sh": "of submitted jobs",
    "checkpoints/": "the program's own",
}
"""Documented names that the recorded runs do not have."""
OTHER_KEYS = {"manifest.json": {"stragglers", "training"}}


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
    # Of ranks that are forked from a process with torch, whether their program loads it or not.
    files = {file: value for file, value in files.items() if not file.endswith(".memory.json")}
    assert name_files(files) == name_files(RECORDED[kind]), AGAIN
    for path in (run_dirs[kind], *run_dirs[kind].rglob("*")):
        if "checkpoints" not in path.parts:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    recorded = find_keys(RECORDED[kind])
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
    written = {name for files in RECORDED.values() for name in name_files(files)}
    assert documented - OTHERS.keys() == written


def test_every_key_stands_in_the_documentation() -> None:
    documented = {re.sub(r"ATTEMPT|\d+", "N", file): set(keys) for file, keys in _read_table("Keys").items()}
    written = {file: {key for key in keys if not re.search(r"[.\[]", key)} for file, keys in KEYS.items()}
    assert {file: keys - OTHER_KEYS.get(file, set()) for file, keys in documented.items()} == written
