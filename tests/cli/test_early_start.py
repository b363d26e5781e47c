"""The warm process that is started before the configuration is composed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launcher.cli.arguments import parse_command
from launcher.cli.early_start import find_early_program
from tests.seam import LAUNCH, clean_environ, run_outside

USES_TORCH = "import torch\n"
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
    ("plan", "x.py"),
    ("dry_run=true", "x.py"),
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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a program that uses torch, and one that does not."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(USES_TORCH)
    Path("plain.py").write_text("import os\n")
    return tmp_path


def find(words: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    return find_early_program(parse_command(words), {**clean_environ(), **(environ or {})})


@pytest.mark.parametrize("words", EARLY, ids=str)
def test_a_command_line_that_names_a_program(words: Sequence[str]) -> None:
    argv = find(words)
    assert argv and argv[0] == sys.executable


@pytest.mark.parametrize("words", OTHERS, ids=str)
def test_a_command_line_that_names_none(words: Sequence[str]) -> None:
    assert find(words) is None


def test_what_a_configuration_of_ones_own_may_change_is_composed_first() -> None:
    Path("conf").mkdir()
    assert find(EARLY[0]) and find(()) is None
    assert find(EARLY[0], {"PYTHON_EXEC": "/usr/bin/env"}) is None


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
def test_a_process_of_no_use_is_gone_before_the_program_runs(word: str, here: Path) -> None:
    Path("x.py").write_text(LOOK)
    done = run_outside([word, "nproc_per_node=1", "x.py"], here)
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


def test_nothing_is_left_of_a_start_that_fails(here: Path) -> None:
    Path("file").touch()
    result = run_outside(["agent=direct", "runs_dir=file", "x.py"], here)
    result.assert_error(3, "runs_dir")
    assert list_started(here) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_nothing_is_left_of_a_start_that_is_stopped_while_it_composes(number: int, here: Path) -> None:
    script = """
import os, sys
from launcher.config import compose
def wait(*_):
    os.close(int(sys.argv.pop()))
    while True:
        os.read(0, 1)
compose.compose = wait
sys.argv[0] = "launch"
from launcher.cli.main import main
main()
"""
    read, write = os.pipe()
    stdin, keep = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script, *EARLY[0], str(write)],
        env=clean_environ(),
        stdin=stdin,
        pass_fds=[write],
        stderr=subprocess.DEVNULL,
    ) as launcher:
        os.close(write)
        assert os.read(read, 1) == b""  # it composes
        assert len(list_started(here)) > 1
        launcher.send_signal(number)
        assert launcher.wait(60) in (-number, 128 + number)
    for descriptor in (read, stdin, keep):
        os.close(descriptor)
    deadline = time.monotonic() + 60
    while list_started(here) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list_started(here) == []


def test_the_ranks_are_forked_from_the_process_that_was_started_early(here: Path) -> None:
    """`LAUNCH` runs this program's interpreter; a process that composes slowly has imported torch by then."""
    Path("x.py").write_text("import sys\nimport torch\nprint('forked', not hasattr(sys, 'set_by_site'))\n")
    script = f"""
import sys
from launcher.agent import local_agent, rank_starter
def refuse(*_):
    raise AssertionError("another warm process")
local_agent.choose_starter = refuse
def start_rank(*_):
    raise AssertionError("a rank by exec")
rank_starter.ExecStarter.start_rank = start_rank
exec({LAUNCH[2]!r})
"""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            *EARLY[0][:1],
            "nproc_per_node=2",
            "restarts=1",
            "logs.console=all",
            "x.py",
        ],
        env=clean_environ(),
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.count("forked True")) == (0, 2), done
    assert list_started(here) == []
