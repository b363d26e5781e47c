"""Small programs with traps do in forked ranks what they do by python (`programs.toml`)."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.seam import clean_environ, find_port

SMOKE = ("files: error", "tracebacks: hooks")
TIMEOUT = 300
OUR_LINE = re.compile(r"^launch(-rank)?: .*\n", re.MULTILINE)
MASKS = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"/tmp/tmp\w+"), "/tmp/…"),
    (re.compile(r"(pid|thread|Thread)[ =:]+\d+", re.IGNORECASE), r"\1 …"),
    (re.compile(r"\[[WEI]\d{4} \d\d:\d\d:\d\d\.\d+ "), "[… "),
)
"""What differs from one process to the next, in spite of anything."""


@dataclass(frozen=True, slots=True)
class Program:
    """An entry of `programs.toml`."""

    code: str
    argv: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """The whole command line, with `python` for the interpreter, if it is not that of `program.py`."""
    stdin: str = ""
    environ: Mapping[str, str] | None = None
    files: Mapping[str, str] | None = None
    settings: tuple[str, ...] = ()
    exec: str = ""
    """Why ranks are not forked; empty if they are."""

    def write(self, folder: Path) -> Path:
        """Write its files into a folder for one run."""
        for name, text in {**(self.files or {}), "program.py": self.code, "stdin": self.stdin}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a program."""

    code: int
    """As a shell gives it."""
    texts: tuple[str, ...]
    """Its stdout and its stderr, masked."""
    files: Mapping[str, bytes]
    """What it has left, by path."""


def read_programs() -> dict[str, Program]:
    """Read the programs by their names."""
    entries = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())["program"]
    by_name = {entry["name"]: entry for entry in entries}
    assert len(by_name) == len(entries), "two programs have the same name"
    programs = {}
    for name, own in by_name.items():
        entry = {**by_name.get(own.get("of", name), {}), "settings": [], "argv": [], "exec": "", **own}
        programs[name] = Program(**{key: entry[key] for key in Program.__slots__ if key in entry})
    return programs


PROGRAMS = read_programs()


def run(
    command: Sequence[str], program: Program, work: Path, place: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a command with the program's stdin and variables, in its folder; returns its code and output."""
    environ = {**clean_environ(), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", **(place or {})}
    with (
        (work / "stdin").open() as stdin,
        tempfile.TemporaryFile("w+", errors="surrogateescape") as out,
        tempfile.TemporaryFile("w+", errors="surrogateescape") as err,
    ):
        done = subprocess.run(
            command,
            cwd=work,
            env={**environ, **(program.environ or {})},
            stdin=stdin,
            stdout=out,
            stderr=err,
            start_new_session=True,
            timeout=TIMEOUT,
            check=False,
        )
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return done.returncode, texts


def mask(text: str, work: Path) -> str:
    """Return a text without what differs from one run to the next."""
    masked = OUR_LINE.sub("", text).replace(str(work), "FOLDER")
    for pattern, replacement in MASKS:
        masked = pattern.sub(replacement, masked)
    return masked


def collect(code: int, texts: Sequence[str], work: Path) -> Ran:
    """Return what came of a run."""
    paths = [path for path in work.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = {str(path.relative_to(work)): path.read_bytes() for path in paths}
    left = {name: data.replace(os.fsencode(work), b"FOLDER") for name, data in files.items()}
    return Ran(128 - code if code < 0 else code, tuple(mask(text, work) for text in texts), left)


def run_by_python(program: Program, work: Path) -> Ran:
    """Run it as a process of its own, with what torch.distributed needs."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    words = program.words or ("python", "program.py", *program.argv)
    command = [sys.executable, *words[words[0] == "python" :]]
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    code, texts = run(command, program, work, place)
    return collect(code, texts, work)


def run_by_launch(program: Program, work: Path) -> tuple[Ran, list[str]]:
    """Run it in a forked rank; returns the notices that it was not, too."""
    words = program.words or ("program.py", *program.argv)
    program_words = [sys.executable, *words[1:]] if words[0] == "python" else words
    launch = [str(Path(sys.executable).with_name("launch")), "nproc_per_node=1", "agent=direct"]
    code, own = run([*launch, *program.settings, "--", *program_words], program, work)
    (logs,) = (work / "runs").glob("*/*/logs/0")
    texts = [(logs / f"rank-0.{kind}").read_text(errors="surrogateescape") for kind in ("out", "err")]
    said = [found.group() for found in OUR_LINE.finditer("".join(texts))] + own[1].splitlines()
    notices = [line for line in said if "not forked" in line or "by itself" in line]
    shutil.rmtree(work / "runs")
    return collect(code, texts, work), notices


@pytest.mark.parametrize(
    "name", [name if name in SMOKE else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_program_leaves_in_a_forked_rank_what_it_leaves_by_python(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    for number in range(3):  # gloo may abort a plain python at its end, which the hook prevents in ranks
        alone = run_by_python(program, program.write(tmp_path / f"python-{number}"))
        if alone.code != 128 + signal.SIGABRT:
            break
    ran, notices = run_by_launch(program, program.write(tmp_path / "forked"))
    assert ran == alone
    assert bool(notices) == bool(program.exec) and program.exec in "".join(notices), notices
