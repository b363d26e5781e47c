"""Starts the jobs of `kinds.toml`, and waits for their ends."""

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.seam import LAUNCH, clean_environ, find_processes, find_run

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
                _wait_for(partial(_has, folder / name, pattern), f"{name}: {pattern}")
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
        _wait_for(partial(_has, folder / name, pattern), pattern)
    if "lose" in kind:
        host = json.loads((path / "manifest.json").read_text())["hosts"][kind["lose"]]
        subprocess.run([*sandbox, "kill", host], check=True)
    _wait_for(
        lambda: json.loads((path / "manifest.json").read_text())["outcome"]["state"] in ENDED, "the end"
    )
    if "lose" in kind:
        subprocess.run([*sandbox, "start", host], check=True)
    assert json.loads((path / "manifest.json").read_text())["outcome"]["state"] == kind["state"]
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


def _wait_for(condition: Callable[[], object], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}"
        time.sleep(0.1)
