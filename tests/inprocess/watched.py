"""Running programs whose hook keeps a heartbeat."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from launcher.watch.heartbeat import read_heartbeat
from launcher.watch.model import Heartbeat
from tests.inprocess.hooked import FOLDER, PYTHON, ROOT
from tests.seam import clean_environ

BEGIN = """
import os, signal, sys, time
import launcher

def wait(word="ready"):
    "Let the test look, and go on when it says so."
    print(word, flush=True)
    return input()
"""
"""Begin of a program that the test talks to."""


def list_heartbeats(folder: Path) -> list[Heartbeat]:
    """The heartbeats in a folder by rank."""
    found = [beat for path in folder.glob("rank-*.beat") if (beat := read_heartbeat(path))]
    return sorted(found, key=lambda beat: beat.rank)


class Program:
    """A running program, rank 0 of its job."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.path = folder / "rank-0.beat"

    def read(self) -> Heartbeat | None:
        """Return its heartbeat."""
        return read_heartbeat(self.path)

    def read_now(self) -> Heartbeat:
        """Return its heartbeat, which must be there."""
        found = self.read()
        assert found is not None
        return found

    def wait(self) -> str:
        """Wait until it waits, and return its word."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def go_on(self, word: str = "") -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[int, str, str]:
        """Return how it ended, and what more it wrote to stdout and stderr."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def make_watched_environ(folder: Path, **variables: str) -> dict[str, str]:
    """Return what the shim gives to a rank that is watched."""
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(folder)}
    path = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    return {**clean_environ(), **ours, **path, "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def start_program(
    code: str, folder: Path, python: tuple[str, ...] = PYTHON, **variables: str
) -> Generator[Program]:
    """Start a program whose heartbeat is in `folder/beats`; it is killed if it has not ended by itself."""
    beats = folder / "beats"
    beats.mkdir(exist_ok=True, mode=0o700)
    process = subprocess.Popen(
        [*python, "-c", BEGIN + code],
        cwd=folder,
        env=make_watched_environ(beats, **variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Program(process, beats)
    finally:
        process.kill()
        process.communicate()


def run_to_end(code: str, folder: Path, **variables: str) -> str:
    """Return what a program prints that ends by itself, without a word on stderr."""
    with start_program(code, folder, PYTHON, **variables) as program:
        code_out_err = program.finish()
    assert (code_out_err[0], code_out_err[2]) == (0, ""), code_out_err
    return code_out_err[1]


def is_mapped(path: str | os.PathLike[str], pid: int) -> bool:
    """Tell whether a process still has its heartbeat mapped; an exec ends that, whatever file is there."""
    try:
        inode, name = str(Path(path).stat().st_ino), Path(path).name
        with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as file:
            mapped = (line.rstrip("\n").split(None, 5)[4:] for line in file)
            return any(
                len(part) == 2 and part[0] == inode and part[1].endswith(f"/{name}") for part in mapped
            )
    except OSError:
        return False
