"""Real SLURM clusters for a session's tests: without accounting, and with it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.seam import PATIENCE, Result, clean_environ, find_processes, run_outside, wait_for

COMMAND = Path(__file__).parents[3] / "slurm" / "sandbox"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"}
"""States that no job of these tests leaves again."""
SOON = 60
"""Seconds that processes have to end, once they are told to: those that are left live for longer."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A running cluster: nodes n0 to n3, with 16 CPUs and 2 GPUs each as SLURM counts them."""

    folder: Path
    environ: dict[str, str]
    """Of a user's shell on the login node: clean, with SLURM_CONF."""

    @property
    def conf(self) -> Path:
        """Its slurm.conf."""
        return self.folder / "slurm.conf"

    @property
    def has_cgroups(self) -> bool:
        """Whether its SLURM tracks and constrains jobs by cgroups."""
        return "ProctrackType=proctrack/cgroup" in self.conf.read_text()

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a command, one of SLURM's as a rule, and return its output; it must succeed."""
        done = subprocess.run(
            words,
            env={**self.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, (
            f"{shlex.join(map(str, words))}: {done.returncode}: {done.stderr}{done.stdout}"
        )
        return done.stdout

    def break_it(self, *words: str) -> str:
        """Run `slurm/sandbox WORDS` on this cluster: kill NAME, start NAME, restart-controller, ps."""
        return self.run(sys.executable, COMMAND, "--folder", self.folder, *words)

    def launch(self, *words: str | bytes, cwd: Path, env: Mapping[str, str] | None = None) -> Result:
        """Run `launch WORDS` as a user on the login node does."""
        return run_outside(words, cwd, {**self.environ, **(env or {})})

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Have a node, or a daemon, dead for a while."""
        self.break_it("kill", name)
        try:
            yield
        finally:
            self.break_it("start", name)

    def list_processes(self, program: str = "") -> list[str]:
        """Return the processes of jobs (those of a program), as "PID NODE PROGRAM"."""
        lines = self.break_it("ps").splitlines()
        return [line for line in lines if not program or line.split(maxsplit=2)[2] == program]

    def wait_empty(self) -> None:
        """Wait until no job has left a process behind."""
        tell = partial(self.break_it, "ps")
        wait_for(lambda: not self.list_processes(), "the end of jobs' processes", SOON, tell)

    def list_states(self, job_id: str) -> list[str]:
        """The states of a job, or of all members of an array."""
        words = ("squeue", "--states=all", "--array", "--noheader", f"--jobs={job_id}", "--format=%T")
        return self.run(*words).split()

    def wait(self, job_id: str, *states: str) -> str:
        """Wait until a job (each member of an array) is in one of the states, and return it (the first's)."""
        end = time.monotonic() + PATIENCE
        while not set(now := self.list_states(job_id)) <= set(states):
            stuck = ENDED & set(now) - set(states)
            if stuck or time.monotonic() > end:
                pytest.fail(
                    f"job {job_id} is {now}, not {states}: {self.run('scontrol', 'show', 'job', job_id)}"
                )
            time.sleep(0.1)
        return now[0]


def ask_command(
    *words: str | Path, env: Mapping[str, str] | None = None, preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run slurm/sandbox."""
    return subprocess.run(
        [sys.executable, COMMAND, *words],
        env={**clean_environ(), **(env or {})},
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def demand_programs(*options: str) -> None:
    """Skip where SLURM's programs are missing; in CI they are installed, and what stops that is a failure."""
    missing = ask_command("install", "--dry-run", *options)
    if missing.returncode == 0:
        return
    if not os.environ.get("LAUNCH_CI"):
        pytest.skip(f"needs a SLURM: {missing.stderr.strip()}")
    done = ask_command("install", *options)
    if done.returncode:
        pytest.fail(done.stderr, pytrace=False)


def demand_cgroups(sandbox: Sandbox) -> None:
    """Skip where SLURM cannot use cgroups: who is not root, or where version 2 has the controllers."""
    if not sandbox.has_cgroups:
        pytest.skip("the sandbox has no cgroups on this machine: `slurm/sandbox up --cgroups` says why")


def read_group(folder: Path) -> str:
    """The name of a cluster's own cgroup in each hierarchy; empty where it has none."""
    return str(json.loads((folder / "cluster.json").read_text())["cgroup"])


def list_groups(folder: Path, group: str) -> list[str]:
    """What is mounted in a cluster's folder, and its cgroups where this machine mounts the hierarchies."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found = Path("/sys/fs/cgroup").glob(f"*/{group}") if group else ()
    return [*(mount for mount in mounts if mount.startswith(f"{folder}/")), *map(str, found)]


def submit_script(sandbox: Sandbox, folder: Path, script: str, *options: str) -> str:
    """Submit a shell script by sbatch, its output in a folder, and return the job's number."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    words = ("--parsable", f"--output={folder}/%j.out", f"--chdir={folder}", *options)
    return sandbox.run("sbatch", *words, path).strip()


@contextmanager
def start_sandbox(*options: str) -> Iterator[Sandbox]:
    """A cluster; its folder's path is short, since munge's socket in it must be."""
    parent = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    folder = parent / "c"
    try:
        done = ask_command("--folder", folder, "up", *options)
        if done.returncode:
            pytest.fail(f"slurm/sandbox up {shlex.join(options)}: {done.stderr}", pytrace=False)
        yield Sandbox(folder, {**clean_environ(), "SLURM_CONF": str(folder / "slurm.conf")})
    finally:
        down = ask_command("--folder", folder, "down", "--now")
        shutil.rmtree(parent, ignore_errors=True)
    assert down.returncode == 0, down.stderr


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """A cluster without accounting, as many are."""
    demand_programs("--no-accounting")
    with start_sandbox("--no-accounting") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def accounted() -> Iterator[Sandbox]:
    """A cluster with accounting: sacct works."""
    demand_programs()
    with start_sandbox("--accounting") as cluster:
        yield cluster


@pytest.fixture
def nothing_is_left(sandbox: Sandbox, tmp_path: Path) -> Iterator[None]:
    """After the test no process of its jobs is there, once those that SLURM has just killed have gone.

    Neither one that names the test's folder, nor one in a node's cgroup or below its slurmd: that finds those
    that have left their session and emptied their environment. A job that a failed test leaves is ended: it
    would hold the nodes of those that come later.
    """
    yield
    try:
        await_nothing(str(tmp_path))
        sandbox.wait_empty()
    finally:
        sandbox.run("scancel", "--me")


def await_nothing(word: str) -> None:
    """Wait until no process is there whose command line or environment holds a word; they must go."""
    left = partial(find_processes, word)
    wait_for(lambda: not left(), "the processes' end", SOON, lambda: str(left()))


@pytest.fixture
def data(sandbox: Sandbox, tmp_path: Path) -> Iterator[Path]:
    """A folder that all nodes have but n2, which has a small /dev/shm, too: by mounts of its own."""
    folder = tmp_path / "data"
    (folder / "set").mkdir(parents=True)
    start = [sys.executable, str(COMMAND), "--folder", str(sandbox.folder), "start", "n2"]
    mounts = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && mount -t tmpfs tmpfs "$0" && exec "$@"'
    sandbox.break_it("kill", "n2")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounts, str(folder), *start],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sandbox.break_it("start", "n2")
        pytest.skip(f"this user cannot give a node mounts of its own: {done.stderr}")
    yield folder / "set"
    sandbox.break_it("kill", "n2")
    sandbox.break_it("start", "n2")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a cluster, and which has none yet."""
    with tempfile.TemporaryDirectory(prefix="sb", dir="/tmp") as parent:
        folder = Path(parent, "c")
        yield folder
        if folder.exists():
            ask_command("--folder", folder, "down", "--now")
