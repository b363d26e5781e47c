"""The one place that knows how `launch` is called, in this process and as a real command, what is replaced
for that, and how what it has started is waited for."""

import contextlib
import ctypes
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launcher.config.start import LIBRARY_PREFIXES
from launcher.plan.variables import HONOURED

if TYPE_CHECKING:
    from launcher.config.settings import Settings
    from launcher.launch.job import JobSpec

PATIENCE = 240
"""Seconds to wait for what takes a few on an idle machine; pytest-timeout ends a test after 300."""
LAUNCH = (
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'launch'; from launcher.cli.main import main; main()",
)
"""`launch`, as its entry point starts it."""
QUICK_AGENT = str(Path(__file__).parent / "launch" / "quick_agent")
"""For PYTHONPATH: see there."""
LOGIN_NODE = Path(__file__).parent / "data" / "login_node"
"""For PATH: an sbatch that takes no job."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command line ended."""

    code: int
    out: str
    err: str

    def assert_error(self, code: int, *parts: str) -> None:
        """Assert one line on stderr that starts as our errors do and has these parts, and no output."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.startswith("launch: error: "), self.err
        assert self.err.endswith("\n") and self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        for part in parts:
            assert part in self.err, self.err


Launch = Callable[..., Result]
"""Runs a command line: the fixture `launch`, and what tests make of it."""


def run_inside(words: Sequence[str], encoding: str = "utf-8") -> Result:
    """Run a command line in this process; what would start something is an error of the test.

    With another encoding of the streams, as by PYTHONIOENCODING, they are prepared as the entry point does.
    """
    from launcher.cli import main
    from launcher.launch import local_run

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError(f"{words} would start a job")

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, newline="") for _ in range(2))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(local_run, "execute_job", refuse)
        if encoding != "utf-8":
            main.open_streams()
        code = main.run_guarded(list(words))
    return Result(code, *(read_buffer(stream) for stream in (out, err)))


def read_buffer(stream: io.TextIOWrapper) -> str:
    """What has been written to a stream in memory."""
    stream.seek(0)
    return stream.read()


def run_outside(
    words: Sequence[str | bytes],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = PATIENCE,
    **options: object,
) -> Result:
    """Run a command line as a process of its own."""
    environ = {**clean_environ(), **(env or {})}
    done = subprocess.run(  # type: ignore[call-overload]  # options are subprocess.run's own
        [*LAUNCH, *words], cwd=cwd, env=environ, capture_output=True, timeout=timeout, check=False, **options
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def specify(
    overrides: Sequence[str],
    program: tuple[str, ...] | None = None,
    environ: Mapping[str, str] = os.environ,
    run_dir: Path | None = None,
) -> "JobSpec":
    """Specify the job of a command line; its run directory is as `launch` chooses it, or given."""
    from launcher.cli.run import specify_job
    from launcher.config.compose import compose
    from launcher.config.run_path import RunPath, choose_run_path
    from launcher.config.words import find_sources

    composed = compose(find_sources(None, None, None), overrides)
    path = RunPath("test", run_dir, "new_run_dir") if run_dir else choose_run_path(composed, program)
    return specify_job(composed, program, path, environ)


def compose_settings(*overrides: str, run_dir: Path | None = None) -> "Settings":
    """The settings of a command line."""
    from launcher.config.compose import compose, resolve
    from launcher.config.words import find_sources

    return resolve(compose(find_sources(None, None, None), overrides), run_dir)


def list_loaded(words: Sequence[str], cwd: Path, **variables: str) -> set[str]:
    """The modules that a command line, which must succeed, has loaded in an interpreter of its own."""
    return list_modules(
        f"from launcher.cli.main import run_guarded\nassert run_guarded({list(words)}) == 0", cwd, **variables
    )


def list_modules(script: str, cwd: Path, **variables: str) -> set[str]:
    """The modules that a script has loaded at its end, in an interpreter of its own."""
    script += "\nimport sys\nprint('LOADED', *sys.modules)"
    environ = {**clean_environ(), **variables}
    command = (sys.executable, "-c", script)
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED "))
    return set(line.split()[1:])


def in_shell(line: str, cwd: Path, **variables: str) -> Result:
    """Run a line of bash in which $LAUNCH is `launch`."""
    script = f'set -o pipefail; launch() {{ {shlex.join(LAUNCH)} "$@"; }}; {line}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env={**clean_environ(), **variables},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"))


def drop_powers(*capabilities: int) -> None:
    """Take capabilities of root's, after the next exec; permissions hold then, if none are named.

    Those are CAP_DAC_OVERRIDE (1) and _READ_SEARCH (2). To be called between fork and exec. Another user
    would not do: it may not even read this interpreter.
    """
    if os.geteuid() == 0:
        for capability in capabilities or (1, 2):
            if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                raise OSError(ctypes.get_errno(), "a capability cannot be dropped")


def clean_environ() -> dict[str, str]:
    """Return this process's environment without what changes a job's placement or size, or a plan shows.

    Libraries that a test imports in this process leave variables of their own.
    """
    ours = ("PET_", "LAUNCH_", "TORCHELASTIC_", "HYDRA_", "COMP_", *HONOURED, *LIBRARY_PREFIXES)
    slurms = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_")
    return {name: value for name, value in os.environ.items() if not name.startswith((*ours, *slurms))}


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in a folder, in an environment that asks for nothing, as on a login node: there is an sbatch."""
    patch.chdir(folder)
    for name in set(os.environ) - set(clean_environ()):
        patch.delenv(name)
    if not shutil.which("sbatch"):
        patch.setenv("PATH", f"{os.environ['PATH']}:{LOGIN_NODE}")


@dataclass
class Started:
    """A `launch` that runs in a folder of its own, its output in files."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    mark: str

    def read(self, stream: str = "stderr") -> str:
        return (self.folder / stream).read_text(errors="replace")

    def wait(self, timeout: float = PATIENCE) -> int:
        return self.process.wait(timeout)

    def run_dir(self) -> Path:
        return find_run(self.folder)

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir() / "manifest.json").read_text())
        return found

    def log(self, rank: int = 0, ending: str = "out", attempt: int = 0) -> str:
        return (self.run_dir() / f"logs/{attempt}/rank-{rank}.{ending}").read_text()

    def count_said(self, word: str) -> int:
        """How many ranks have said this."""
        return sum(word in path.read_text() for path in self.folder.glob("runs/*/*/logs/*/rank-*.out"))

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


def find_working_in(folder: Path) -> list[int]:
    """Other processes whose working directory this is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").samefile(folder) and int(entry.name) != os.getpid():
                found.append(int(entry.name))
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
        process.wait(PATIENCE)


def run_to_end(folder: Path, text: str, *words: str, code: int = 0, **variables: str) -> Started:
    """Run a program's text to its end, which has this exit code, and nothing is left."""
    with start(folder, *words, "--", write_program(folder, text), **variables) as started:
        assert started.wait(120) == code, started.read()
        assert started.survivors() == []
    return started


def wait_for(
    condition: Callable[[], object], what: str, timeout: float = PATIENCE, tell: Callable[[], str] = str
) -> None:
    """Wait until a condition holds; where it does not come to, the test fails with what `tell` says."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:.0f} s for {what} in vain: {tell()}")
        time.sleep(0.03)


@contextlib.contextmanager
def mount_disk(place: Path, mib: int) -> Iterator[None]:
    """Have a disk of this size in a new folder; skips the test where that is not allowed."""
    if os.geteuid():
        pytest.skip("mounting a small filesystem needs root")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def find_run(folder: Path) -> Path:
    """The one run directory that was made in a folder."""
    (found,) = (folder / "runs").glob("*/*")
    return found


def write_script(path: Path, text: str) -> None:
    """Write a command: what a shell does."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def find_port() -> int:
    """A port of this host that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def write_program(folder: Path, text: str) -> str:
    """Write a program that the ranks run, and return its path."""
    path = folder / "program.py"
    path.write_text(text)
    return str(path)
