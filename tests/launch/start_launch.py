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

LAUNCH = (sys.executable, "-c", "from launcher.cli.main import main; main()")
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
        return find_run(self.folder)

    def survivors(self) -> list[int]:
        """Processes other than `launch` itself that carry this start's mark."""
        return list(self.survivors_words())

    def survivors_words(self) -> dict[int, str]:
        """The same with their command lines."""
        return {pid: words for pid, words in find_processes(self.mark).items() if pid != self.process.pid}


def find_processes(word: str) -> dict[int, str]:
    """Other living processes whose command line or environment holds a word, with their command lines."""
    found = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with contextlib.suppress(OSError):
            command, environ = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            if word.encode() in command + environ and pid != os.getpid() and is_alive(pid):
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def is_alive(pid: int) -> bool:
    """Tell whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def start(folder: Path, *words: str, **variables: str) -> Iterator[Started]:
    """Start `launch WORDS` in a folder; whatever is left at the end is killed."""
    mark = f"LAUNCH_TEST_MARK={uuid.uuid4()}"
    inherited = {name: value for name, value in os.environ.items() if name != "LAUNCH_CI"}  # the tests' own
    environ = {**inherited, **dict([mark.split("=")]), **variables}
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


def wait_for(
    condition: Callable[[], object], what: str, timeout: float = 60, tell: Callable[[], str] = str
) -> None:
    """Wait until a condition holds; where it does not come to, the test fails with what `tell` says."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:.0f} s for {what} in vain: {tell()}")
        time.sleep(0.03)


def find_run(folder: Path) -> Path:
    """The one run directory that was made in a folder."""
    (found,) = (folder / "runs").glob("*/*")
    return found


def write_program(folder: Path, text: str) -> str:
    """Write a program that the ranks run, and return its path."""
    path = folder / "program.py"
    path.write_text(text)
    return str(path)
