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
SILENT: tuple[Sequence[str], ...] = (
    ("agent=direct", "x.py"),
    ("agent=direct", "nproc_per_node=2", "gc=frozen", "dataloader.num_workers=1", "x.py", "--lr", "1"),
    ("agent=direct", "name=a", "runs_dir=b", "--", "x.py"),
    ("agent=direct", "-r", "--", sys.executable, "-u", "x.py"),
    ("agent=direct", "-m", "x"),
    ("agent=direct",),
    ("agent=direct", "+model=gpt2"),
)
"""Command lines whose ranks are certain to be forked here."""
OTHERS: tuple[Sequence[str], ...] = (
    ("plan", "x.py"),
    ("agent=torchrun", "x.py"),
    ("agent=direct", "nodes=2", "x.py"),
    ("agent=direct", "nodes=1:2", "x.py"),
    ("agent=direct", "dry_run=true", "x.py"),
    ("agent=direct", "cluster=slurm", "x.py"),
    ("agent=direct", "start.warm=off", "x.py"),
    ("agent=direct", "start.preload=[json]", "x.py"),
    ("agent=direct", "env.OMP_NUM_THREADS=1", "x.py"),
    ("agent=direct", "allocator.host=tcmalloc", "x.py"),
    ("agent=direct", "torchrun.max_restarts=1", "x.py"),
    ("agent=direct", "machine.snapshot=a", "x.py"),
    ("agent=direct", "hydra.mode=RUN", "x.py"),
    ("agent=direct", "+model=gpt2", "x.py"),
    ("agent=direct", "program=other"),
    ("agent=direct", "--cfg", "job"),
    ("agent=direct", "-cd", "elsewhere", "x.py"),
    ("agent=direct", "--multirun", "name=a,b", "x.py"),
    ("agent=direct", "x.y"),
    ("agent=direct", "~gc", "x.py"),
    ("agent=direct", "missing.py"),
    ("agent=direct", "plain.py"),
    ("agent=direct", "--", "true"),
)
"""Those that leave something open, or ask for something else."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a program that uses torch, and one that does not."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(USES_TORCH)
    Path("plain.py").write_text("import os\n")
    return tmp_path


def find(words: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    return find_early_program(parse_command(words), {**clean_environ(), **(environ or {})})


@pytest.mark.parametrize("words", SILENT, ids=str)
def test_a_command_line_that_says_enough(words: Sequence[str]) -> None:
    argv = find(words)
    assert argv and argv[0] == sys.executable


@pytest.mark.parametrize("words", OTHERS, ids=str)
def test_a_command_line_that_leaves_it_open(words: Sequence[str]) -> None:
    assert find(words) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7"},
        {"PET_NNODES": "2"},
        {"TORCHELASTIC_RUN_ID": "x"},
        {"LAUNCH_RANK_PLAN": "{}"},
        {"PYTHON_EXEC": "/usr/bin/env"},
    ],
    ids=str,
)
def test_an_environment_that_says_otherwise(environ: Mapping[str, str]) -> None:
    assert find(SILENT[0], environ) is None


def test_a_configuration_of_ones_own_is_composed_first() -> None:
    Path("conf").mkdir()
    assert find(SILENT[0]) is None


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
from launcher.config import composition
def wait(*_):
    os.close(int(sys.argv.pop()))
    while True:
        os.read(0, 1)
composition.compose = wait
sys.argv[0] = "launch"
from launcher.cli.main import main
main()
"""
    read, write = os.pipe()
    stdin, keep = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script, *SILENT[0], str(write)],
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
from launcher.agent import warm_starter
def refuse(*_):
    raise AssertionError("another warm process")
warm_starter.warm_up = refuse
from launcher.agent import local_agent, rank_starter
local_agent.warm_up = refuse
def start_rank(*_):
    raise AssertionError("a rank by exec")
rank_starter.ExecStarter.start_rank = start_rank
exec({LAUNCH[2]!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *SILENT[0][:1], "nproc_per_node=2", "logs.console=all", "x.py"],
        env=clean_environ(),
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.count("forked True")) == (0, 2), done
    assert list_started(here) == []
