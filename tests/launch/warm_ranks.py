"""Runs programs in forked ranks and, for comparison, by exec, as with `start.warm=off`."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.launch.agents import close_on_exec, spawn_rank
from launcher.launch.warm.process import WarmProcess
from launcher.launch.warm.program import ExecNeededError
from tests.seam import clean_environ

PROGRAM = "program.py"
PLAIN_MODULES = ("json", "logging", "multiprocessing")
"""In torch's place where a program needs none: an import of torch takes a second."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank has ended."""

    code: int
    """-n for signal n."""
    out: str
    err: str
    pid: int

    def read(self) -> list[object]:
        """The list that it has printed as JSON."""
        found = json.loads(self.out)
        assert isinstance(found, list)
        return found


@dataclass(slots=True)
class Ranks:
    """A folder with a program, and ways to run it as a rank."""

    folder: Path
    environ: dict[str, str]
    warm: WarmProcess
    argv: tuple[str, ...] = (PROGRAM, "--lr", "3e-4")

    def write(self, code: str) -> None:
        """Make this the program."""
        (self.folder / PROGRAM).write_text(code)

    def fork(self, code: str | None = None, **variables: str) -> Ended:
        """Run the program in a forked rank; raises ExecNeededError."""
        if code is not None:
            self.write(code)
        return self.collect(self.begin_fork(**variables))

    def begin_fork(self, **variables: str) -> int:
        """Fork a rank and return its PID; raises ExecNeededError."""
        with open(os.devnull) as null:  # noqa: PTH123
            return self.warm.fork_rank(self.argv, {**self.environ, **variables}, (null.fileno(),) * 3)

    def exec(self, code: str | None = None, **variables: str) -> Ended:
        """Run the program by exec."""
        if code is not None:
            self.write(code)
        close_on_exec()  # as the agent does
        with contextlib.chdir(self.folder), open(os.devnull) as null:  # noqa: PTH123
            return self.collect(spawn_rank(self.argv, {**self.environ, **variables}, (null.fileno(),) * 3))

    def collect(self, pid: int, rank: int = 0) -> Ended:
        """Wait for a rank, and take its logs."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for stream in ("out", "err"):
            path = self.folder / "logs" / "0" / f"rank-{rank}.{stream}"
            texts.append(path.read_text() if path.exists() else "")
            path.unlink(missing_ok=True)
        return Ended(code, texts[0], texts[1], pid)

    def print_json(self, code: str, **variables: str) -> object:
        """Return what a program prints as JSON in a forked rank."""
        ended = self.fork(code, **variables)
        assert (ended.code, ended.err) == (0, ""), ended.err
        return json.loads(ended.out)


@contextlib.contextmanager
def open_ranks(
    folder: Path,
    argv: Sequence[str] = (PROGRAM, "--lr", "3e-4"),
    modules: Sequence[str] = PLAIN_MODULES,
    **variables: str,
) -> Iterator[Ranks]:
    """Start a warm process for a program in a folder, whose file is written later."""
    entry = {"local_rank": 0, "gpu": None, "memory": {"policy": "default"}, "num_workers": 3, "env": {}}
    cpus = str(min(os.sched_getaffinity(0))) if "OMP_NUM_THREADS" in variables else format_own_cpus()
    (folder / "plan.json").write_text(json.dumps({"ranks": [{**entry, "cpus": cpus}]}))
    (folder / "logs" / "0").mkdir(parents=True, mode=0o700)
    (folder / PROGRAM).touch()
    folder.chmod(0o700)
    base = {**clean_environ(), "PYTHONDONTWRITEBYTECODE": "", **variables}
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LAUNCH_QUIET": "1"}
    ours = {"LAUNCH_PLAN": str(folder / "plan.json"), "LAUNCH_RECORD_DIR": str(folder), "LAUNCH_ATTEMPT": "0"}
    environ = {**base, **given, **ours}
    with contextlib.chdir(folder):
        warm = WarmProcess.start(argv, base, modules)
    try:
        yield Ranks(folder, environ, warm, tuple(argv))
    finally:
        warm.close()


def format_own_cpus() -> str:
    """The CPUs of this process, in the kernel's notation."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def find_refusal(ranks: Ranks) -> str:
    """Why no rank is forked now; fails if one is."""
    try:
        pid = ranks.begin_fork()
    except ExecNeededError as error:
        return str(error)
    os.kill(pid, signal.SIGKILL)
    ranks.collect(pid)
    raise AssertionError("a rank was forked")
