"""Starts `launch` on real programs, and counts what is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LAUNCH = (sys.executable, "-c", "from launcher.cli import main; main()")
"""`launch`, as its entry point starts it."""


@dataclass
class Started:
    """A `launch` that runs in a folder of its own, its output in files."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    mark: str

    def read(self, stream: str = "stderr") -> str:
        return (self.folder / stream).read_text(errors="replace")

    def wait(self, timeout: float = 60) -> int:
        return self.process.wait(timeout)

    def run_dir(self) -> Path:
        (found,) = (self.folder / "runs").glob("*/*")
        return found

    def survivors(self) -> list[int]:
        """Processes other than `launch` itself that carry this start's mark."""
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in found if pid != self.process.pid and is_marked(pid, self.mark)]


def is_marked(pid: int, mark: str) -> bool:
    """Tell whether a living process was started with our mark in its environment."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def start(folder: Path, *words: str, **variables: str) -> Iterator[Started]:
    """Start `launch WORDS` in a folder; whatever is left at the end is killed."""
    mark = f"LAUNCH_TEST_MARK={uuid.uuid4()}"
    environ = {**os.environ, **dict([mark.split("=")]), **variables}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen([*LAUNCH, *words], cwd=folder, env=environ, stdout=out, stderr=err)
    started = Started(process, folder, mark)
    try:
        yield started
    finally:
        for pid in [process.pid, *started.survivors()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 40) -> None:
    """Wait until a condition holds; fails the test when it does not come to."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen in {timeout} s")
        time.sleep(0.02)


def write_program(folder: Path, text: str) -> str:
    """Write a program that the ranks run, and return its path."""
    path = folder / "program.py"
    path.write_text(text)
    return str(path)
