"""Runs a program by itself and by `launch`: what it writes, and how it ends."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import IO

from tests.seam import clean_environ

PROGRAMS = Path(__file__).parents[1] / "user_programs"
TIMEOUT = 300
OUR_LINE = re.compile(r"^launch(-rank)?: .*\n", re.MULTILINE)
MASKS = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"^(USDT|STAGE):.*\n", re.MULTILINE), ""),
    (re.compile(r"/tmp/tmp\w+"), "/tmp/…"),
    (re.compile(r"(pid|thread|Thread)[ =:]+\d+", re.IGNORECASE), r"\1 …"),
    (re.compile(r"\d+\.\d+ (ms|s|seconds)\b"), r"… \1"),
    (re.compile(r"\[[WEI]\d{4} \d\d:\d\d:\d\d\.\d+ "), "[… "),
    (re.compile(r"'train_(runtime|\w+_per_second)': '[\d.]+'"), r"'train_\1': …"),
)
"""What differs from one process to the next, in spite of anything."""
QUIETED = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
}
"""One thread, since the order of a sum depends on their number."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and how it is run."""

    name: str
    words: tuple[str, ...]
    """The program's argv, with `python` for the interpreter."""
    stdin: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a program."""

    code: int
    """As a shell gives it."""
    texts: tuple[str, ...]
    """Its stdout and its stderr, masked."""
    said: str = ""
    """What was written beside that: the launcher's lines in its stderr, and its own."""


def copy_programs(folder: Path) -> Path:
    """Copy the programs into a folder, in which they run."""
    work = folder / "work"
    shutil.copytree(PROGRAMS, work, ignore=shutil.ignore_patterns("__pycache__"))
    return work


def make_environ(case: Case, folder: Path) -> dict[str, str]:
    """Return the variables that a program is started with."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return {**clean_environ(), **QUIETED, **caches, "PYTHONDONTWRITEBYTECODE": "", **case.environ}


def run_alone(case: Case, work: Path) -> Ran:
    """Run it as a process of its own, with what torch.distributed needs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory(dir=work.parent) as folder, contextlib.ExitStack() as stack:
        paths = [Path(folder) / kind for kind in ("out", "err")]
        out, err = (stack.enter_context(path.open("wb")) for path in paths)
        done = subprocess.run(
            expand(case),
            cwd=work,
            env={**make_environ(case, work.parent), **place},
            stdin=stack.enter_context(open_stdin(case)),
            stdout=out,
            stderr=err,
            start_new_session=True,
            timeout=TIMEOUT,
            check=False,
        )
        return Ran(to_status(done.returncode), tuple(mask(path) for path in paths))


def make_launch(*settings: str) -> Callable[[Case, Path], Ran]:
    """Return how a program is run by `launch` with some settings."""

    def run(case: Case, work: Path) -> Ran:
        command = [str(Path(sys.executable).with_name("launch")), "nproc_per_node=1", *settings]
        done = run_command(
            [*command, "--", *(expand(case) if case.words[0] == "python" else case.words)], case, work
        )
        try:
            (logs,) = (work / "runs").glob("*/*/logs/0")
            files = [logs / f"rank-0.{kind}" for kind in ("out", "err")]
            raw = "".join(path.read_text(errors="replace") for path in files)
            said = "".join(found.group() for found in OUR_LINE.finditer(raw)) + done.stderr
            return Ran(done.returncode, tuple(mask(path) for path in files), said)
        except (ValueError, OSError):
            return Ran(done.returncode, (), done.stderr)
        finally:
            shutil.rmtree(work / "runs", ignore_errors=True)

    return run


def run_command(command: Sequence[str], case: Case, work: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command with the program's stdin, in its folder."""
    environ = make_environ(case, work.parent) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [case.environ.get("PYTHONPATH", "")]))
    }
    if not environ["PYTHONPATH"]:
        del environ["PYTHONPATH"]
    with open_stdin(case) as stdin:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def open_stdin(case: Case) -> Iterator[IO[bytes]]:
    """Open a file with what the program reads."""
    with tempfile.TemporaryFile() as file:
        file.write(case.stdin.encode())
        file.seek(0)
        yield file


def expand(case: Case) -> list[str]:
    """Return the command line of a rank."""
    if case.words[0] == "python":
        return [sys.executable, *case.words[1:]]
    return [sys.executable, *case.words]


def to_status(code: int) -> int:
    """Return an exit code as a shell gives it."""
    return 128 - code if code < 0 else code


def mask(path: Path) -> str:
    """Return a rank's output without what differs from one process to the next."""
    text = OUR_LINE.sub("", path.read_text(encoding="utf-8", errors="surrogateescape"))
    for pattern, replacement in MASKS:
        text = pattern.sub(replacement, text)
    return text


def describe_difference(alone: Ran, ran: Ran) -> str:
    """Return what is different, as a diff; empty if nothing is."""
    found = [] if alone.code == ran.code else [f"exit code {ran.code}, by itself {alone.code}"]
    if len(ran.texts) != len(alone.texts):
        return "\n".join([*found, f"{len(ran.texts)} files of output"])
    for number, (before, after) in enumerate(zip(alone.texts, ran.texts, strict=True)):
        if before != after:
            kind = "stdout" if number < len(alone.texts) // 2 else "stderr"
            lines = unified_diff(
                before.splitlines(), after.splitlines(), f"{kind} by itself", kind, n=0, lineterm=""
            )
            found += [line[:600] for line in lines]
    return "\n".join(found)
