"""`follow=true` on a real SLURM: jobs whose batch script writes the log and the manifest as launch does."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .conftest import Sandbox

pytestmark = pytest.mark.slurm
FOLLOW = """
import sys
from pathlib import Path
from launcher.slurm.follow import follow_jobs
sys.exit(follow_jobs([(Path(path), job_id) for path, job_id in zip(sys.argv[1::2], sys.argv[2::2])]))
"""
SCRIPT = """#!/bin/bash
umask 077
tell() { # tell STATE CODE [CAUSE]
    printf '{"slurm": {"job_id": "%s"}, "outcome": {"state": "%s", "exit_code": %s, "cause": "%s"}}' \\
        "$SLURM_JOB_ID" "$1" "$2" "${3-}" > manifest.new
    mv manifest.new manifest.json
}
tell running null
"""
SMALL = (
    "nodes=2",
    "nproc_per_node=1",
    "cluster.gpus_per_node=0",
    "cluster.cpus_per_task=1",
    "follow=true",
)
MEET = """
import os, pathlib, time
print("rank", os.environ["RANK"], flush=True)
pathlib.Path("met-" + os.environ["RANK"]).touch()
while not all(pathlib.Path(name).exists() for name in ("met-0", "met-1")):
    time.sleep(0.05)
os._exit({code})
"""
"""No rank ends before both have printed: the first that fails ends the others."""
TIMEOUT = 60


@dataclass(slots=True)
class Watcher:
    """A following process, and what it has printed."""

    process: "subprocess.Popen[bytes]"
    out: Path | None = None
    err: Path | None = None
    terminal: int | None = None
    seen: str = ""

    def read(self) -> str:
        """Everything printed so far, without a terminal's control sequences."""
        if self.terminal is None:
            assert self.out and self.err
            return self.out.read_text() + self.err.read_text()
        while select.select([self.terminal], [], [], 0)[0]:
            try:
                data = os.read(self.terminal, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not data:
                break
            self.seen += data.decode()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", self.seen)

    def wait_for(self, *parts: str) -> str:
        """Wait until all of the parts have been printed."""
        end = time.monotonic() + TIMEOUT
        while not all(part in (text := self.read()) for part in parts):
            assert time.monotonic() < end, (parts, text)
            assert self.process.poll() is None or all(part in self.read() for part in parts), (
                parts,
                self.read(),
            )
            time.sleep(0.05)
        return text

    def type(self, text: str) -> None:
        """Type on the terminal; `\\x03` is Ctrl-C."""
        assert self.terminal is not None
        os.write(self.terminal, text.encode())

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and what was printed."""
        end = time.monotonic() + TIMEOUT
        while self.process.poll() is None:  # the terminal has to be read, or the process cannot write
            assert time.monotonic() < end, self.read()
            self.read()
            time.sleep(0.05)
        return self.process.returncode, self.read()


@dataclass(slots=True)
class Desk:
    """A user on the login node, with jobs and processes that follow them."""

    sandbox: Sandbox
    folder: Path
    jobs: list[str] = field(default_factory=list)
    watchers: list[Watcher] = field(default_factory=list)

    def submit(self, body: str, *options: str, name: str = "run") -> tuple[Path, str]:
        """Submit a job, held until its manifest is written; returns its run directory and number."""
        run = self.folder / "runs" / name
        (run / "logs").mkdir(parents=True)
        (run / "script").write_text(SCRIPT + body)
        words = ("sbatch", "--parsable", "--hold", "--open-mode=append", f"--chdir={run}", *options)
        job = self.sandbox.run(*words, f"--output={run}/logs/slurm-%j.out", run / "script").strip()
        manifest = {"slurm": {"job_id": job}, "outcome": {"state": "submitted"}}
        (run / "manifest.json").write_text(json.dumps(manifest))
        self.jobs.append(job)
        return run, job

    def release(self, job: str) -> None:
        """Let a job go."""
        self.sandbox.run("scontrol", "release", job)

    def follow(self, *jobs: tuple[Path, str]) -> Watcher:
        """Follow jobs with the output in files."""
        number = len(self.watchers)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        with out.open("w") as out_file, err.open("w") as err_file:
            process = subprocess.Popen(
                self.command(jobs),
                env=self.sandbox.environ,
                stdout=out_file,
                stderr=err_file,
                stdin=subprocess.DEVNULL,
            )
        self.watchers.append(Watcher(process, out, err))
        return self.watchers[-1]

    def follow_on_terminal(self, *jobs: tuple[Path, str]) -> Watcher:
        """Follow jobs on a terminal, where Ctrl-C reaches the process and its children."""
        terminal, other = pty.openpty()
        process = subprocess.Popen(
            self.command(jobs),
            env={**self.sandbox.environ, "TERM": "xterm", "COLUMNS": "250"},
            preexec_fn=lambda: os.login_tty(other),  # noqa: PLW1509 - there is one thread
            pass_fds=(other,),
        )
        os.close(other)
        self.watchers.append(Watcher(process, terminal=terminal))
        return self.watchers[-1]

    def command(self, jobs: Sequence[tuple[Path, str]]) -> list[str]:
        """The command line of a process that follows."""
        return [sys.executable, "-c", FOLLOW, *(str(word) for job in jobs for word in job)]


@pytest.fixture
def desk(sandbox: Sandbox, tmp_path: Path) -> Iterator[Desk]:
    """A desk; whatever its jobs and processes are, they are gone after the test."""
    desk = Desk(sandbox, tmp_path)
    yield desk
    for watcher in desk.watchers:
        if watcher.process.poll() is None:
            watcher.process.kill()
            watcher.process.wait()
        if watcher.terminal is not None:
            os.close(watcher.terminal)
    if desk.jobs:
        sandbox.run("scancel", *desk.jobs)
        for job in desk.jobs:
            sandbox.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def test_the_place_in_the_queue_and_the_expected_start_are_told(desk: Desk) -> None:
    first = desk.submit("sleep 600", "--nodes=4", "--exclusive", "--time=10", name="first")
    desk.release(first[1])
    desk.sandbox.wait(first[1], "RUNNING")
    second = desk.submit("true", "--nodes=4", "--exclusive", "--time=10", name="second")
    third = desk.submit("true", "--nodes=4", "--exclusive", "--time=10", name="third")
    for job in (second, third):
        desk.release(job[1])
    watcher = desk.follow(third)
    text = watcher.wait_for(f"launch: job {third[1]} waits: Priority (jobs of higher priority go first)")
    assert "position 2 of 2 in main" in text, text


def test_the_controller_may_go_away_meanwhile(desk: Desk) -> None:
    stop = desk.folder / "stop"
    job = desk.submit(f"""
echo '[n0:0] before'
while [ ! -e '{stop}' ]; do sleep 0.1; done
echo '[n0:0] after'
echo 'launch: succeeded' >&2
tell succeeded 0
""")
    desk.release(job[1])
    watcher = desk.follow(job)
    watcher.wait_for("[n0:0] before")
    desk.sandbox.break_it("restart-controller")
    stop.touch()
    status, text = watcher.end()
    assert status == 0 and "[n0:0] after\n" in text, text
    assert text.count("SLURM asked again") <= 1, text


def test_ctrl_c_asks_and_detaches(desk: Desk) -> None:
    job = desk.submit("sleep 600")
    watcher = desk.follow_on_terminal(job)
    watcher.wait_for("JobHeldUser")
    watcher.type("\x03")
    watcher.wait_for(f"cancel job {job[1]}, or detach? [c/d]")
    watcher.type("what\n")
    watcher.wait_for("what", "launch: c cancels, d detaches and lets it go on, Ctrl-C detaches too")
    watcher.type("d\n")
    status, text = watcher.end()
    assert status == 0
    assert f"launch: detached: job {job[1]} goes on; launch logs -f {job[0]}" in text, text
    assert desk.sandbox.list_states(job[1]) == ["PENDING"]


def test_ctrl_c_asks_and_cancels_and_stays_to_the_end(desk: Desk) -> None:
    job = desk.submit("""
trap 'echo "launch: stopped after 1.0 s" >&2; tell stopped 143 cancelled; exit 143' TERM
echo '[n0:0] step 1/9 loss 5.5'
while :; do sleep 0.1; done
""")
    desk.release(job[1])
    watcher = desk.follow_on_terminal(job)
    watcher.wait_for("[n0:0] step 1/9 loss 5.5", "step 1/9", "loss 5.5")
    watcher.type("\x03")
    watcher.wait_for("[c/d]")
    watcher.type("c\n")
    status, text = watcher.end()
    assert status == 130
    assert "launch: stopped after 1.0 s" in text, text
    desk.sandbox.wait(job[1], "CANCELLED")


@pytest.mark.parametrize("code", [0, 3, 137])
def test_launch_follows_what_it_submits(desk: Desk, code: int) -> None:
    words = (*SMALL, "logs.console=all", "--", sys.executable, "-c", MEET.format(code=code))
    done = desk.sandbox.launch(*words, cwd=desk.folder)
    assert done.code == code, done
    for rank in (0, 1):
        assert re.search(rf"^\[n\d:{rank}\] rank {rank}$", done.out, re.MULTILINE), done
    run = next((desk.folder / "runs").glob("*/*"))
    outcome = json.loads((run / "manifest.json").read_text())["outcome"]
    assert (outcome["state"], outcome["exit_code"]) == ("failed" if code else "succeeded", code)
    assert done.err.splitlines()[-1] == f"launch: run directory {run}", done
