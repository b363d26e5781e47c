"""Run directories as data: `tests/data/runs/KIND.json` holds the files of one, and `kinds.toml` the jobs.

A file of JSON is stored as its value, one of JSON lines as a list, any other as text. Paths, hosts and
boots of the machine on which it was recorded are replaced. `full.json` is made up: a run on GPUs that was
requeued, hung, had a straggler and a GPU error, and failed; `times` are those of its checkpoints.
"""

import json
import os
import re
import signal
import socket
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.cli.make_runs import read_manifest
from tests.seam import LAUNCH, clean_environ, find_processes, find_run, wait_for

DATA = Path(__file__).parents[1] / "data" / "runs"
HOME, PYTHON, HOST = "/home/ann/llm", "/opt/venv", "box"
BOOT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
LEFT_OUT = ("report.html", "submission.sh", "job.json")
MOST_LINES = 6
"""Of a file of metrics."""
REPOSITORY = Path(__file__).parents[2]


def list_recordings() -> list[str]:
    return sorted(path.stem for path in DATA.glob("*.json"))


def read_recorded(name: str) -> dict[str, Any]:
    """The files of a recording by path, JSON as values."""
    files: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())["files"]
    return files


def record(name: str, run_dir: Path) -> None:
    """Store a run directory that was made in `run_dir.parents[2]`."""
    files = {
        str(path.relative_to(run_dir)): _load(path.name, _neutralise(path.read_text(), run_dir.parents[2]))
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and str(path.relative_to(run_dir)) not in LEFT_OUT
    }
    files = {_rename_host(file): value for file, value in files.items()}
    lines = ",\n".join(f"{json.dumps(file)}: {json.dumps(value)}" for file, value in files.items())
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text(f'{{"id": "{run_dir.name}", "files": {{\n{lines}\n}}}}\n')


def restore(name: str, runs_dir: Path) -> Path:
    """Write a recorded run below `runs_dir`, where it is `train/ID`, and return its directory."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    path = runs_dir / "train" / str(found["id"])
    for file, value in found["files"].items():
        target = path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_dump(file, value))
    for file, seconds in found.get("times", {}).items():
        os.utime(path / file, (seconds, seconds))
    return path


def _load(file: str, text: str) -> Any:
    if file.endswith(".json"):
        return json.loads(text)
    if file.endswith(".jsonl"):
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for number, line in enumerate(lines) if number < MOST_LINES or "event" in line]
    return text


def _dump(file: str, value: Any) -> str:
    if file.endswith(".json"):
        return json.dumps(value, indent=1) + "\n"
    return "".join(json.dumps(line) + "\n" for line in value) if file.endswith(".jsonl") else str(value)


def _neutralise(text: str, folder: Path) -> str:
    text = text.replace(str(folder), HOME).replace(str(REPOSITORY / ".venv"), PYTHON)
    text = text.replace(str(REPOSITORY), "/opt/launch")
    text = re.sub(r"/tmp/launch-caches-[\w-]+", "/tmp/launch-caches", text)
    text = BOOT.sub("00000000-0000-0000-0000-000000000000", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, text)


def _rename_host(file: str) -> str:
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, file)


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


# The jobs

KINDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text())
LOCAL = [name for name, kind in KINDS.items() if "slurm" not in kind]
COMMON = ("nproc_per_node=2", "binding=none", "watch.interval=1", "watch.metrics_interval=1")
ENDED = ("succeeded", "failed", "stopped")


def run_local(names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Run these jobs on this machine, all at once, and return their run directories."""
    started = {name: _start(name, folder / name) for name in names}
    try:
        for name, process in started.items():
            kind = KINDS[name]
            for pattern in kind.get("once", ()):
                wait_for(partial(_has, folder / name, pattern), f"{name}: {pattern}")
            if "send" in kind:
                process.send_signal(getattr(signal, kind["send"]))
        for name, process in started.items():
            assert process.wait(120) == KINDS[name]["code"], (folder / name / "output").read_text()
    finally:
        for process in started.values():
            process.kill()
        for pid in find_processes(f"RECORDED_IN={folder}"):
            os.kill(pid, signal.SIGKILL)
    return {name: find_run(folder / name) for name in names}


def run_on_slurm(name: str, folder: Path, sandbox: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Run one on a sandbox (`sandbox` is its command), and return the run directory."""
    kind = KINDS[name]
    process = _start(name, folder / name, environ)
    assert process.wait(60) == 0, (folder / name / "output").read_text()
    path = find_run(folder / name)
    for pattern in kind.get("once", ()):
        wait_for(partial(_has, folder / name, pattern), pattern)
    if "lose" in kind:
        host = read_manifest(path)["hosts"][kind["lose"]]
        subprocess.run([*sandbox, "kill", host], check=True)
    wait_for(lambda: read_manifest(path)["outcome"]["state"] in ENDED, "the end")
    if "lose" in kind:
        subprocess.run([*sandbox, "start", host], check=True)
    assert read_manifest(path)["outcome"]["state"] == kind["state"]
    return path


def _start(name: str, folder: Path, environ: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(Path(__file__).with_name("training.py").read_text())
    kind = KINDS[name]
    words = [*COMMON, *kind.get("words", ()), "--", "train.py", *kind["how"].split()]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*LAUNCH, *words],
            cwd=folder,
            env={**(environ or clean_environ()), "RECORDED_IN": str(folder.parent)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _has(folder: Path, pattern: str) -> bool:
    return bool(list(folder.glob(f"runs/*/*/{pattern}")))
