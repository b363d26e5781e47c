"""The warm process that is started before the configuration is composed."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.cli.early_start import find_early_program
from launcher.cli.main import parse_command
from tests.seam import LAUNCH, clean_environ, run_outside, wait_for

EARLY: tuple[Sequence[str], ...] = (
    ("agent=direct", "x.py"),
    ("nproc_per_node=2", "gc=frozen", "nodes=2", "cluster.time=10", "x.py", "--lr", "1"),
    ("-r", "--", sys.executable, "-u", "x.py"),
    ("~gc", "-m", "x"),
    ("agent=direct",),
    ("+model=gpt2",),
)
"""Command lines that name a program whose ranks may be forked."""
OTHERS: tuple[Sequence[str], ...] = (
    ("program=other",),
    ("--cfg", "job"),
    ("-cd", "elsewhere", "x.py"),
    ("--multirun", "name=a,b", "x.py"),
    ("x.y",),
    ("missing.py",),
    ("plain.py",),
    ("--", "true"),
)
"""Those that ask for something else, or name no program that uses torch."""


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    """A working directory with a program that uses torch, and one that does not."""
    (here / "x.py").write_text("import torch\n")
    (here / "plain.py").write_text("import os\n")
    return here


def find(words: Sequence[str], **variables: str) -> tuple[str, ...] | None:
    return find_early_program(parse_command(words), {**clean_environ(), **variables})


def test_which_command_lines_name_a_program() -> None:
    for words in EARLY:
        argv = find(words)
        assert argv and argv[0] == sys.executable, words
    for words in OTHERS:
        assert find(words) is None, words
    assert find(EARLY[0], PYTHON_EXEC="/usr/bin/env") is None
    # What a configuration of one's own may change is composed first.
    Path("conf").mkdir()
    assert find(EARLY[0]) and find(()) is None


LOOK = """
import torch
from pathlib import Path
def holds(entry):
    try:
        here = (entry / "cwd").readlink() == Path.cwd()
        return here and any("launch-warm" in str(link.readlink()) for link in (entry / "fd").iterdir())
    except OSError:
        return False
print("WARM", sum(holds(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()), flush=True)
"""


@pytest.mark.parametrize("word", ["agent=torchrun", "start.warm=off", "env.OPENBLAS_VERBOSE=1"])
def test_a_process_of_no_use_is_gone_before_the_program_runs(word: str, folder: Path) -> None:
    (folder / "x.py").write_text(LOOK)
    done = run_outside([word, "nproc_per_node=1", "x.py"], folder)
    assert done.code == 0 and "WARM 0\n" in done.out, done


def list_started(folder: Path) -> list[int]:
    """The processes whose working directory this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_nothing_is_left_of_a_start_that_fails(folder: Path) -> None:
    (folder / "file").touch()
    run_outside(["agent=direct", "runs_dir=file", "x.py"], folder).assert_error(3, "runs_dir")
    assert list_started(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_nothing_is_left_of_a_start_that_is_stopped_while_it_composes(number: int, folder: Path) -> None:
    script = f"""
import os, sys
from launcher.config import compose
def wait(*_):
    print("composes", flush=True)
    while True:
        os.read(0, 1)
compose.compose = wait
{LAUNCH[2]}
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", script, *EARLY[0]]
    with subprocess.Popen(command, env=clean_environ(), **pipes) as launcher:  # type: ignore[call-overload]  # its own
        assert launcher.stdout.readline() == b"composes\n"
        assert len(list_started(folder)) > 1
        launcher.send_signal(number)
        assert launcher.wait(60) in (-number, 128 + number)
    wait_for(lambda: not list_started(folder), "the end of all that was started")


def test_the_ranks_are_forked_from_the_process_that_was_started_early(folder: Path) -> None:
    """`LAUNCH` runs this program's interpreter; a process that composes slowly has imported torch by then."""
    program = "import sys\nimport torch\nprint('forked', not hasattr(sys, 'set_by_site'))\n"
    (folder / "x.py").write_text(program)
    script = f"""
import sys
from launcher.launch import supervisor
def refuse(*_):
    raise AssertionError("another warm process, or a rank by exec")
supervisor.start_warm = supervisor.spawn_rank = refuse
exec({LAUNCH[2]!r})
"""
    words = ["agent=direct", "nproc_per_node=2", "restarts=1", "logs.console=all", "x.py"]
    command, environ = [sys.executable, "-c", script, *words], clean_environ()
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.count("forked True")) == (0, 2), done
    assert list_started(folder) == []
